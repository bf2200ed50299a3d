"""attention: one query over its own past, in fixed chunks of absolute positions.

    s_t = q · k_t / √D      y = Σ_t softmax(s)_t v_t      y ← y ⊙ σ(gate)   (gated families)

Shapes: q, gate, y [Nq, D]; keys and values in pages [Nkv, PAGE, D]; query head h reads key-value
head h // (Nq / Nkv). A row at position p sees positions 0..p.
Arithmetic: fp32. A page of the cache is a chunk of the sum: each chunk gives (max, Σ exp, Σ exp·v),
and chunks merge in ascending order. σ(gate) multiplies in fp32; one rounding to the row's dtype.
Promised: a row's bits depend on its q and gate and on the keys and values up to its position;
never on how many rows ask, nor on where its pages lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.rows import Rows, alone

# Positions in a page, and in a chunk of the sum. Large enough to amortise a chunk's merge, small
# enough that 32k of context still spreads over a GPU's 132 processors.
PAGE = 256


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of one layer: two pools [pages, Nkv, PAGE, D] in the activation dtype."""

    k: Tensor
    v: Tensor


def attention_row(q: Tensor, kv: KvLayer, pages: tuple[int, ...], length: int) -> Tensor:
    """One query [Nq, D] over positions 0..length−1 → [Nq, D] fp32."""
    kv_heads, head_dim = kv.k.shape[1], kv.k.shape[3]
    query = q.float().view(kv_heads, -1, head_dim) * head_dim**-0.5
    chunks = [
        _chunk(query, kv.k[page, :, :count], kv.v[page, :, :count])
        for page, count in _chunks(pages, length)
    ]
    peak, total, value = chunks[0]
    for next_peak, next_total, next_value in chunks[1:]:
        higher = torch.maximum(peak, next_peak)
        old, new = torch.exp(peak - higher), torch.exp(next_peak - higher)
        total = total * old + next_total * new
        value = value * old + next_value * new
        peak = higher
    return (value / total).reshape(-1, head_dim)


def _chunks(pages: tuple[int, ...], length: int) -> list[tuple[int, int]]:
    """Page and number of visible positions, chunk by chunk."""
    starts = range(0, length, PAGE)
    return [(page, min(PAGE, length - start)) for page, start in zip(pages, starts, strict=False)]


def _chunk(query: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk's largest score, Σ exp(s − max) and Σ exp(s − max) v, per query head."""
    scores = torch.bmm(query, k.float().transpose(1, 2))
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - peak)
    return peak, weights.sum(-1, keepdim=True), torch.bmm(weights, v.float())


def attention(q: Tensor, gate: Tensor | None, kv: KvLayer, rows: Rows) -> Tensor:
    """q and gate [n, Nq, D] → [n, Nq · D]."""
    past = [(span.pages, position + 1) for span, position in rows.each()]
    out = [attention_row(row, kv, *own) for row, own in zip(alone(q), past, strict=True)]
    if gate is not None:
        opened = [torch.sigmoid(row.float()) for row in alone(gate)]
        out = [y * g for y, g in zip(out, opened, strict=True)]
    return torch.stack(out).to(q.dtype).flatten(1)
