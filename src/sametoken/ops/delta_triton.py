"""delta on a GPU: a program per (sequence, value head) plays its rows onto the state on chip.

The state is read once, absorbs the replayed and the certain rows, is written back, and goes on
through the draft rows without being written. What the convolution and a rewind will need of the
rows is left in the ring by whichever head the channels belong to. Long spans, which are prompts,
have their keys, queries and gates made beforehand and their outputs normed afterwards, for all
rows at once; the recurrence itself and every sum are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.delta import RING, UNIT_EPS, DeltaLayer, DeltaWeights
from sametoken.ops.placement import Placement, place
from sametoken.ops.tiling import early, ready, up2
from sametoken.rows import Rows

# Warps of every kernel here: a reduction's order depends on them, so there is one number.
_WARPS = 8
# Rows of a span from which making keys beforehand pays: a draft never is that long.
_LONG = 32


@triton.jit
def _entry(ring, fresh, at, start, logged, width, channel, inside, ring_size: tl.constexpr):
    """Channels of the row at a position: from the ring, or from this pass's own rows."""
    # A position for each channel: the interpreter cannot join a vector's mask with a scalar's.
    each = at + 0 * channel
    past, own = inside & (each >= 0) & (each < start), inside & (each >= start)
    old = tl.load(ring + (at % ring_size) * logged + channel, mask=past, other=0.0)
    new = tl.load(fresh + (at - start) * width + channel, mask=own, other=0.0)
    return tl.where(at < start, old, new).to(tl.float32)


@triton.jit
def _mixed(
    ring, fresh, conv, at, start, logged, width, channels, channel, inside,
    ring_size: tl.constexpr, taps: tl.constexpr,
):  # fmt: skip
    """silu(conv) of some channels at a position; before the sequence began there was nothing."""
    acc = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(taps):
        u = _entry(
            ring, fresh, at - (taps - 1) + tap, start, logged, width, channel, inside, ring_size
        )
        acc += tl.load(conv + tap * channels + channel, mask=inside, other=0.0) * u
    return (acc * (1.0 / (1.0 + tl.exp(-acc)))).to(fresh.dtype.element_ty).to(tl.float32)


@triton.jit
def _made(
    ring, fresh, conv, decay, dt_bias, at, start, logged, width, head, unit_eps, scale,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, ring_size: tl.constexpr, taps: tl.constexpr,
    dk: tl.constexpr, dv: tl.constexpr,
):  # fmt: skip
    """One head's q̂, k̂, v, β and e^g at a position."""
    channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    keys, values = tl.arange(0, dk), tl.arange(0, dv)
    key_head = head // (value_heads // key_heads)
    q = _mixed(
        ring, fresh, conv, at, start, logged, width, channels, key_head * key_dim + keys,
        keys < key_dim, ring_size, taps,
    )  # fmt: skip
    k = _mixed(
        ring, fresh, conv, at, start, logged, width, channels,
        (key_heads + key_head) * key_dim + keys, keys < key_dim, ring_size, taps,
    )  # fmt: skip
    v = _mixed(
        ring, fresh, conv, at, start, logged, width, channels,
        2 * key_heads * key_dim + head * value_dim + values, values < value_dim, ring_size, taps,
    )  # fmt: skip
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps)
    b = _entry(ring, fresh, at, start, logged, width, channels + head, True, ring_size)
    a = _entry(
        ring, fresh, at, start, logged, width, channels + value_heads + head, True, ring_size
    )
    beta = (1.0 / (1.0 + tl.exp(-b))).to(fresh.dtype.element_ty).to(tl.float32)
    x = a + tl.load(dt_bias + head)
    # softplus, without overflow for large x
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return q, k, v, beta, tl.exp(tl.load(decay + head) * soft)


@triton.jit
def _absorbed(state, k, v, beta, keep):
    """S after one row."""
    state = state * keep
    change = (v - tl.sum(state * k[:, None], axis=0)) * beta
    return tl.fma(
        tl.broadcast_to(k[:, None], state.shape), tl.broadcast_to(change[None, :], state.shape),
        state,
    )  # fmt: skip


@triton.jit
def _opened(o, z, weight, eps, value_dim: tl.constexpr):
    """norm(o) ⊙ silu(z), o rounded before, the normed o before its weight and after."""
    dtype: tl.constexpr = z.dtype
    o = o.to(dtype).to(tl.float32)
    n = (o * tl.rsqrt(tl.sum(o * o, axis=0) / value_dim + eps)).to(dtype).to(tl.float32)
    n = (n * weight).to(dtype).to(tl.float32)
    z = z.to(tl.float32)
    return (n * z * (1.0 / (1.0 + tl.exp(-z)))).to(dtype)


