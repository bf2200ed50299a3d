"""delta on a GPU: a program per (sequence, value head) plays its rows onto the state on chip.

The state is read once, absorbs the replayed and the certain rows, is written back, and goes on
through the draft rows without being written. A second kernel moves the window and the log.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.delta import UNIT_EPS, DeltaLayer, DeltaWeights
from sametoken.ops.placement import place
from sametoken.ops.tiling import up2
from sametoken.rows import Rows


@triton.jit
def _mixed(
    recent, fresh, conv, t, kept, width, logged, channels,
    channel, inside, taps: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """silu(conv) of some channels of row t; inputs before `kept` lie in `recent`."""
    acc = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(taps):
        at = t + tap
        if at < kept:
            u = tl.load(recent + at * logged + channel, mask=inside, other=0.0)
        else:
            u = tl.load(fresh + (at - kept) * width + channel, mask=inside, other=0.0)
        acc += tl.load(conv + tap * channels + channel, mask=inside, other=0.0) * u.to(tl.float32)
    return (acc * (1.0 / (1.0 + tl.exp(-acc)))).to(dtype).to(tl.float32)


@triton.jit
def _delta_kernel(
    projection, conv, decay, dt_bias, gain, states, recents,
    out, first, slots, certain, drafts, replay,
    width, logged, channels, longest, key_heads, value_heads,
    key_dim, value_dim, eps, unit_eps, scale,
    taps: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = projection.dtype.element_ty
    slot = tl.load(slots + span).to(tl.int64)
    again, sure = tl.load(replay + span), tl.load(certain + span)
    start = tl.load(first + span).to(tl.int64)
    fresh = projection + start * width
    recent = recents + slot * longest * logged
    kept = taps - 1 + again
    keys, values = tl.arange(0, dk), tl.arange(0, dv)
    k_inside, v_inside = keys < key_dim, values < value_dim
    key_head = head // (value_heads // key_heads)
    q_channel = key_head * key_dim + keys
    k_channel = (key_heads + key_head) * key_dim + keys
    v_channel = 2 * key_heads * key_dim + head * value_dim + values
    at = (slot * value_heads + head) * key_dim * value_dim
    cells = at + keys[:, None] * value_dim + values[None, :]
    held = k_inside[:, None] & v_inside[None, :]
    state = tl.load(states + cells, mask=held, other=0.0)
    rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
    weight = tl.load(gain + values, mask=v_inside, other=0.0)
    for t in range(again + sure + tl.load(drafts + span)):
        q = _mixed(
            recent, fresh, conv, t, kept, width, logged, channels, q_channel, k_inside, taps, dtype
        )
        k = _mixed(
            recent, fresh, conv, t, kept, width, logged, channels, k_channel, k_inside, taps, dtype
        )
        v = _mixed(
            recent, fresh, conv, t, kept, width, logged, channels, v_channel, v_inside, taps, dtype
        )
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * scale
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps)
        entry = fresh + (t - again) * width
        if t < again:
            entry = recent + (taps - 1 + t) * logged
        b = tl.load(entry + channels + head).to(tl.float32)
        a = tl.load(entry + channels + value_heads + head).to(tl.float32)
        beta = (1.0 / (1.0 + tl.exp(-b))).to(dtype).to(tl.float32)
        x = a + bias
        # softplus, without overflow for large x
        soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        state = state * tl.exp(rate * soft)
        change = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state += k[:, None] * change[None, :]
        if t >= again:
            o = tl.sum(state * q[:, None], axis=0).to(dtype).to(tl.float32)
            n = (o * tl.rsqrt(tl.sum(o * o, axis=0) / value_dim + eps)).to(dtype).to(tl.float32)
            n = (n * weight).to(dtype).to(tl.float32)
            z_at = (t - again) * width + logged + head * value_dim + values
            z = tl.load(fresh + z_at, mask=v_inside, other=0.0).to(tl.float32)
            y = n * z * (1.0 / (1.0 + tl.exp(-z)))
            to = ((start + t - again) * value_heads + head) * value_dim + values
            tl.store(out + to, y.to(dtype), mask=v_inside)
        if t == again + sure - 1:
            tl.store(states + cells, state, mask=held)


@triton.jit
def _log_kernel(
    projection, recents, first, slots, certain, drafts, replay,
    width, logged, longest, taps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < logged
    fresh = projection + tl.load(first + span).to(tl.int64) * width
    recent = recents + tl.load(slots + span).to(tl.int64) * longest * logged
    kept = taps - 1 + tl.load(replay + span)
    sure = tl.load(certain + span)
    # Ascending: a row of the window is only ever taken from a later row of the old one.
    for i in tl.static_range(taps - 1):
        at = kept + sure - (taps - 1) + i
        if at < kept:
            u = tl.load(recent + at * logged + channel, mask=inside, other=0.0)
        else:
            u = tl.load(fresh + (at - kept) * width + channel, mask=inside, other=0.0)
        tl.store(recent + i * logged + channel, u, mask=inside)
    for i in range(tl.load(drafts + span)):
        u = tl.load(fresh + (sure + i) * width + channel, mask=inside, other=0.0)
        tl.store(recent + (taps - 1 + i) * logged + channel, u, mask=inside)


def delta(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, rows: Rows) -> Tensor:
    """[n, C + 2·Hv + Hv·Dv] → [n, Hv·Dv]; advances each span's state by its certain rows."""
    shape, placed = w.shape, place(rows, projection.device)
    out = projection.new_empty((len(projection), shape.value_heads * shape.value_dim))
    spans, width = len(rows.spans), projection.shape[1]
    longest, logged = layer.recent.shape[1:]
    where = (placed.first, placed.slots, placed.certain, placed.drafts, placed.replay)
    _delta_kernel[(spans, shape.value_heads)](
        projection, w.conv, w.decay, w.dt_bias, w.norm.weight, layer.state, layer.recent, out,
        *where, width, logged, shape.conv_channels, longest, shape.key_heads, shape.value_heads,
        shape.key_dim, shape.value_dim, w.norm.eps, UNIT_EPS, shape.key_dim**-0.5,
        taps=shape.conv_kernel, dk=up2(shape.key_dim), dv=up2(shape.value_dim), num_warps=8,
    )  # fmt: skip
    block = 256
    _log_kernel[(spans, triton.cdiv(logged, block))](
        projection, layer.recent, *where, width, logged, longest,
        taps=shape.conv_kernel, block=block, num_warps=2,
    )  # fmt: skip
    return out
