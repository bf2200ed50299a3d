"""router: norm, expert choice and expert weights of one row.

    [l ; s] = [W ; w_s] · norm(x) = r · ([W ; w_s] · round(x ⊙ w))
    p = softmax(l)                chosen = the k largest p, ties to the lower expert
                                  in ascending order of the experts' ids
    weight_j = p_j / Σ_chosen p   shared = σ(s)

Shapes: x [H]; W [E, H] with w_s [1, H] stacked under it; chosen [k] int64 and weights [k];
shared [1].
Arithmetic: the norm as ops/norm tells; fp32 logits (no reduced-precision product) and softmax over
all experts; the sum over the chosen runs in ascending id. Weights stay fp32.
Why by id and not by rank: a kernel that owns a piece of the output and walks the distinct experts
of a pass in ascending id meets every row's experts in that row's own order, whoever else is there.
Promised: a row's bits depend on that row, the norm and the weights alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.ops.linear import dot_normed
from sametoken.ops.norm import Norm
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
    """experts [n, k] int64 in ascending id, weights [n, k] fp32, shared [n, 1] fp32 or None.

    distinct [1 + …] int32: how many different experts the pass has, then their ids ascending; made
    by backends whose kernels walk them, None elsewhere.
    """

    experts: Tensor
    weights: Tensor
    shared: Tensor | None
    distinct: Tensor | None = None


def router_row(logits: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    """One row's logits [E] fp32 → experts [k], weights [k] fp32."""
    probabilities = torch.softmax(logits, dim=-1)
    ranked = torch.sort(probabilities, descending=True, stable=True).indices
    chosen = ranked[: w.top_k].sort().values
    weights = probabilities[chosen]
    if w.renormalise:
        weights = weights / weights.sum()
    return chosen, weights


def router(x: Tensor, w: RouterWeights) -> Routing:
    """[n, H] → the rows' routing."""
    logits = [dot_normed(w.gate, row, w.norm) for row in alone(x)]
    experts, weights = zip(*(router_row(row[: w.experts], w) for row in logits), strict=True)
    shared = None
    if len(w.gate) > w.experts:
        shared = torch.stack([torch.sigmoid(row[w.experts :]) for row in logits])
    return Routing(torch.stack(experts), torch.stack(weights), shared)
