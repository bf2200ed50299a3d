"""router: norm, expert choice and expert weights of one row.

    h = norm(x)     p = softmax(W h)     chosen = the k largest p, ties to the lower expert
    weight_j = p_j / Σ_chosen p          shared = σ(w_s · h)

Shapes: x, h [H]; W [E, H] with w_s [1, H] stacked under it; chosen [k] int64 and weights [k] in
order of rank; shared [1].
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
    """gate [E, H], or [E + 1, H] where the last row gates a shared expert."""

    norm: Norm
    gate: Tensor
    experts: int
    top_k: int
    renormalise: bool


class Routing(NamedTuple):
    """experts [n, k] int64, weights [n, k] fp32, shared [n, 1] fp32 or None; slot = rank."""

    experts: Tensor
    weights: Tensor
    shared: Tensor | None


def router_row(logits: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    """One row's logits [E] fp32 → experts [k], weights [k] fp32."""
    probabilities = torch.softmax(logits, dim=-1)
    ranked, order = torch.sort(probabilities, descending=True, stable=True)
    weights = ranked[: w.top_k]
    if w.renormalise:
        weights = weights / weights.sum()
    return order[: w.top_k], weights


def router(x: Tensor, w: RouterWeights) -> tuple[Tensor, Routing]:
    """[n, H] → normed rows [n, H] and their routing."""
    normed = [norm_row(row, w.norm) for row in alone(x)]
    logits = [dot(w.gate, h) for h in normed]
    experts, weights = zip(*(router_row(row[: w.experts], w) for row in logits), strict=True)
    shared = None
    if len(w.gate) > w.experts:
        shared = torch.stack([torch.sigmoid(row[w.experts :]) for row in logits])
    return torch.stack(normed), Routing(torch.stack(experts), torch.stack(weights), shared)
