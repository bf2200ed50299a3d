"""combine on a GPU: a program owns a block of outputs and walks the pass's distinct experts.

It meets them in ascending id, so every row's own experts come in that row's order of slots; a row
that did not choose an expert is left as it is. No scratch, no atomics, no order of arrival.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.experts_triton import distinct, slots_of
from sametoken.ops.linear_triton import product
from sametoken.ops.router import Routing
from sametoken.ops.tiling import tile_for, up2


@triton.jit
def _combine_kernel(
    routed, shared, ids, shares, gates, listed, count,
    down, shared_down, skip, y,
    n, size, inner, shared_inner, top_k, has_shared: tl.constexpr,
    k_block: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    rows = tl.program_id(1) * tile + tl.arange(0, tile)
    live = rows < n
    total = tl.zeros((block, tile), dtype=tl.float32)
    for i in range(tl.load(count)):
        expert = tl.load(listed + i)
        slot = slots_of(ids, rows, live, expert, top_k, k_block)
        chosen = slot >= 0
        pair = rows * top_k + tl.maximum(slot, 0)
        weight = down + expert.to(tl.int64) * size * inner
        part = product(weight, routed, outs, pair, size, chosen, inner, tile, block, step)
        share = tl.load(shares + pair, mask=chosen, other=0.0)
        total = tl.where(chosen[None, :], total + share[None, :] * part, total)
    if has_shared:
        part = product(shared_down, shared, outs, rows, size, live, shared_inner, tile, block, step)
        total += tl.load(gates + rows, mask=live, other=0.0)[None, :] * part
    at = rows[None, :].to(tl.int64) * size + outs[:, None]
    stored = live[None, :] & (outs < size)[:, None]
    total += tl.load(skip + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)


def combine(inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor) -> Tensor:
    """[n, k, I], [n, Is] and residual [n, H] → [n, H]."""
    n, size = residual.shape
    top_k, width = inner.routed.shape[1:]
    y = torch.empty_like(residual)
    tile, block = tile_for(n), 16
    listed, count = distinct(routing.experts, len(w.down))
    shared_width = 0 if inner.shared is None else inner.shared.shape[1]
    _combine_kernel[(triton.cdiv(size, block), triton.cdiv(n, tile))](
        inner.routed, inner.shared, routing.experts, routing.weights, routing.shared, listed, count,
        w.down, w.shared_down, residual, y, n, size, width, shared_width, top_k,
        has_shared=inner.shared is not None,
        k_block=up2(top_k), tile=tile, block=block, step=128, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
