"""delta on a CPU: one thread a (sequence, value head) plays its rows onto a state in cache."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from sametoken.ops.compiled import Floats, Indices, Kernel, array, dot, silu
from sametoken.ops.delta import UNIT_EPS, DeltaLayer, DeltaWeights, leave, past
from sametoken.ops.norm_cpu import normalise
from sametoken.ops.placement import place
from sametoken.rows import Rows


@numba.njit(cache=True, nogil=True)
def _mix(inputs: Floats, t: int, conv: Floats, start: int, out: Floats) -> None:
    """silu of the convolution over `inputs` t..t+K−1, for channels from `start` on."""
    for c in range(out.size):
        total = np.float32(0)
        for tap in range(conv.shape[0]):
            total += conv[tap, start + c] * inputs[t + tap, start + c]
        out[c] = silu(total)


@numba.njit(cache=True, nogil=True)
def _unit(x: Floats, scale: Any) -> None:
    factor = np.float32(scale) / np.sqrt(dot(x, x) + np.float32(UNIT_EPS))
    for i in range(x.size):
        x[i] = x[i] * factor


@numba.njit(cache=True, nogil=True)
def _absorb(state: Floats, k: Floats, v: Floats, beta: Any, keep: Any) -> None:
    """S ← e^g S + k̂ dᵀ with d = β (v − Sᵀ k̂); v becomes d."""
    seen = np.zeros(v.size, dtype=np.float32)
    for i in range(k.size):
        for j in range(v.size):
            state[i, j] = state[i, j] * keep
            seen[j] += state[i, j] * k[i]
    for j in range(v.size):
        v[j] = (v[j] - seen[j]) * beta
    for i in range(k.size):
        for j in range(v.size):
            state[i, j] += k[i] * v[j]


@numba.njit(cache=True, nogil=True)
def _emit(state: Floats, q: Floats, z: Floats, gain: Floats, eps: float, out: Floats) -> None:
    """norm(Sᵀ q̂) ⊙ silu(z)."""
    read = np.zeros(out.size, dtype=np.float32)
    for i in range(q.size):
        for j in range(read.size):
            read[j] += state[i, j] * q[i]
    normalise(read, gain, eps, out)
    for j in range(out.size):
        out[j] = out[j] * silu(z[j])


@Kernel
def _delta_kernel(
    inputs: Floats, projection: Floats, first: Indices, begin: Indices, slots: Indices,
    again: Indices, sure: Indices, drafts: Indices, conv: Floats, decay: Floats, bias: Floats,
    gain: Floats, eps: float, key_heads: int, states: Floats, out: Floats,
) -> None:  # fmt: skip
    heads, key_dim, value_dim = states.shape[1], states.shape[2], states.shape[3]
    logged = inputs.shape[1]
    channels = logged - 2 * heads
    for task in numba.prange(slots.size * heads):
        span, h = task // heads, task % heads
        key_head = h // (heads // key_heads)
        state = states[slots[span], h].copy()
        q = np.empty(key_dim, dtype=np.float32)
        k = np.empty(key_dim, dtype=np.float32)
        v = np.empty(value_dim, dtype=np.float32)
        own = inputs[begin[span] :]
        for t in range(again[span] + sure[span] + drafts[span]):
            _mix(own, t, conv, key_head * key_dim, q)
            _mix(own, t, conv, (key_heads + key_head) * key_dim, k)
            _mix(own, t, conv, 2 * key_heads * key_dim + h * value_dim, v)
            _unit(q, np.float32(key_dim) ** np.float32(-0.5))
            _unit(k, 1.0)
            entry = own[t + conv.shape[0] - 1]
            beta = np.float32(1) / (np.float32(1) + np.exp(-entry[channels + h]))
            x = entry[channels + heads + h] + bias[h]
            soft = max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))
            _absorb(state, k, v, beta, np.exp(decay[h] * soft))
            if t >= again[span]:
                r = first[span] + t - again[span]
                at = h * value_dim
                z = projection[r, logged + at : logged + at + value_dim]
                _emit(state, q, z, gain, eps, out[r, at : at + value_dim])
            if t == again[span] + sure[span] - 1:
                states[slots[span], h] = state


def delta(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, rows: Rows) -> Tensor:
    """[n, C + 2·Hv + Hv·Dv] → [n, Hv·Dv]; advances each span's state by its certain rows."""
    shape, placed = w.shape, place(rows, projection.device)
    kept, logged = shape.conv_kernel - 1, layer.recent.shape[2]
    tapes = [
        torch.cat((past(layer.recent[span.slot], span, kept), block[:, :logged]))
        for span, block in rows.blocks(projection)
    ]
    begin = np.cumsum([0, *map(len, tapes)], dtype=np.int32)
    out = projection.new_empty((len(projection), shape.value_heads * shape.value_dim))
    _delta_kernel(
        array(torch.cat(tapes)), array(projection), array(placed.first), begin, array(placed.slot),
        array(placed.replay), array(placed.certain), array(placed.drafts), array(w.conv),
        array(w.decay), array(w.dt_bias), array(w.norm.weight), w.norm.eps, shape.key_heads,
        array(layer.state), array(out),
    )  # fmt: skip
    for span, block in rows.blocks(projection):
        leave(layer.recent[span.slot], span, block, kept)
    return out
