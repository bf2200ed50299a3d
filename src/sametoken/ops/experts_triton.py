"""experts on a GPU: each distinct expert of a pass is read once, for all rows that chose it.

Narrow passes: one program per (distinct expert, block of its outputs); every row of the pass rides
in the tile, and only those that chose the expert are stored. The shared expert is one more in the
same kernel. Wide passes: pairs of row and expert are sorted by expert, and a tile holds pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.glu_triton import gated, silu_product
from sametoken.ops.linear_triton import GIVEN, prepare
from sametoken.ops.norm import Norm
from sametoken.ops.router import Routing
from sametoken.ops.router_triton import list_distinct
from sametoken.ops.schedules import schedule
from sametoken.ops.tiling import MIDDLE, NARROW, WIDE, early, ready, up2

# Rows that choose one expert from which a tile of pairs is as wide as tiles get.
_CROWD = 64


@triton.jit
def chosen_of(ids, rows, live, top_k: tl.constexpr, k_block: tl.constexpr):
    """The experts of every row of a tile: [tile, k_block], −1 where there is none."""
    at = tl.arange(0, k_block)
    return tl.load(
        ids + rows[:, None] * top_k + at[None, :],
        mask=live[:, None] & (at[None, :] < top_k),
        other=-1,
    )


@triton.jit
def slots_of(found, expert, k_block: tl.constexpr):
    """For each row the slot in which it chose `expert`, or −1: [tile] int32."""
    at = tl.arange(0, k_block)
    return tl.max(tl.where(found == expert, at[None, :], -1), axis=1)


@triton.jit
def _distinct_kernel(ids, listed, total, experts, block: tl.constexpr, step: tl.constexpr):
    list_distinct(ids, total, listed, experts, block, step)


def distinct(routing: Routing, experts: int) -> Tensor:
    """[2 + E] int32: how many experts the pass has, then their ids ascending."""
    if routing.distinct is not None:
        return routing.distinct
    ids = routing.experts
    listed = torch.empty(2 + experts, dtype=torch.int32, device=ids.device)
    _distinct_kernel[(1,)](
        ids, listed, ids.numel(), experts, block=up2(experts), step=up2(ids.numel()), num_warps=4
    )
    return listed


@triton.jit(do_not_specialize=["n"])
def _experts_kernel(
    x, gate_up, gain, ids, listed, routed, shared, to_shared, n, shared_inner, eps,
    inner: tl.constexpr, size: tl.constexpr, top_k: tl.constexpr, has_shared: tl.constexpr,
    k_block: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    outs = tl.program_id(1) * block + tl.arange(0, block)
    rows = tl.arange(0, tile)
    live = rows < n
    ready(pdl)
    # Both at once: beyond the count lies nothing, but it can be read.
    count, expert = tl.load(listed), tl.load(listed + 1 + index)
    if index < count:
        weight = gate_up + expert.to(tl.int64) * (2 * inner * size)
        value = silu_product(
            weight, x, gain, outs, rows, inner, live, eps, size, 1, tile, block, step
        )
        slot = slots_of(chosen_of(ids, rows, live, top_k, k_block), expert, k_block)
        at = (rows * top_k + slot)[None, :] * inner + outs[:, None]
        stored = (slot >= 0)[None, :] & (outs < inner)[:, None]
        tl.store(routed + at, value.to(routed.dtype.element_ty), mask=stored)
    elif has_shared and index == tl.num_programs(0) - 1:
        # The shared expert lies elsewhere; its distance keeps the address's alignment known.
        value = silu_product(
            gate_up + to_shared, x, gain, outs, rows, shared_inner, live, eps, size, 1,
            tile, block, step,
        )  # fmt: skip
        at = rows[None, :] * shared_inner + outs[:, None]
        stored = live[None, :] & (outs < shared_inner)[:, None]
        tl.store(shared + at, value.to(shared.dtype.element_ty), mask=stored)


def _narrow(x: Tensor, norm: Norm, routing: Routing, w: ExpertWeights) -> Inner:
    count, double, size = w.gate_up.shape
    n, top_k = routing.experts.shape
    inner = double // 2
    shared_inner = 0 if w.shared_gate_up is None else len(w.shared_gate_up) // 2
    routed = torch.empty((n, top_k, inner), dtype=x.dtype, device=x.device)
    shared = None
    if w.shared_gate_up is not None:
        shared = torch.empty((n, shared_inner), dtype=x.dtype, device=x.device)
    s = schedule("experts", double, size, NARROW, x.device)
    programs = min(count, n * top_k) + (shared is not None)
    _experts_kernel[(programs, triton.cdiv(max(inner, shared_inner), s.block))](
        x.contiguous(), w.gate_up, norm.weight, routing.experts, distinct(routing, count),
        routed, shared, elements_between(w.gate_up, w.shared_gate_up), n, shared_inner, norm.eps,
        inner=inner, size=size, top_k=top_k, has_shared=shared is not None,
        k_block=up2(top_k), tile=NARROW, block=s.block, step=s.step,
        num_warps=s.warps, num_stages=s.stages, **early(x.device),
    )  # fmt: skip
    return Inner(routed, shared)


def elements_between(start: Tensor, other: Tensor | None) -> int:
    """How far `other` lies from `start`, in elements."""
    return 0 if other is None else (other.data_ptr() - start.data_ptr()) // start.element_size()


class Groups(NamedTuple):
    """Pairs (row · k + slot) sorted by expert, cut into tiles of one expert each.

    pairs [n·k] int64; expert, first and end [tiles] int32: a tile holds pairs[first:end].
    Tiles beyond the last have first = end.
    """

    pairs: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor
    tile: int


def group(ids: Tensor, experts: int) -> Groups:
    """Group a pass's pairs [n, k] by expert, without asking the device anything."""
    total = ids.numel()
    tile = WIDE if total >= _CROWD * experts else (MIDDLE if total >= 16 * experts else NARROW)
    order, pairs = torch.sort(ids.flatten(), stable=True)
    bounds = torch.searchsorted(order, torch.arange(experts + 1, device=ids.device))
    tiles = (bounds.diff() + tile - 1) // tile
    starts = tiles.cumsum(0)
    index = torch.arange(total // tile + min(experts, total), device=ids.device)
    expert = torch.searchsorted(starts, index, right=True).clamp_(max=experts - 1)
    first = bounds[expert] + (index - (starts - tiles)[expert]) * tile
    end = bounds[expert + 1]
    first = torch.minimum(first, end)
    return Groups(pairs, expert.int(), first.int(), end.int(), tile)


@triton.jit
def pairs_of(pairs, firsts, ends, tile_index, tile: tl.constexpr):
    """The pairs of a tile and which of its places hold one."""
    at = tl.load(firsts + tile_index) + tl.arange(0, tile)
    live = at < tl.load(ends + tile_index)
    return tl.load(pairs + at, mask=live, other=0), live


@triton.jit
def _grouped_kernel(
    x, gate_up, scale, pairs, experts, firsts, ends, routed,
    inner: tl.constexpr, size: tl.constexpr, top_k: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    index = tl.program_id(1)
    ready(pdl)
    if tl.load(firsts + index) >= tl.load(ends + index):
        return
    pair, live = pairs_of(pairs, firsts, ends, index, tile)
    weight = gate_up + tl.load(experts + index).to(tl.int64) * (2 * inner * size)
    value = silu_product(
        weight, x, scale, outs, pair // top_k, inner, live, 0.0, size, 2, tile, block, step
    )
    at = pair[None, :] * inner + outs[:, None]
    stored = live[None, :] & (outs < inner)[:, None]
    tl.store(routed + at, value.to(routed.dtype.element_ty), mask=stored)


def _wide(x: Tensor, norm: Norm, routing: Routing, w: ExpertWeights) -> Inner:
    count, double, size = w.gate_up.shape
    n, top_k = routing.experts.shape
    inner = double // 2
    rows, scale, _ = prepare(x, norm)
    groups = group(routing.experts, count)
    routed = torch.empty((n, top_k, inner), dtype=x.dtype, device=x.device)
    s = schedule("experts", double, size, groups.tile, x.device)
    _grouped_kernel[(triton.cdiv(inner, s.block), len(groups.first))](
        rows, w.gate_up, scale, groups.pairs, groups.expert, groups.first, groups.end, routed,
        inner=inner, size=size, top_k=top_k, tile=groups.tile, block=s.block, step=s.step,
        num_warps=s.warps, num_stages=s.stages, **early(x.device),
    )  # fmt: skip
    shared = (
        None if w.shared_gate_up is None else gated(rows, scale, GIVEN, norm.eps, w.shared_gate_up)
    )
    return Inner(routed, shared)


def experts(x: Tensor, norm: Norm, routing: Routing, w: ExpertWeights) -> Inner:
    """[n, H] → routed [n, k, I] and shared [n, Is]."""
    return _narrow(x, norm, routing, w) if len(x) <= NARROW else _wide(x, norm, routing, w)
