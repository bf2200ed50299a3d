"""attention on a CPU: one thread a (row, query head), chunk after chunk in ascending order."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.compiled import Floats, Indices, Kernel, array, dot
from sametoken.ops.placement import place
from sametoken.rows import Rows


@Kernel
def _attention_kernel(
    q: Floats, k_pool: Floats, v_pool: Floats, spans: Indices, positions: Indices,
    pages: Indices, gate: Floats, gated: bool, y: Floats,
) -> None:  # fmt: skip
    n, heads, size = q.shape
    group = heads // k_pool.shape[1]
    scale = np.float32(size) ** np.float32(-0.5)
    for task in numba.prange(n * heads):
        r, h = task // heads, task % heads
        scores = np.empty(PAGE, dtype=np.float32)
        part = np.empty(size, dtype=np.float32)
        value = np.zeros(size, dtype=np.float32)
        peak, total = np.float32(-np.inf), np.float32(0)
        length = positions[r] + 1
        for chunk in range((length + PAGE - 1) // PAGE):
            keys = k_pool[pages[spans[r], chunk], h // group]
            values = v_pool[pages[spans[r], chunk], h // group]
            count = min(PAGE, length - chunk * PAGE)
            own = np.float32(-np.inf)
            for t in range(count):
                scores[t] = dot(q[r, h], keys[t]) * scale
                own = max(own, scores[t])
            part[:] = 0
            mass = np.float32(0)
            for t in range(count):
                weight = np.exp(scores[t] - own)
                mass += weight
                for d in range(size):
                    part[d] += weight * values[t, d]
            higher = max(peak, own)
            old, new = np.exp(peak - higher), np.exp(own - higher)
            total = total * old + mass * new
            for d in range(size):
                value[d] = value[d] * old + part[d] * new
            peak = higher
        for d in range(size):
            out = value[d] / total
            if gated:
                out = out / (np.float32(1) + np.exp(-gate[r, h, d]))
            y[r, h, d] = out


def attention(q: Tensor, gate: Tensor | None, kv: KvLayer, rows: Rows) -> Tensor:
    """q and gate [n, Nq, D] → [n, Nq · D]."""
    placed, y = place(rows, q.device), torch.empty_like(q)
    _attention_kernel(
        array(q), array(kv.k), array(kv.v), array(placed.span), array(placed.position),
        array(placed.pages), array(q if gate is None else gate), gate is not None, array(y),
    )  # fmt: skip
    return y.flatten(1)
