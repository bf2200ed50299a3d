"""qkv on a GPU: one program per row and head; a head's norm is one reduction of one fixed shape."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.config import AttentionShape
from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.placement import place
from sametoken.ops.qkv import HeadNorms, Rope
from sametoken.ops.tiling import early, ready, up2
from sametoken.rows import Rows


@triton.jit
def _turned(
    source, gain, cos, sin, at, size, half, eps,
    first: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A head at `source`, normed, rounded, and turned by one position's angles."""
    inside = at < size
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    # Each dimension needs its partner's value too: read again, normed and rounded alike.
    turning = at < 2 * half
    partner = tl.where(turning, tl.where(at < half, at + half, at - half), at)
    other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    own_gain = tl.load(gain + at, mask=inside, other=0.0)
    other_gain = tl.load(gain + partner, mask=inside, other=0.0)
    own, other = x * scale, other * scale
    if first:
        own, other = own.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
    own = (own * own_gain).to(dtype).to(tl.float32)
    other = (other * other_gain).to(dtype).to(tl.float32)
    angle = tl.where(at < half, at, at - half)
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    return (own * c + tl.where(at < half, -other, other) * s).to(dtype)


@triton.jit
def _qkv_kernel(
    projection, q_gain, k_gain, cos, sin, positions, spans, pages,
    q, gate, k_pool, v_pool,
    width, table, size, half, q_heads, kv_heads, q_eps, k_eps,
    gated: tl.constexpr, first: tl.constexpr, page: tl.constexpr, block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, block)
    inside = at < size
    dtype = q.dtype.element_ty
    ready(pdl)
    position = tl.load(positions + row)
    own_cos, own_sin = cos + position * half, sin + position * half
    parts = 2 if gated else 1
    source = projection + row * width
    number = tl.load(pages + tl.load(spans + row) * table + position // page)
    # Rows beyond a sequence's room, which nobody will read, have no page to be written to.
    room = at < tl.where(number >= 0, size, 0)
    place = number.to(tl.int64) * kv_heads
    if head < q_heads:
        own = source + head * parts * size
        value = _turned(own, q_gain, own_cos, own_sin, at, size, half, q_eps, first, dtype)
        to = (row * q_heads + head) * size + at
        tl.store(q + to, value, mask=inside)
        if gated:
            opened = tl.load(own + size + at, mask=inside, other=0.0)
            tl.store(gate + to, opened, mask=inside)
    elif head < q_heads + kv_heads:
        kv = head - q_heads
        own = source + (q_heads * parts + kv) * size
        value = _turned(own, k_gain, own_cos, own_sin, at, size, half, k_eps, first, dtype)
        to = ((place + kv) * page + position % page) * size + at
        tl.store(k_pool + to, value, mask=room)
    else:
        kv = head - q_heads - kv_heads
        own = source + (q_heads * parts + kv_heads + kv) * size
        value = tl.load(own + at, mask=inside, other=0.0)
        to = ((place + kv) * page + position % page) * size + at
        tl.store(v_pool + to, value, mask=room)


def qkv(
    projection: Tensor,
    shape: AttentionShape,
    norms: HeadNorms,
    rope: Rope,
    kv: KvLayer,
    rows: Rows,
) -> tuple[Tensor, Tensor | None]:
    """[n, …] → q and gate [n, Nq, D]; writes every row's k and v at its position."""
    n, placed = len(projection), place(rows, projection.device)
    q = projection.new_empty((n, shape.q_heads, shape.head_dim))
    gate = torch.empty_like(q) if shape.gated else None
    _qkv_kernel[(n, shape.q_heads + 2 * shape.kv_heads)](
        projection, norms.q.weight, norms.k.weight, rope.cos, rope.sin,
        placed.position, placed.span, placed.pages, q, gate, kv.k, kv.v,
        projection.shape[1], placed.pages.shape[1], shape.head_dim, shape.rotary_dim // 2,
        shape.q_heads, shape.kv_heads, norms.q.eps, norms.k.eps,
        gated=shape.gated, first=norms.q.round_first, page=PAGE, block=up2(shape.head_dim),
        num_warps=1, **early(q.device),
    )  # fmt: skip
    return q, gate
