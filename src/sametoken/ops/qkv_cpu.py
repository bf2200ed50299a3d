"""qkv on a CPU: each row by one thread, each head normed, turned, and written where it belongs."""

from __future__ import annotations

import numba
from torch import Tensor

from sametoken.config import AttentionShape
from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.compiled import Floats, Indices, Kernel, array
from sametoken.ops.norm_cpu import normalise
from sametoken.ops.placement import place
from sametoken.ops.qkv import HeadNorms, Rope
from sametoken.rows import Rows


@numba.njit(cache=True, nogil=True)
def _turn(x: Floats, cos: Floats, sin: Floats) -> None:
    half = cos.size
    for i in range(half):
        a, b = x[i], x[half + i]
        x[i], x[half + i] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]


@Kernel
def _qkv_kernel(
    projection: Floats, q_norm: Floats, q_eps: float, k_norm: Floats, k_eps: float,
    cos: Floats, sin: Floats, spans: Indices, positions: Indices, pages: Indices,
    k_pool: Floats, v_pool: Floats, gated: bool, q: Floats, gate: Floats,
) -> None:  # fmt: skip
    heads, size, kv_heads = q.shape[1], q.shape[2], k_pool.shape[1]
    parts = 2 if gated else 1
    for r in numba.prange(projection.shape[0]):
        position = positions[r]
        page, offset = pages[spans[r], position // PAGE], position % PAGE
        row = projection[r].reshape(-1, size)
        for h in range(heads):
            normalise(row[h * parts], q_norm, q_eps, q[r, h])
            _turn(q[r, h], cos[position], sin[position])
            if gated:
                gate[r, h] = row[h * parts + 1]
        for h in range(kv_heads):
            key = k_pool[page, h, offset]
            normalise(row[heads * parts + h], k_norm, k_eps, key)
            _turn(key, cos[position], sin[position])
            v_pool[page, h, offset] = row[heads * parts + kv_heads + h]


def qkv(
    projection: Tensor,
    shape: AttentionShape,
    norms: HeadNorms,
    rope: Rope,
    kv: KvLayer,
    rows: Rows,
) -> tuple[Tensor, Tensor | None]:
    """[n, …] → q and gate [n, Nq, D]; writes every row's k and v at its position."""
    placed = place(rows, projection.device)
    q = projection.new_empty((len(projection), shape.q_heads, shape.head_dim))
    gate = projection.new_empty(q.shape if shape.gated else (1, 1, 1))
    _qkv_kernel(
        array(projection), array(norms.q.weight), norms.q.eps, array(norms.k.weight), norms.k.eps,
        array(rope.cos), array(rope.sin), array(placed.span), array(placed.position),
        array(placed.pages), array(kv.k), array(kv.v), shape.gated, array(q), array(gate),
    )  # fmt: skip
    return q, gate if shape.gated else None
