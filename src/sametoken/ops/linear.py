"""linear: an optional norm, a projection, an optional residual.

    y = W · norm(x) + residual

Shapes: x [K], W [N, K], y and residual [N].
Arithmetic: fp32 products and accumulator; the residual joins the accumulator in fp32; one rounding
to the row's dtype at the end.
Promised: a row's bits depend on that row, its residual, the norm and W alone. A matrix product of
several rows does not keep this even on a CPU, so the reference multiplies one vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.norm import Norm, norm_row
from sametoken.rows import alone


def dot(weight: Tensor, x: Tensor) -> Tensor:
    """W [N, K] · x [K] → [N] in fp32, unrounded."""
    return torch.mv(weight.float(), x.float())


def linear_row(x: Tensor, weight: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
    """One row: [K] → [N]."""
    y = dot(weight, x if norm is None else norm_row(x, norm))
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