@triton.jit
def _leave(
    ring, fresh, start, sure, maybe, logged, width, head,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, ring_size: tl.constexpr, taps: tl.constexpr,
    dk: tl.constexpr, dv: tl.constexpr,
):  # fmt: skip
    """Write a head's own channels of the last certain rows and of the drafts to the ring."""
    channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    group: tl.constexpr = value_heads // key_heads
    keys, values = tl.arange(0, dk), tl.arange(0, dv)
    # Of the value heads that share a key head the first writes its queries and keys.
    k_inside = keys < tl.where(head % group == 0, key_dim, 0)
    v_inside = values < value_dim
    q_at, k_at = (head // group) * key_dim + keys, (key_heads + head // group) * key_dim + keys
    v_at = 2 * key_heads * key_dim + head * value_dim + values
    for at in range(tl.maximum(start, start + sure - (taps - 1)), start + sure + maybe):
        own, to = fresh + (at - start) * width, ring + (at % ring_size) * logged
        tl.store(to + q_at, tl.load(own + q_at, mask=k_inside), mask=k_inside)
        tl.store(to + k_at, tl.load(own + k_at, mask=k_inside), mask=k_inside)
        tl.store(to + v_at, tl.load(own + v_at, mask=v_inside), mask=v_inside)
        tl.store(to + channels + head, tl.load(own + channels + head))
        gate = channels + value_heads + head
        tl.store(to + gate, tl.load(own + gate))


@triton.jit
def _delta_kernel(
    projection, conv, decay, dt_bias, gain, states, rings, made, out,
    firsts, widths, slots, starts, certain, drafts, replay, width, eps, unit_eps, scale,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, ring_size: tl.constexpr, taps: tl.constexpr,
    dk: tl.constexpr, dv: tl.constexpr, long: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    logged: tl.constexpr = 2 * key_heads * key_dim + value_heads * (value_dim + 2)
    keys, values = tl.arange(0, dk), tl.arange(0, dv)
    v_inside = values < value_dim
    weight = tl.load(gain + values, mask=v_inside, other=0.0)
    ready(pdl)
    slot = tl.load(slots + span).to(tl.int64)
    start = tl.load(starts + span)
    again, sure, maybe = tl.load(replay + span), tl.load(certain + span), tl.load(drafts + span)
    first = tl.load(firsts + span).to(tl.int64)
    fresh, ring = projection + first * width, rings + slot * ring_size * logged
    cells = (slot * value_heads + head) * key_dim * value_dim
    cells = states + cells + keys[:, None] * value_dim + values[None, :]
    held = (keys < key_dim)[:, None] & v_inside[None, :]
    state = tl.load(cells, mask=held, other=0.0)
    for at in range(start - again, start + sure + maybe):
        if long and at >= start:
            line = made + ((first + at - start) * value_heads + head) * (2 * dk + dv + 2)
            q, k = tl.load(line + keys), tl.load(line + dk + keys)
            v = tl.load(line + 2 * dk + values)
            beta, keep = tl.load(line + 2 * dk + dv), tl.load(line + 2 * dk + dv + 1)
        else:
            q, k, v, beta, keep = _made(
                ring, fresh, conv, decay, dt_bias, at, start, logged, width, head, unit_eps, scale,
                key_heads, value_heads, key_dim, value_dim, ring_size, taps, dk, dv,
            )  # fmt: skip
        state = _absorbed(state, k, v, beta, keep)
        o = tl.sum(state * q[:, None], axis=0)
        row = first + at - start
        own = v_inside & (at + 0 * values >= start)
        to = out + (row * value_heads + head) * value_dim + values
        if long:
            tl.store(to, o.to(out.dtype.element_ty), mask=own)
        else:
            z = tl.load(projection + row * width + logged + head * value_dim + values,
                        mask=own, other=0.0)  # fmt: skip
            tl.store(to, _opened(o, z, weight, eps, value_dim), mask=own)
        if at == start + sure - 1:
            tl.store(cells, state, mask=held)
    # An ended sequence still has rows in its round, but nothing to say.
    for at in range(sure + maybe, tl.load(widths + span)):
        to = out + ((first + at) * value_heads + head) * value_dim + values
        tl.store(to, (0.0 * weight).to(out.dtype.element_ty), mask=v_inside)
    # A long span goes around the ring, onto rows that other heads may still have to replay.
    if not long:
        _leave(
            ring, fresh, start, sure, maybe, logged, width, head,
            key_heads, value_heads, key_dim, value_dim, ring_size, taps, dk, dv,
        )  # fmt: skip


@triton.jit
def _leave_kernel(
    projection, rings, firsts, slots, starts, certain, drafts, width,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, ring_size: tl.constexpr, taps: tl.constexpr,
    dk: tl.constexpr, dv: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    logged: tl.constexpr = 2 * key_heads * key_dim + value_heads * (value_dim + 2)
    ready(pdl)
    fresh = projection + tl.load(firsts + span).to(tl.int64) * width
    ring = rings + tl.load(slots + span).to(tl.int64) * ring_size * logged
    _leave(
        ring, fresh, tl.load(starts + span), tl.load(certain + span), tl.load(drafts + span),
        logged, width, head,
        key_heads, value_heads, key_dim, value_dim, ring_size, taps, dk, dv,
    )  # fmt: skip


@triton.jit
def _make_kernel(
    projection, conv, decay, dt_bias, rings, made, spans, positions,
    firsts, slots, starts, width, unit_eps, scale,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, ring_size: tl.constexpr, taps: tl.constexpr,
    dk: tl.constexpr, dv: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logged: tl.constexpr = 2 * key_heads * key_dim + value_heads * (value_dim + 2)
    ready(pdl)
    span = tl.load(spans + row)
    fresh = projection + tl.load(firsts + span).to(tl.int64) * width
    ring = rings + tl.load(slots + span).to(tl.int64) * ring_size * logged
    q, k, v, beta, keep = _made(
        ring, fresh, conv, decay, dt_bias, tl.load(positions + row), tl.load(starts + span),
        logged, width, head, unit_eps, scale,
        key_heads, value_heads, key_dim, value_dim, ring_size, taps, dk, dv,
    )  # fmt: skip
    line = made + (row * value_heads + head) * (2 * dk + dv + 2)
    tl.store(line + tl.arange(0, dk), q)
    tl.store(line + dk + tl.arange(0, dk), k)
    tl.store(line + 2 * dk + tl.arange(0, dv), v)
    tl.store(line + 2 * dk + dv, beta)
    tl.store(line + 2 * dk + dv + 1, keep)


@triton.jit
def _open_kernel(
    read, projection, gain, out, width, logged, eps,
    value_heads: tl.constexpr, value_dim: tl.constexpr, dv: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = tl.arange(0, dv)
    inside = values < value_dim
    weight = tl.load(gain + values, mask=inside, other=0.0)
    ready(pdl)
    at = (row * value_heads + head) * value_dim + values
    o = tl.load(read + at, mask=inside, other=0.0)
    z = tl.load(
        projection + row * width + logged + head * value_dim + values, mask=inside, other=0.0
    )
    tl.store(out + at, _opened(o, z, weight, eps, value_dim), mask=inside)


def delta(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, rows: Rows) -> Tensor:
    """[n, C + 2·Hv + Hv·Dv] → [n, Hv·Dv]; advances each span's state by its certain rows."""
    shape, placed = w.shape, place(rows, projection.device)
    n, device = len(projection), projection.device
    out = projection.new_empty((n, shape.value_heads * shape.value_dim))
    long = placed.widest >= _LONG
    made = _make(projection, w, layer, placed) if long else None
    read = torch.empty_like(out) if long else out
    _delta_kernel[(len(placed.first), shape.value_heads)](
        projection, w.conv, w.decay, w.dt_bias, w.norm.weight, layer.state, layer.recent, made,
        read, placed.first, placed.width, placed.slot, placed.start, placed.certain, placed.drafts,
        placed.replay, projection.shape[1], w.norm.eps, UNIT_EPS, shape.key_dim**-0.5,
        **_sizes(w), long=long, num_warps=_WARPS, **early(device),
    )  # fmt: skip
    if long:
        _leave_kernel[(len(placed.first), shape.value_heads)](
            projection, layer.recent, placed.first, placed.slot, placed.start, placed.certain,
            placed.drafts, projection.shape[1], **_sizes(w), num_warps=_WARPS, **early(device),
        )  # fmt: skip
        _open_kernel[(n, shape.value_heads)](
            read, projection, w.norm.weight, out, projection.shape[1], layer.recent.shape[2],
            w.norm.eps, value_heads=shape.value_heads, value_dim=shape.value_dim,
            dv=up2(shape.value_dim), num_warps=_WARPS, **early(device),
        )  # fmt: skip
    return out


def _make(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, placed: Placement) -> Tensor:
    """q̂, k̂, v, β and e^g of every row and head: [n, Hv, 2·Dk + Dv + 2] fp32, sizes padded."""
    shape, n = w.shape, len(projection)
    line = 2 * up2(shape.key_dim) + up2(shape.value_dim) + 2
    made = projection.new_empty((n, shape.value_heads, line), dtype=torch.float32)
    _make_kernel[(n, shape.value_heads)](
        projection, w.conv, w.decay, w.dt_bias, layer.recent, made, placed.span, placed.position,
        placed.first, placed.slot, placed.start, projection.shape[1], UNIT_EPS,
        shape.key_dim**-0.5, **_sizes(w), num_warps=_WARPS, **early(projection.device),
    )  # fmt: skip
    return made


def _sizes(w: DeltaWeights) -> dict[str, int]:
    shape = w.shape
    return {
        "key_heads": shape.key_heads,
        "value_heads": shape.value_heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "ring_size": RING,
        "taps": shape.conv_kernel,
        "dk": up2(shape.key_dim),
        "dv": up2(shape.value_dim),
    }
