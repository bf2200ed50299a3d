"""attention on a GPU: a program per (rows of a sequence, key-value head, chunk), then a merge.

Inside a chunk, blocks of `STEP` positions follow one another with a running maximum; the sum of the
weights is formed by the tensor core too, against a column of ones, so its order is the dot's. The
merge takes the largest peak of all chunks first, then adds the chunks in ascending order. Chunk
and block sizes are constants: neither the length nor the number of rows changes a row's sums.
Rows of one sequence share what is read of the cache; each sees only its own past.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.placement import Placement, place
from sametoken.ops.tiling import dot, early, ready, up2
from sametoken.rows import Rows

# Positions in a block of a chunk's sum.
STEP = 64
# The tensor core's smallest side; a tile holds the query heads of a group for as many rows of the
# sequence as fit `_MOST`, which at D = 256 is what the registers of four warps hold.
_LEAST, _MOST = 16, 64
# Chunk results of this many bytes may lie in scratch at once; wider passes go in parts.
_SCRATCH = 512 << 20


@triton.jit
def _chunk_kernel(
    q, k_pool, v_pool, position, first, width, pages, peaks, totals, values, base,
    table, chunks, scale,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, group: tl.constexpr,
    rows: tl.constexpr, tiles: tl.constexpr, block: tl.constexpr, d_block: tl.constexpr,
    page: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    span, tile = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    kv, chunk = tl.program_id(1), tl.program_id(0)
    lines, dims = tl.arange(0, block), tl.arange(0, d_block)
    # Line i of the tile is query head i % group of row i // group.
    own = tile * rows + lines // group
    inside = dims < size
    ready(pdl)
    live = (lines < rows * group) & (own < tl.load(width + span))
    row = tl.load(first + span) + own
    seen = tl.where(live, tl.load(position + row, mask=live, other=0) + 1 - chunk * page, 0)
    most = tl.minimum(tl.max(seen, axis=0), page)
    if most <= 0:
        return
    mine = live[:, None] & inside[None, :]
    head = row.to(tl.int64) * q_heads + kv * group + lines % group
    query = tl.load(q + head[:, None] * size + dims[None, :], mask=mine, other=0.0)
    # A span that has no page here has nothing to see; page 0 is read in its place.
    number = tl.maximum(tl.load(pages + span * table + chunk), 0)
    place = (number.to(tl.int64) * kv_heads + kv) * page
    peak = tl.full((block,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((block, 16), dtype=tl.float32)
    value = tl.zeros((block, d_block), dtype=tl.float32)
    ones = tl.full((step, 16), 1.0, dtype=v_pool.dtype.element_ty)
    for start in range(0, most, step):
        at = start + tl.arange(0, step)
        where = (place + at)[:, None] * size + dims[None, :]
        mask = (at < most)[:, None] & inside[None, :]
        k = tl.load(k_pool + where, mask=mask, other=0.0)
        v = tl.load(v_pool + where, mask=mask, other=0.0)
        scores = dot(query, tl.trans(k), tl.zeros((block, step), dtype=tl.float32)) * scale
        scores = tl.where(at[None, :] < seen[:, None], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no peak to compare with.
        floor = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(scores - floor[:, None]).to(v.dtype)
        keep = tl.exp(peak - floor)
        total = dot(weights, ones, total * keep[:, None])
        value = dot(weights, v, value * keep[:, None])
        peak = higher
    part = ((row - base).to(tl.int64) * q_heads + kv * group + lines % group) * chunks + chunk
    shown = live & (seen > 0)
    tl.store(peaks + part, peak, mask=shown)
    # Every column of the total is the same sum.
    tl.store(totals + part, tl.max(total, axis=1), mask=shown)
    tl.store(values + part[:, None] * size + dims[None, :], value, mask=mine & shown[:, None])


@triton.jit
def _merge_kernel(
    peaks, totals, values, gate, position, y, base, chunks,
    q_heads: tl.constexpr, size: tl.constexpr, d_block: tl.constexpr, c_block: tl.constexpr,
    page: tl.constexpr, gated: tl.constexpr, ahead: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.program_id(2) * d_block + tl.arange(0, d_block)
    inside = dims < size
    ready(pdl)
    count = tl.load(position + base + row) // page + 1
    first = (row * q_heads + head) * chunks
    peak = -float("inf")
    for start in range(0, count, c_block):
        at = start + tl.arange(0, c_block)
        some = tl.load(peaks + first + at, mask=at < count, other=-float("inf"))
        peak = tl.maximum(peak, tl.max(some, axis=0))
    total = 0.0
    value = tl.zeros((d_block,), dtype=tl.float32)
    # Loads of `ahead` chunks are under way together; the sum takes them one by one.
    for start in range(0, count, ahead):
        for i in tl.static_range(ahead):
            part = first + tl.minimum(start + i, count - 1)
            share = tl.exp(tl.load(peaks + part) - peak)
            # Past the last chunk it is read again, and added nought times.
            share = tl.where(start + i < count, share, 0.0)
            total += share * tl.load(totals + part)
            value += share * tl.load(values + part * size + dims, mask=inside, other=0.0)
    # A sum of weights that all rounded to nothing leaves −0 or 0 by its company: + 0 makes both 0.
    out = value / total + 0.0
    at = ((base + row) * q_heads + head) * size + dims
    if gated:
        opened = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        out = out * (1.0 / (1.0 + tl.exp(-opened)))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


def attention(q: Tensor, gate: Tensor | None, kv: KvLayer, rows: Rows) -> Tensor:
    """q and gate [n, Nq, D] → [n, Nq · D]."""
    y = torch.empty_like(q)
    placed = place(rows, q.device)
    chunks = triton.cdiv(placed.longest, PAGE)
    bytes_a_row = 4 * q.shape[1] * chunks * (q.shape[2] + 2)
    if len(q) * bytes_a_row <= _SCRATCH:
        _attend(q, gate, kv, placed, y, 0, len(q))
    else:
        _in_parts(q, gate, kv, rows, y, max(1, _SCRATCH // bytes_a_row))
    return y.flatten(1)


def _in_parts(
    q: Tensor, gate: Tensor | None, kv: KvLayer, rows: Rows, y: Tensor, most: int
) -> None:
    """Spans cut into pieces of at most `most` rows, one after the other."""
    base = 0
    for span in rows.spans:
        for start in range(0, span.width, most):
            count = min(most, span.width - start)
            piece = span.piece(start, count)
            own = place(Rows((piece,)), q.device)
            part = slice(base + start, base + start + count)
            _attend(q[part], None if gate is None else gate[part], kv, own, y[part], 0, count)
        base += span.width


def _attend(
    q: Tensor,
    gate: Tensor | None,
    kv: KvLayer,
    placed: Placement,
    y: Tensor,
    base: int,
    n: int,
) -> None:
    """Rows base..base+n−1 of q and gate into those of y."""
    _, q_heads, size = q.shape
    kv_heads, device = kv.k.shape[1], q.device
    group, chunks = q_heads // kv_heads, triton.cdiv(placed.longest, PAGE)
    rows = max(1, min(_MOST // group, placed.widest))
    tiles = triton.cdiv(placed.widest, rows)
    peaks, totals = (
        torch.empty((n, q_heads, chunks), dtype=torch.float32, device=device) for _ in range(2)
    )
    values = torch.empty((n, q_heads, chunks, size), dtype=torch.float32, device=device)
    block = max(_LEAST, up2(rows * group))
    _chunk_kernel[(chunks, kv_heads, tiles * len(placed.first))](
        q, kv.k, kv.v, placed.position, placed.first, placed.width, placed.pages,
        peaks, totals, values, base, placed.pages.shape[1], chunks, size**-0.5,
        q_heads=q_heads, kv_heads=kv_heads, size=size, group=group,
        rows=rows, tiles=tiles, block=block, d_block=max(_LEAST, up2(size)),
        page=PAGE, step=STEP, num_warps=4 if block <= 32 else 8, num_stages=2, **early(device),
    )  # fmt: skip
    d_block = min(128, up2(size))
    _merge_kernel[(n, q_heads, triton.cdiv(size, d_block))](
        peaks, totals, values, gate, placed.position, y, base, chunks,
        q_heads=q_heads, size=size, d_block=d_block, c_block=up2(min(chunks, 1024)),
        page=PAGE, gated=gate is not None, ahead=16, num_warps=1, **early(device),
    )  # fmt: skip
