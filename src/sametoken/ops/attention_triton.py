"""attention on a GPU: a program per (row, key-value head, chunk), then a merge in ascending order.

Inside a chunk, blocks of `STEP` positions follow one another with a running maximum. Chunk and
block sizes are constants: neither the length nor the number of rows changes a row's sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.placement import place
from sametoken.ops.tiling import dot, up2
from sametoken.rows import Rows

# Positions in a block: keys and values of one block fit the registers of four warps at D = 256.
STEP = 32
# The tensor core's smallest side; query heads of a group are padded to it.
_LEAST = 16


@triton.jit
def _chunk_kernel(
    q, k_pool, v_pool, positions, pages,
    peaks, totals, values,
    q_heads, kv_heads, size, table, chunks, scale,
    group: tl.constexpr, g_block: tl.constexpr, d_block: tl.constexpr,
    page: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    row, kv, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    visible = tl.load(positions + row) + 1 - chunk * page
    if visible <= 0:
        return
    heads, dims = tl.arange(0, g_block), tl.arange(0, d_block)
    inside = dims < size
    mine = (heads < group)[:, None] & inside[None, :]
    own = (row * q_heads + kv * group + heads)[:, None]
    query = tl.load(q + own * size + dims[None, :], mask=mine, other=0.0)
    place = tl.load(pages + row * table + chunk).to(tl.int64) * kv_heads + kv
    peak = tl.full((g_block,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((g_block,), dtype=tl.float32)
    value = tl.zeros((g_block, d_block), dtype=tl.float32)
    for start in range(0, tl.minimum(visible, page), step):
        at = start + tl.arange(0, step)
        seen = at < visible
        where = (place * page + at)[:, None] * size + dims[None, :]
        mask = seen[:, None] & inside[None, :]
        k = tl.load(k_pool + where, mask=mask, other=0.0)
        v = tl.load(v_pool + where, mask=mask, other=0.0)
        scores = dot(query, tl.trans(k), tl.zeros((g_block, step), dtype=tl.float32)) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        keep = tl.exp(peak - higher)
        total = total * keep + tl.sum(weights, axis=1)
        value = dot(weights.to(v.dtype), v, value * keep[:, None])
        peak = higher
    part = ((row * kv_heads + kv) * chunks + chunk) * group + heads
    tl.store(peaks + part, peak, mask=heads < group)
    tl.store(totals + part, total, mask=heads < group)
    tl.store(values + part[:, None] * size + dims[None, :], value, mask=mine)


@triton.jit
def _merge_kernel(
    peaks, totals, values, gate, positions, y,
    q_heads, kv_heads, size, chunks,
    group: tl.constexpr, d_block: tl.constexpr, page: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, d_block)
    inside = dims < size
    first = ((row * kv_heads + head // group) * chunks) * group + head % group
    peak = tl.load(peaks + first)
    total = tl.load(totals + first)
    value = tl.load(values + first * size + dims, mask=inside, other=0.0)
    for chunk in range(1, tl.load(positions + row) // page + 1):
        part = first + chunk * group
        next_peak = tl.load(peaks + part)
        higher = tl.maximum(peak, next_peak)
        old, new = tl.exp(peak - higher), tl.exp(next_peak - higher)
        total = total * old + tl.load(totals + part) * new
        more = tl.load(values + part * size + dims, mask=inside, other=0.0)
        value = value * old + more * new
        peak = higher
    out = value / total
    at = (row * q_heads + head) * size + dims
    if gated:
        opened = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        out = out * (1.0 / (1.0 + tl.exp(-opened)))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


def attention(q: Tensor, gate: Tensor | None, kv: KvLayer, rows: Rows) -> Tensor:
    """q and gate [n, Nq, D] → [n, Nq · D]."""
    n, q_heads, size = q.shape
    kv_heads, placed = kv.k.shape[1], place(rows, q.device)
    group, chunks = q_heads // kv_heads, triton.cdiv(placed.longest, PAGE)
    peaks, totals = (
        torch.empty((n, kv_heads, chunks, group), dtype=torch.float32, device=q.device)
        for _ in range(2)
    )
    values = torch.empty((*peaks.shape, size), dtype=torch.float32, device=q.device)
    y = torch.empty_like(q)
    _chunk_kernel[(n, kv_heads, chunks)](
        q, kv.k, kv.v, placed.positions, placed.pages, peaks, totals, values,
        q_heads, kv_heads, size, placed.pages.shape[1], chunks, size**-0.5,
        group=group, g_block=max(_LEAST, up2(group)), d_block=max(_LEAST, up2(size)),
        page=PAGE, step=STEP, num_warps=4,
    )  # fmt: skip
    _merge_kernel[(n, q_heads)](
        peaks, totals, values, gate, placed.positions, y, q_heads, kv_heads, size, chunks,
        group=group, d_block=up2(size), page=PAGE, gated=gate is not None, num_warps=1,
    )  # fmt: skip
    return y.flatten(1)
