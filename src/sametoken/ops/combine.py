"""combine: down projections, router weights, the sum over slots, and the residual.

    y = Σ_j weight_j · (down_e inner_j) + σ_s · (down_s inner_s) + residual

Shapes: routed [k, I], shared [Is], residual and y [H]; down [E, H, I], shared_down [H, Is].
Arithmetic: fp32; slots in order of rank, then the shared expert, then the residual, then one
rounding to the residual's dtype.
Promised: a row's bits depend on that row's inner values, its routing, its residual and the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.linear import dot
from sametoken.ops.router import Routing
from sametoken.rows import alone


def routed_sum(inner: Tensor, chosen: Tensor, weights: Tensor, down: Tensor) -> Tensor:
    """One row's experts in slot order: [k, I] → [H] fp32."""
    parts = [dot(down[e], alone(x)) for e, x in zip(chosen.tolist(), inner, strict=True)]
    total = weights[0] * parts[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total + weight * part
    return total


def combine(inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor) -> Tensor:
    """[n, k, I], [n, Is] and residual [n, H] → [n, H]."""
    rows = []
    for i, skip in enumerate(residual):
        total = routed_sum(inner.routed[i], routing.experts[i], routing.weights[i], w.down)
        if inner.shared is not None and routing.shared is not None and w.shared_down is not None:
            total = total + routing.shared[i] * dot(w.shared_down, alone(inner.shared[i]))
        rows.append((skip.float() + total).to(residual.dtype))
    return torch.stack(rows)
