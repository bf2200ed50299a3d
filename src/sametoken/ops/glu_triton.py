"""glu on a GPU: gate and up in one program, SiLU and product on the accumulators."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.linear_triton import block_of, piece, prepare, scaled, weigh
from sametoken.ops.norm import Norm
from sametoken.ops.schedules import schedule
from sametoken.ops.tiling import diagonal, dot, early, ready, tile_for


@triton.jit
def silu_product(
    weight, x, gain, outs, rows, inner, live, eps,
    size: tl.constexpr, normed: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """silu(gate · norm(x)) ⊙ (up · norm(x)) → [block, tile] fp32; weight [2·inner, size]."""
    gate = tl.zeros((block, tile), dtype=tl.float32)
    up = tl.zeros((block, tile), dtype=tl.float32)
    gram = tl.zeros((tile, tile), dtype=tl.float32)
    for k in range(0, size, step):
        at = k + tl.arange(0, step)
        inside = at < size
        g = block_of(weight, outs, inner, at, inside, size)
        u = block_of(weight, inner + outs, 2 * inner, at, inside, size)
        v = piece(x, rows, live, at, inside, size)
        if normed == 1:
            gram = dot(tl.trans(v), v, gram)
            v = weigh(v, gain, at, inside)
        gate = dot(g, v, gate)
        up = dot(u, v, up)
    squares = diagonal(gram, tile)
    gate = scaled(gate, squares, gain, rows, live, eps, size, normed)
    up = scaled(up, squares, gain, rows, live, eps, size, normed)
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit(do_not_specialize=["n"])
def _glu_kernel(
    x, gate_up, gain, y, n, inner, eps,
    size: tl.constexpr, normed: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(1) * block + tl.arange(0, block)
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    live = rows < n
    ready(pdl)
    value = silu_product(
        gate_up, x, gain, outs, rows, inner, live, eps, size, normed, tile, block, step
    )
    at = rows[None, :].to(tl.int64) * inner + outs[:, None]
    stored = live[None, :] & (outs < inner)[:, None]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=stored)


def gated(rows: Tensor, gain: Tensor | None, normed: int, eps: float, gate_up: Tensor) -> Tensor:
    """silu(gate) ⊙ up of rows made by `prepare`: [n, H] → [n, I]."""
    n, size, inner = len(rows), rows.shape[1], len(gate_up) // 2
    y = torch.empty((n, inner), dtype=rows.dtype, device=rows.device)
    tile = tile_for(n)
    s = schedule("glu", 2 * inner, size, tile, rows.device)
    _glu_kernel[(triton.cdiv(n, tile), triton.cdiv(inner, s.block))](
        rows, gate_up, gain, y, n, inner, eps,
        size=size, normed=normed, tile=tile, block=s.block, step=s.step,
        num_warps=s.warps, num_stages=s.stages, **early(rows.device),
    )  # fmt: skip
    return y


def glu(x: Tensor, norm: Norm, gate_up: Tensor) -> Tensor:
    """[n, H] → [n, I]."""
    return gated(*prepare(x, norm), norm.eps, gate_up)
