"""experts on a GPU: each distinct expert of a pass is read once, for all rows that chose it.

One program per (distinct expert, block of its outputs, tile of rows). Rows that did not choose the
expert ride along in the tile and are not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.glu_triton import gated, silu_product
from sametoken.ops.router import Routing
from sametoken.ops.tiling import tile_for, up2


@triton.jit
def slots_of(ids, rows, live, expert, top_k, k_block: tl.constexpr):
    """For each row the slot in which it chose `expert`, or −1: [tile] int32."""
    at = tl.arange(0, k_block)
    found = tl.load(
        ids + rows[:, None].to(tl.int64) * top_k + at[None, :],
        mask=live[:, None] & (at[None, :] < top_k),
        other=-1,
    )
    return tl.max(tl.where(found == expert, at[None, :], -1), axis=1)


@triton.jit
def _distinct_kernel(
    ids, listed, count, total, experts,
    block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, block)
    wanted = tl.zeros((block,), dtype=tl.int32)
    for start in range(0, total, step):
        at = start + tl.arange(0, step)
        some = tl.load(ids + at, mask=at < total, other=-1)
        wanted += tl.sum((some[None, :] == expert[:, None]).to(tl.int32), axis=1)
    present = (wanted > 0) & (expert < experts)
    place = tl.cumsum(present.to(tl.int32), axis=0) - 1
    tl.store(listed + place, expert, mask=present)
    tl.store(count, tl.sum(present.to(tl.int32), axis=0))


def distinct(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The distinct experts of a pass in ascending id, and how many they are, on the device."""
    listed = torch.empty(min(experts, ids.numel()), dtype=torch.int32, device=ids.device)
    count = torch.empty(1, dtype=torch.int32, device=ids.device)
    _distinct_kernel[(1,)](
        ids, listed, count, ids.numel(), experts, block=up2(experts), step=32, num_warps=4
    )
    return listed, count


@triton.jit
def _experts_kernel(
    h, gate_up, ids, listed, count, y,
    n, inner, size, top_k,
    k_block: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) >= tl.load(count):
        return
    expert = tl.load(listed + tl.program_id(0))
    outs = tl.program_id(1) * block + tl.arange(0, block)
    rows = tl.program_id(2) * tile + tl.arange(0, tile)
    live = rows < n
    slot = slots_of(ids, rows, live, expert, top_k, k_block)
    weight = gate_up + expert.to(tl.int64) * 2 * inner * size
    value = silu_product(weight, h, outs, rows, inner, slot >= 0, size, tile, block, step)
    at = (rows.to(tl.int64) * top_k + slot)[None, :] * inner + outs[:, None]
    stored = (slot >= 0)[None, :] & (outs < inner)[:, None]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=stored)


def experts(h: Tensor, routing: Routing, w: ExpertWeights) -> Inner:
    """[n, H] → routed [n, k, I] and shared [n, Is]."""
    count, double, size = w.gate_up.shape
    n, top_k = routing.experts.shape
    inner, tile, block = double // 2, tile_for(n), 16
    routed = torch.empty((n, top_k, inner), dtype=h.dtype, device=h.device)
    listed, found = distinct(routing.experts, count)
    grid = (len(listed), triton.cdiv(inner, block), triton.cdiv(n, tile))
    _experts_kernel[grid](
        h, w.gate_up, routing.experts, listed, found, routed, n, inner, size, top_k,
        k_block=up2(top_k), tile=tile, block=block, step=128, num_warps=4, num_stages=3,
    )  # fmt: skip
    shared = None if w.shared_gate_up is None else gated(h, w.shared_gate_up)
    return Inner(routed, shared)
