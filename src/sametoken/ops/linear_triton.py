"""linear on a GPU: one fp32 accumulator per output, K ascending in one chain.

Any block of outputs, tile of rows, step along K, and number of warps gives the same bits. Narrow
passes sum the squares of the norm in the same loop as the product; wide ones, where every row
meets many programs, once beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.norm import Norm
from sametoken.ops.schedules import schedule
from sametoken.ops.tiling import NARROW, diagonal, dot, early, ready, tile_for

# How a kernel comes by the norm: there is none; it sums the squares itself; it is given the scale
# of each row, and rows that were weighed before.
PLAIN, FUSED, GIVEN = 0, 1, 2


@triton.jit
def piece(rows_of, rows, live, at, inside, size: tl.constexpr):
    """x[rows, at]ᵀ → [step, tile]; zero outside."""
    where = rows[None, :].to(tl.int64) * size + at[:, None]
    return tl.load(rows_of + where, mask=live[None, :] & inside[:, None], other=0.0)


@triton.jit
def block_of(weight, outs, n_outs, at, inside, size: tl.constexpr):
    """W[outs, at] → [block, step]; zero outside."""
    where = outs[:, None].to(tl.int64) * size + at[None, :]
    return tl.load(weight + where, mask=(outs[:, None] < n_outs) & inside[None, :], other=0.0)


@triton.jit
def weigh(v, gain, at, inside):
    """x ⊙ w for a piece [step, tile], rounded once."""
    own = tl.load(gain + at, mask=inside, other=0.0)
    return (v.to(tl.float32) * own[:, None]).to(v.dtype)


@triton.jit
def product(
    weight, x, gain, outs, rows, n_outs, live, start, end,
    size: tl.constexpr, normed: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """W[outs, start:end] · x[rows]ᵀ → [block, tile] fp32, and Σ x² [tile] where `normed`."""
    acc = tl.zeros((block, tile), dtype=tl.float32)
    gram = tl.zeros((tile, tile), dtype=tl.float32)
    for k in range(start, end, step):
        at = k + tl.arange(0, step)
        inside = at < size
        w = block_of(weight, outs, n_outs, at, inside, size)
        v = piece(x, rows, live, at, inside, size)
        if normed:
            gram = dot(tl.trans(v), v, gram)
            v = weigh(v, gain, at, inside)
        acc = dot(w, v, acc)
    return acc, diagonal(gram, tile)


@triton.jit(do_not_specialize=["n"])
def _weigh_kernel(
    x, gain, y, scale, n, eps,
    size: tl.constexpr, tile: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    live = rows < n
    gram = tl.zeros((tile, tile), dtype=tl.float32)
    ready(pdl)
    for k in range(0, size, step):
        at = k + tl.arange(0, step)
        inside = at < size
        v = piece(x, rows, live, at, inside, size)
        gram = dot(tl.trans(v), v, gram)
        to = rows[None, :].to(tl.int64) * size + at[:, None]
        tl.store(y + to, weigh(v, gain, at, inside), mask=live[None, :] & inside[:, None])
    tl.store(scale + rows, tl.rsqrt(diagonal(gram, tile) / size + eps), mask=live)


def weighed(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """x ⊙ w [n, K] in the rows' dtype, and rsqrt(mean(x²) + eps) [n] fp32."""
    n, size = x.shape
    y, scale = torch.empty_like(x), torch.empty(n, dtype=torch.float32, device=x.device)
    _weigh_kernel[(triton.cdiv(n, NARROW),)](
        x, norm.weight, y, scale, n, norm.eps,
        size=size, tile=NARROW, step=128, num_warps=4, num_stages=3, **early(x.device),
    )  # fmt: skip
    return y, scale


def prepare(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None, int]:
    """What a kernel reads for norm(x): rows, the norm's weight or the rows' scales, and how."""
    if norm is None:
        return x.contiguous(), None, PLAIN
    if len(x) <= NARROW:
        return x.contiguous(), norm.weight, FUSED
    rows, scale = weighed(x.contiguous(), norm)
    return rows, scale, GIVEN


@triton.jit
def scaled(
    acc, squares, gain, rows, live, eps,
    size: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    """The product of weighed rows, times each row's rsqrt(mean(x²) + eps)."""
    if normed == 1:
        acc *= tl.rsqrt(squares / size + eps)[None, :]
    if normed == 2:
        acc *= tl.load(gain + rows, mask=live, other=0.0)[None, :]
    return acc


@triton.jit(do_not_specialize=["n"])
def _linear_kernel(
    x, weight, gain, skip, y, n, n_outs, eps,
    size: tl.constexpr, normed: tl.constexpr, residual: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(1) * block + tl.arange(0, block)
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    live = rows < n
    ready(pdl)
    acc, squares = product(
        weight, x, gain, outs, rows, n_outs, live, 0, size, size, normed == 1, tile, block, step
    )
    acc = scaled(acc, squares, gain, rows, live, eps, size, normed)
    at = rows[None, :].to(tl.int64) * n_outs + outs[:, None]
    stored = live[None, :] & (outs[:, None] < n_outs)
    if residual:
        acc += tl.load(skip + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=stored)


def project(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    dtype: torch.dtype,
    norm: Norm | None = None,
) -> Tensor:
    """[n, K] → [n, N], rounded once, to `dtype`."""
    n, size, outs = len(x), x.shape[1], len(weight)
    y = torch.empty((n, outs), dtype=dtype, device=x.device)
    rows, gain, normed = prepare(x, norm)
    tile = tile_for(n)
    s = schedule("linear", outs, size, tile, x.device)
    # Row tiles that share a block of weights run side by side, so that it is read once.
    _linear_kernel[(triton.cdiv(n, tile), triton.cdiv(outs, s.block))](
        rows, weight, gain, residual, y, n, outs, 0.0 if norm is None else norm.eps,
        size=size, normed=normed, residual=residual is not None,
        tile=tile, block=s.block, step=s.step,
        num_warps=s.warps, num_stages=s.stages, **early(x.device),
    )  # fmt: skip
    return y


def linear(
    x: Tensor, weight: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """[n, K] → [n, N]."""
    return project(x, weight, residual, x.dtype, norm)
