"""combine: down projections, router weights, the sum over slots, and the residual.

    y = Σ_j weight_j · (down_e inner_j) + σ_s · (down_s inner_s) + residual

Shapes: routed [k, I], shared [Is], residual and y [H]; down [E, H, I], shared_down [H, Is].
Arithmetic: fp32; slots in order, which is ascending expert id, then the shared expert, then the
residual, then one rounding to the residual's dtype.
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
    parts = [dot(down[e], x) for e, x in zip(chosen.tolist(), alone(inner), strict=True)]
    first, *others = (torch.stack(parts) * weights[:, None]).unbind()
    return sum(others, start=first)


def combine(inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor) -> Tensor:
    """[n, k, I], [n, Is] and residual [n, H] → [n, H]."""
    rows = zip(alone(inner.routed), routing.experts.unbind(), routing.weights.unbind(), strict=True)
    totals = [routed_sum(x, chosen, weights, w.down) for x, chosen, weights in rows]
    if inner.shared is not None and routing.shared is not None and w.shared_down is not None:
        shared = [dot(w.shared_down, x) for x in alone(inner.shared)]
        gates = routing.shared.unbind()
        totals = [t + g * s for t, g, s in zip(totals, gates, shared, strict=True)]
    skips = residual.unbind()
    out = [skip.float() + total for skip, total in zip(skips, totals, strict=True)]
    return torch.stack(out).to(residual.dtype)
