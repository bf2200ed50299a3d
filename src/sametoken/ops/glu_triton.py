"""glu on a GPU: gate and up in one program, SiLU and product on the accumulators."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.linear_triton import product
from sametoken.ops.norm import Norm
from sametoken.ops.norm_triton import norm as norm_rows
from sametoken.ops.tiling import tile_for


@triton.jit
def silu_product(
    weight, x, outs, rows, inner, live, size,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """silu(gate x) ⊙ (up x) → [block, tile] fp32; weight [2·inner, size], gate first."""
    up_weight = weight + inner.to(tl.int64) * size
    gate = product(weight, x, outs, rows, inner, live, size, tile, block, step)
    up = product(up_weight, x, outs, rows, inner, live, size, tile, block, step)
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit
def _glu_kernel(
    x, gate_up, y, n, inner, size,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    rows = tl.program_id(1) * tile + tl.arange(0, tile)
    live = rows < n
    value = silu_product(gate_up, x, outs, rows, inner, live, size, tile, block, step)
    at = rows[None, :].to(tl.int64) * inner + outs[:, None]
    stored = live[None, :] & (outs < inner)[:, None]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=stored)


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate x) ⊙ (up x) of normed rows: [n, H] → [n, I]."""
    n, size, inner = len(x), x.shape[1], len(gate_up) // 2
    y = torch.empty((n, inner), dtype=x.dtype, device=x.device)
    tile, block = tile_for(n), 16
    grid = (triton.cdiv(inner, block), triton.cdiv(n, tile))
    _glu_kernel[grid](
        x, gate_up, y, n, inner, size, tile=tile, block=block, step=128, num_warps=4, num_stages=3
    )
    return y


def glu(x: Tensor, norm: Norm, gate_up: Tensor) -> Tensor:
    """[n, H] → [n, I]."""
    return gated(norm_rows(x, norm), gate_up)
