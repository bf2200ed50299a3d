"""router on a GPU: logits by chunks of K, then one program a row that chooses.

A matrix this small occupies the device only if K is cut as well: chunks of `CHUNK`, whose sums are
added in ascending order. A row's k largest shares are those that fewer than k others outrank,
which needs no loop. The last row to choose lists the distinct experts of the pass; who is last
changes nothing.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.linear_triton import product
from sametoken.ops.router import RouterWeights, Routing
from sametoken.ops.schedules import schedule
from sametoken.ops.tiling import NARROW, early, ready, up2

# Part of the contract: 17 blocks of 16 experts times 4 chunks of a row of 2048 are 68 programs.
CHUNK = 512
# Warps of the program that chooses; a sum over the experts has the order they give it.
_WARPS = 8


@triton.jit(do_not_specialize=["n"])
def _logits_kernel(
    x, weight, gain, parts, squares, n,
    size: tl.constexpr, width: tl.constexpr, chunk_size: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    chunk = tl.program_id(1)
    rows = tl.program_id(2) * tile + tl.arange(0, tile)
    live = rows < n
    start = chunk * chunk_size
    ready(pdl)
    acc, square = product(
        weight, x, gain, outs, rows, width, live, start, tl.minimum(start + chunk_size, size),
        size, True, tile, block, step,
    )  # fmt: skip
    own = chunk * n + rows
    at = own[None, :].to(tl.int64) * width + outs[:, None]
    tl.store(parts + at, acc, mask=live[None, :] & (outs < width)[:, None])
    # Every block of experts has the same sum of squares; one leaves it.
    tl.store(squares + own, square, mask=rows < tl.where(tl.program_id(0) == 0, n, 0))


@triton.jit
def list_distinct(ids, total, listed, experts, block: tl.constexpr, step: tl.constexpr):
    """Write how many experts there are among ids[:total], then the experts in ascending order."""
    expert, at = tl.arange(0, block), tl.arange(0, step)
    some = tl.load(ids + at, mask=at < total, other=-1, cache_modifier=".cg")
    found = tl.max((some[None, :] == expert[:, None]).to(tl.int32), axis=1)
    present = (found > 0) & (expert < experts)
    place = tl.cumsum(present.to(tl.int32), axis=0)
    tl.store(listed + place, expert, mask=present)
    tl.store(listed, tl.sum(present.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["n"])
def _choose_kernel(
    parts, squares, ids, shares, shared, listed, counter, n, eps,
    size: tl.constexpr, chunks: tl.constexpr, experts: tl.constexpr, has_shared: tl.constexpr,
    top_k: tl.constexpr, renormalise: tl.constexpr, listing: tl.constexpr,
    block: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    width: tl.constexpr = experts + 1 if has_shared else experts
    inside = at < experts
    logits = tl.zeros((block,), dtype=tl.float32)
    square, gate = 0.0, 0.0
    ready(pdl)
    for chunk in tl.static_range(chunks):
        own = chunk * n + row
        logits += tl.load(parts + own * width + at, mask=inside, other=0.0)
        square += tl.load(squares + own)
        if has_shared:
            gate += tl.load(parts + own * width + experts)
    scale = tl.rsqrt(square / size + eps)
    logits = tl.where(inside, logits * scale, -float("inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0))
    weights = tl.where(inside, weights / tl.sum(weights, axis=0), -1.0)
    # A larger share outranks, and of equal ones the lower id.
    over = (weights[None, :] > weights[:, None]) | (
        (weights[None, :] == weights[:, None]) & (at[None, :] < at[:, None])
    )
    chosen = (tl.sum(over.to(tl.int32), axis=1) < top_k) & inside
    if renormalise:
        weights = weights / tl.sum(tl.where(chosen, weights, 0.0), axis=0)
    slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    # Of what is not a number nothing outranks anything; still only k are stored.
    chosen = chosen & (slot < top_k)
    tl.store(ids + row * top_k + slot, at.to(tl.int64), mask=chosen)
    tl.store(shares + row * top_k + slot, weights, mask=chosen)
    if has_shared:
        tl.store(shared + row, 1.0 / (1.0 + tl.exp(-gate * scale)))
    if listing:
        # All of this program's stores come before its count, and all counts before the last one's.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == n - 1:
            tl.store(counter, 0)
            list_distinct(ids, n * top_k, listed, experts, block, step)


@cache
def _counter(device: torch.device) -> Tensor:
    """Zero, and every kernel that counts with it leaves it so."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def router(x: Tensor, w: RouterWeights) -> Routing:
    """[n, H] → each row's experts."""
    x = x.contiguous()
    n, size = x.shape
    width, chunks = len(w.gate), triton.cdiv(size, CHUNK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    parts, squares = empty(chunks, n, width), empty(chunks, n)
    s = schedule("router", width, size, NARROW, x.device)
    _logits_kernel[(triton.cdiv(width, s.block), chunks, triton.cdiv(n, NARROW))](
        x, w.gate, w.norm.weight, parts, squares, n,
        size=size, width=width, chunk_size=CHUNK, tile=NARROW, block=s.block, step=s.step,
        num_warps=s.warps, num_stages=s.stages, **early(x.device),
    )  # fmt: skip
    ids, shares = empty(n, w.top_k, dtype=torch.int64), empty(n, w.top_k)
    shared = empty(n, 1) if width > w.experts else None
    # One more than there can be, so that a reader need not know the count before it reads.
    listed = empty(2 + w.experts, dtype=torch.int32) if n <= NARROW else None
    _choose_kernel[(n,)](
        parts, squares, ids, shares, shared, listed, _counter(x.device), n, w.norm.eps,
        size=size, chunks=chunks, experts=w.experts, has_shared=shared is not None,
        top_k=w.top_k, renormalise=w.renormalise, listing=listed is not None,
        block=up2(w.experts), step=up2(NARROW * w.top_k), num_warps=_WARPS, **early(x.device),
    )  # fmt: skip
    return Routing(ids, shares, shared, listed)
