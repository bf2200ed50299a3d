"""combine on a CPU: an output walks the pass's distinct experts in ascending id.

So every row's own experts come in that row's order of slots, whoever else is there.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sametoken.ops.compiled import BLOCK, Floats, Kernel, array, dot, widen
from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.router import Routing


@Kernel
def _combine_kernel(
    routed: Floats, down: Any, distinct: NDArray[np.int64], ids: NDArray[np.int64], shares: Floats,
    shared: Floats, shared_down: Any, gates: Floats, has_shared: bool, skip: Floats, y: Floats,
) -> None:  # fmt: skip
    n, outs = skip.shape
    for block in numba.prange((outs + BLOCK - 1) // BLOCK):
        row = np.empty(routed.shape[2], dtype=np.float32)
        shared_row = np.empty(shared.shape[1], dtype=np.float32)
        total = np.empty(n, dtype=np.float32)
        for o in range(block * BLOCK, min(outs, (block + 1) * BLOCK)):
            total[:] = 0
            for expert in distinct:
                widen(down[expert, o], row)
                for r in range(n):
                    for j in range(ids.shape[1]):
                        if ids[r, j] == expert:
                            total[r] += shares[r, j] * dot(row, routed[r, j])
            if has_shared:
                widen(shared_down[o], shared_row)
                for r in range(n):
                    total[r] += gates[r, 0] * dot(shared_row, shared[r])
            for r in range(n):
                y[r, o] = skip[r, o] + total[r]


def combine(inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor) -> Tensor:
    """[n, k, I], [n, Is] and residual [n, H] → [n, H]."""
    y, ids = torch.empty_like(residual), array(routing.experts)
    has_shared = inner.shared is not None
    nothing = residual.new_empty((1, 1))
    _combine_kernel(
        array(inner.routed), array(w.down), np.unique(ids), ids, array(routing.weights),
        array(nothing if inner.shared is None else inner.shared),
        array(w.down[0] if w.shared_down is None else w.shared_down),
        array(nothing if routing.shared is None else routing.shared),
        has_shared, array(residual), array(y),
    )  # fmt: skip
    return y
