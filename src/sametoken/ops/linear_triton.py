"""linear on a GPU: one fp32 accumulator per output, K ascending in one chain.

Any block of outputs, tile of rows, step along K, and number of warps gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.norm import Norm
from sametoken.ops.norm_triton import norm as norm_rows
from sametoken.ops.tiling import dot, tile_for


@triton.jit
def product(
    weight, x, outs, rows, n_outs, live, size,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """W[outs] · x[rows]ᵀ → [block, tile] fp32; weight and x point at contiguous rows of `size`."""
    acc = tl.zeros((block, tile), dtype=tl.float32)
    for k in range(0, size, step):
        at = k + tl.arange(0, step)
        inside = at < size
        w = tl.load(
            weight + outs[:, None].to(tl.int64) * size + at[None, :],
            mask=(outs[:, None] < n_outs) & inside[None, :],
            other=0.0,
        )
        v = tl.load(
            x + rows[None, :].to(tl.int64) * size + at[:, None],
            mask=live[None, :] & inside[:, None],
            other=0.0,
        )
        acc = dot(w, v, acc)
    return acc


@triton.jit
def _linear_kernel(
    x, weight, skip, y, n, n_outs, size,
    residual: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    rows = tl.program_id(1) * tile + tl.arange(0, tile)
    live = rows < n
    acc = product(weight, x, outs, rows, n_outs, live, size, tile, block, step)
    at = rows[None, :].to(tl.int64) * n_outs + outs[:, None]
    stored = live[None, :] & (outs[:, None] < n_outs)
    if residual:
        acc += tl.load(skip + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=stored)


def project(x: Tensor, weight: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[n, K] → [n, N], rounded once, to `dtype`."""
    n, size, outs = len(x), x.shape[1], len(weight)
    y = torch.empty((n, outs), dtype=dtype, device=x.device)
    tile, block = tile_for(n), 16 if outs < 4096 else 64
    grid = (triton.cdiv(outs, block), triton.cdiv(n, tile))
    _linear_kernel[grid](
        x, weight, residual, y, n, outs, size,
        residual=residual is not None, tile=tile, block=block, step=128, num_warps=4, num_stages=4,
    )  # fmt: skip
    return y


def linear(
    x: Tensor, weight: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """[n, K] → [n, N]."""
    normed = x.contiguous() if norm is None else norm_rows(x, norm)
    return project(normed, weight, residual, x.dtype)
