"""linear: an optional norm, a projection, an optional residual.

    y = W · x + residual        or        y = r · (W · round(x ⊙ w)) + residual

The second form is W · norm(x) + residual, with w and r as ops/norm tells.

Shapes: x [K], W [N, K], y and residual [N].
Arithmetic: fp32 products and accumulator; r multiplies the accumulator, then the residual joins it,
both in fp32; one rounding to the row's dtype at the end.
Promised: a row's bits depend on that row, its residual, the norm and W alone. A matrix product of
several rows does not keep this even on a CPU, so the reference multiplies one vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.norm import Norm, weighed
from sametoken.rows import alone


def dot(weight: Tensor, x: Tensor) -> Tensor:
    """W [N, K] · x [K] → [N] in fp32, unrounded."""
    return torch.mv(weight.float(), x.float())


def dot_normed(weight: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """W [N, K] · norm(x) for x [K] → [N] in fp32, unrounded."""
    h, r = weighed(x, norm)
    return r * dot(weight, h)


def linear_row(x: Tensor, weight: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
    """One row: [K] → [N]."""
    y = dot(weight, x) if norm is None else dot_normed(weight, x, norm)
    if residual is not None:
        y = residual.float() + y
    return y.to(x.dtype)


def linear(
    x: Tensor, weight: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """[n, K] → [n, N]."""
    rows, skips = alone(x), [None] * len(x) if residual is None else residual.unbind()
    return torch.stack(
        [linear_row(row, weight, norm, skip) for row, skip in zip(rows, skips, strict=True)]
    )
