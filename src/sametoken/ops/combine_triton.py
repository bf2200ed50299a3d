"""combine on a GPU: down projections, router weights, the sum over slots and the residual.

Narrow passes: a program owns a block of outputs and walks the pass's distinct experts in ascending
id, so every row's own experts come in that row's order of slots; a row that did not choose an
expert is left as it is. No scratch, no atomics, no order of arrival. Wide passes: a tile holds
pairs of one expert, and a second kernel adds each row's slots in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.experts_triton import (
    chosen_of,
    distinct,
    elements_between,
    group,
    pairs_of,
    slots_of,
)
from sametoken.ops.linear_triton import block_of, piece, product, project
from sametoken.ops.router import Routing
from sametoken.ops.schedules import schedule
from sametoken.ops.tiling import NARROW, dot, early, ready, up2


@triton.jit(do_not_specialize=["n"])
def _combine_kernel(
    routed, shared, ids, shares, gates, listed, down, to_shared, skip, y, n,
    size: tl.constexpr, inner: tl.constexpr, shared_inner: tl.constexpr, top_k: tl.constexpr,
    k_block: tl.constexpr, l_block: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    rows = tl.arange(0, tile)
    live = rows < n
    steps: tl.constexpr = (inner + step - 1) // step
    total = tl.zeros((block, tile), dtype=tl.float32)
    part = tl.zeros((block, tile), dtype=tl.float32)
    ready(pdl)
    # One loop over (expert, step), so that loads run ahead from one expert into the next; what
    # their addresses depend on is held in registers, or each would wait for a load of its own.
    count = tl.load(listed)
    entry = tl.arange(0, l_block)
    list = tl.load(listed + 1 + entry, mask=entry < count, other=0)
    found = chosen_of(ids, rows, live, top_k, k_block)
    for i in range(count * steps):
        expert = tl.sum(tl.where(entry == i // steps, list, 0), axis=0)
        at = (i % steps) * step + tl.arange(0, step)
        inside = at < inner
        slot = slots_of(found, expert, k_block)
        chosen = slot >= 0
        pair = rows * top_k + tl.maximum(slot, 0)
        weight = down + expert.to(tl.int64) * (size * inner)
        w = block_of(weight, outs, size, at, inside, inner)
        part = dot(w, piece(routed, pair, chosen, at, inside, inner), part)
        if i % steps == steps - 1:
            share = tl.load(shares + pair, mask=chosen, other=0.0)
            share = tl.broadcast_to(share[None, :], (block, tile))
            total = tl.where(chosen[None, :], tl.fma(share, part, total), total)
            part = tl.zeros((block, tile), dtype=tl.float32)
    if shared_inner > 0:
        part, _ = product(
            down + to_shared, shared, down, outs, rows, size, live, 0, shared_inner,
            shared_inner, False, tile, block, step,
        )  # fmt: skip
        gate = tl.load(gates + rows, mask=live, other=0.0)
        total = tl.fma(tl.broadcast_to(gate[None, :], (block, tile)), part, total)
    at = rows[None, :] * size + outs[:, None]
    stored = live[None, :] & (outs < size)[:, None]
    total += tl.load(skip + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)


def _narrow(inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor) -> Tensor:
    n, size = residual.shape
    top_k, width = inner.routed.shape[1:]
    y = torch.empty_like(residual)
    s = schedule("combine", size, width, NARROW, residual.device)
    _combine_kernel[(triton.cdiv(size, s.block),)](
        inner.routed, inner.shared, routing.experts, routing.weights, routing.shared,
        distinct(routing, len(w.down)), w.down, elements_between(w.down, w.shared_down),
        residual, y, n,
        size=size, inner=width, shared_inner=0 if inner.shared is None else inner.shared.shape[1],
        top_k=top_k, k_block=up2(top_k), l_block=up2(min(len(w.down), NARROW * top_k)),
        tile=NARROW, block=s.block, step=s.step,
        num_warps=s.warps, num_stages=s.stages, **early(residual.device),
    )  # fmt: skip
    return y


@triton.jit
def _down_kernel(
    routed, down, pairs, experts, firsts, ends, parts,
    size: tl.constexpr, inner: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    index = tl.program_id(1)
    ready(pdl)
    if tl.load(firsts + index) >= tl.load(ends + index):
        return
    pair, live = pairs_of(pairs, firsts, ends, index, tile)
    weight = down + tl.load(experts + index).to(tl.int64) * (size * inner)
    part, _ = product(
        weight, routed, down, outs, pair, size, live, 0, inner, inner, False, tile, block, step
    )
    at = pair[None, :] * size + outs[:, None]
    tl.store(parts + at, part, mask=live[None, :] & (outs < size)[:, None])


@triton.jit
def _sum_kernel(
    parts, shared, shares, gates, skip, y,
    size: tl.constexpr, top_k: tl.constexpr, has_shared: tl.constexpr,
    block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * block + tl.arange(0, block)
    inside = outs < size
    total = tl.zeros((block,), dtype=tl.float32)
    ready(pdl)
    for slot in tl.static_range(top_k):
        pair = row * top_k + slot
        part = tl.load(parts + pair * size + outs, mask=inside, other=0.0)
        share = tl.zeros((block,), dtype=tl.float32) + tl.load(shares + pair)
        total = tl.fma(share, part, total)
    if has_shared:
        part = tl.load(shared + row * size + outs, mask=inside, other=0.0)
        gate = tl.zeros((block,), dtype=tl.float32) + tl.load(gates + row)
        total = tl.fma(gate, part, total)
    total += tl.load(skip + row * size + outs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + outs, total.to(y.dtype.element_ty), mask=inside)


def _wide(inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor) -> Tensor:
    n, size = residual.shape
    top_k, width = inner.routed.shape[1:]
    groups = group(routing.experts, len(w.down))
    device, y = residual.device, torch.empty_like(residual)
    parts = torch.empty((n * top_k, size), dtype=torch.float32, device=device)
    s = schedule("combine", size, width, groups.tile, device)
    _down_kernel[(triton.cdiv(size, s.block), len(groups.first))](
        inner.routed, w.down, groups.pairs, groups.expert, groups.first, groups.end, parts,
        size=size, inner=width, tile=groups.tile, block=s.block, step=s.step,
        num_warps=s.warps, num_stages=s.stages, **early(device),
    )  # fmt: skip
    shared = None
    if inner.shared is not None and w.shared_down is not None:
        shared = project(inner.shared, w.shared_down, None, torch.float32)
    block = min(1024, up2(size))
    _sum_kernel[(n, triton.cdiv(size, block))](
        parts, shared, routing.weights, routing.shared, residual, y,
        size=size, top_k=top_k, has_shared=shared is not None, block=block,
        num_warps=4, **early(device),
    )  # fmt: skip
    return y


def combine(inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor) -> Tensor:
    """[n, k, I], [n, Is] and residual [n, H] → [n, H]."""
    run = _narrow if len(residual) <= NARROW else _wide
    return run(inner, routing, w, residual.contiguous())
