"""qkv: split a projection into heads, norm, rotate, and write keys and values to the cache.

    q ← rope(norm(q), p)      k ← rope(norm(k), p)      cache[p] ← k, v

Shapes: the projection holds q [Nq, D] (gated families: [Nq, 2, D], query then gate per head),
k [Nkv, D], v [Nkv, D], in this order. Only the first `rotary_dim` dimensions rotate, as NeoX
halves: pair (i, i + rotary_dim/2) turns by p · theta^(−2i / rotary_dim).
Arithmetic: norm per head as in norm, rounded; cosine and sine in fp32, products and sums in fp32,
one rounding; attention always reads the rounded values back from the cache.
Promised: a row's bits depend on that row and its position alone. Elementwise but for the norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.config import AttentionShape
from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.norm import Norm, norm_row
from sametoken.rows import Rows, alone


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin [positions, rotary_dim / 2], fp32."""

    cos: Tensor
    sin: Tensor


def rope_table(shape: AttentionShape, positions: int, device: torch.device) -> Rope:
    """Angles of every position, computed once, so that a row only looks its own up."""
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return Rope(angles.cos().to(device), angles.sin().to(device))


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms over a head's D, before the rotation."""

    q: Norm
    k: Norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first dimensions of every head [heads, D] by one position's angles [rot / 2]."""
    half = cos.shape[-1]
    wide = x.float()
    a, b = wide[:, :half], wide[:, half : 2 * half]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin, wide[:, 2 * half :]), dim=-1)
    return turned.to(x.dtype)


def qkv_row(
    row: Tensor, shape: AttentionShape, norms: HeadNorms, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """One row's q [Nq, D], gate [Nq, D] or None, k and v [Nkv, D]."""
    parts = 2 if shape.gated else 1
    kv_width = shape.kv_heads * shape.head_dim
    query, key, value = torch.split(row, [row.numel() - 2 * kv_width, kv_width, kv_width])
    heads = query.view(shape.q_heads, parts, shape.head_dim)
    q = rotate(norm_row(heads[:, 0], norms.q), cos, sin)
    k = rotate(norm_row(key.view(-1, shape.head_dim), norms.k), cos, sin)
    return q, heads[:, 1] if shape.gated else None, k, value.view(-1, shape.head_dim)


def qkv(
    projection: Tensor,
    shape: AttentionShape,
    norms: HeadNorms,
    rope: Rope,
    kv: KvLayer,
    rows: Rows,
) -> tuple[Tensor, Tensor | None]:
    """[n, …] → q and gate [n, Nq, D]; writes every row's k and v at its position."""
    queries, gates = [], []
    for row, (span, position) in zip(alone(projection), rows.each(), strict=True):
        cos, sin = rope.cos[position], rope.sin[position]
        q, gate, k, v = qkv_row(row, shape, norms, cos, sin)
        page, offset = span.pages[position // PAGE], position % PAGE
        kv.k[page, :, offset], kv.v[page, :, offset] = k, v
        queries.append(q)
        if gate is not None:
            gates.append(gate)
    return torch.stack(queries), torch.stack(gates) if gates else None
