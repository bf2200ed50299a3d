"""router on a GPU: fp32 logits by the linear sum, then one program a row chooses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.linear_triton import project
from sametoken.ops.norm_triton import norm
from sametoken.ops.router import RouterWeights, Routing
from sametoken.ops.tiling import up2


@triton.jit
def _choose_kernel(
    logits, ids, shares, width, experts,
    top_k: tl.constexpr, renormalise: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < experts
    values = tl.load(logits + row * width + at, mask=inside, other=-float("inf"))
    weights = tl.exp(values - tl.max(values, axis=0))
    shared = weights / tl.sum(weights, axis=0)
    left = tl.where(inside, shared, -1.0)
    chosen = at < 0
    for _ in tl.static_range(top_k):
        # The lowest id of the largest share left.
        best = tl.min(tl.where(left == tl.max(left, axis=0), at, block), axis=0)
        chosen = chosen | (at == best)
        left = tl.where(at == best, -1.0, left)
    slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    if renormalise:
        shared = shared / tl.sum(tl.where(chosen, shared, 0.0), axis=0)
    tl.store(ids + row * top_k + slot, at.to(tl.int64), mask=chosen)
    tl.store(shares + row * top_k + slot, shared, mask=chosen)


def router(x: Tensor, w: RouterWeights) -> tuple[Tensor, Routing]:
    """[n, H] → normed rows [n, H] and their routing."""
    h = norm(x, w.norm)
    logits = project(h, w.gate, None, torch.float32)
    ids = torch.empty((len(x), w.top_k), dtype=torch.int64, device=x.device)
    shares = torch.empty((len(x), w.top_k), dtype=torch.float32, device=x.device)
    _choose_kernel[(len(x),)](
        logits, ids, shares, logits.shape[1], w.experts,
        top_k=w.top_k, renormalise=w.renormalise, block=up2(w.experts), num_warps=4,
    )  # fmt: skip
    shared = torch.sigmoid(logits[:, w.experts :]) if logits.shape[1] > w.experts else None
    return h, Routing(ids, shares, shared)
