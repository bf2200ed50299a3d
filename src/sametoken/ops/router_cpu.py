"""router on a CPU: logits by the linear kernel, then each row chooses."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sametoken.ops.compiled import Floats, Kernel, array
from sametoken.ops.linear_cpu import linear
from sametoken.ops.router import RouterWeights, Routing


@Kernel
def _choose_kernel(
    logits: Floats, experts: int, renormalise: bool, ids: NDArray[np.int64], shares: Floats
) -> None:
    for r in numba.prange(logits.shape[0]):
        share = np.exp(logits[r, :experts] - logits[r, :experts].max())
        share = share / share.sum()
        chosen = np.zeros(experts, dtype=np.bool_)
        for _ in range(ids.shape[1]):
            best = -1
            for e in range(experts):
                if not chosen[e] and (best < 0 or share[e] > share[best]):
                    best = e
            chosen[best] = True
        slot, total = 0, np.float32(0)
        for e in range(experts):
            if chosen[e]:
                ids[r, slot], shares[r, slot] = e, share[e]
                total += share[e]
                slot += 1
        if renormalise:
            for j in range(slot):
                shares[r, j] = shares[r, j] / total


def router(x: Tensor, w: RouterWeights) -> Routing:
    """[n, H] → the rows' routing."""
    logits = linear(x, w.gate, norm=w.norm)
    ids = torch.empty((len(x), w.top_k), dtype=torch.int64)
    shares = torch.empty((len(x), w.top_k), dtype=torch.float32)
    _choose_kernel(array(logits), w.experts, w.renormalise, array(ids), array(shares))
    shared = None
    if logits.shape[1] > w.experts:
        # Row by row: a library's vector function may treat the tail of a tensor otherwise.
        shared = torch.stack([torch.sigmoid(row[w.experts :]) for row in logits.unbind()])
    return Routing(ids, shares, shared)
