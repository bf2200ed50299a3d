"""router: norm, expert choice and expert weights of one row.

    h = norm(x)     p = softmax(W h)     chosen = the k largest p, ties to the lower expert
    weight_j = p_j / Σ_chosen p          shared = σ(w_s · h)

Shapes: x, h [H]; W [E, H]; w_s [H]; chosen [k] int64 and weights [k] in order of rank; shared [].
Arithmetic: fp32 logits (no reduced-precision product) and softmax over all experts; the sum over
the chosen runs in order of rank. Weights stay fp32; h is rounded to the row's dtype.
Promised: a row's bits depend on that row, the norm and the weights alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.ops.linear import dot
from sametoken.ops.norm import Norm, norm_row
from sametoken.rows import alone


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """gate [E, H]; shared_gate [1, H] or None where there is no shared expert."""

    norm: Norm
    gate: Tensor
    shared_gate: Tensor | None
    top_k: int
    renormalise: bool


class Routing(NamedTuple):
    """experts [n, k] int64, weights [n, k] fp32, shared [n, 1] fp32 or None; slot = rank."""

    experts: Tensor
    weights: Tensor
    shared: Tensor | None


def router_row(h: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    """One normed row: [H] → experts [k], weights [k] fp32."""
    probabilities = torch.softmax(dot(w.gate, h), dim=-1)
    ranked, order = torch.sort(probabilities, descending=True, stable=True)
    weights = ranked[: w.top_k]
    if w.renormalise:
        weights = weights / weights.sum()
    return order[: w.top_k], weights


def router(x: Tensor, w: RouterWeights) -> tuple[Tensor, Routing]:
    """[n, H] → normed rows [n, H] and their routing."""
    normed = [norm_row(alone(row), w.norm) for row in x]
    experts, weights = zip(*(router_row(h, w) for h in normed), strict=True)
    shared = None
    if w.shared_gate is not None:
        shared = torch.stack([torch.sigmoid(dot(w.shared_gate, h)) for h in normed])
    return torch.stack(normed), Routing(torch.stack(experts), torch.stack(weights), shared)
