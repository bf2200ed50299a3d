"""experts on a CPU: each distinct expert of a pass is read once, for the rows that chose it."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sametoken.ops.compiled import BLOCK, Floats, Kernel, array, dot, silu, widen
from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.glu_cpu import gated
from sametoken.ops.norm import Norm
from sametoken.ops.norm_cpu import weighed
from sametoken.ops.router import Routing


@Kernel
def _experts_kernel(
    h: Floats, scale: Floats, gate_up: Any, distinct: NDArray[np.int64], ids: NDArray[np.int64],
    y: Floats,
) -> None:  # fmt: skip
    inner = y.shape[2]
    blocks = (inner + BLOCK - 1) // BLOCK
    for task in numba.prange(distinct.size * blocks):
        expert, block = distinct[task // blocks], task % blocks
        gate = np.empty(gate_up.shape[2], dtype=np.float32)
        up = np.empty(gate_up.shape[2], dtype=np.float32)
        for i in range(block * BLOCK, min(inner, (block + 1) * BLOCK)):
            widen(gate_up[expert, i], gate)
            widen(gate_up[expert, inner + i], up)
            for r in range(h.shape[0]):
                for j in range(ids.shape[1]):
                    if ids[r, j] == expert:
                        g, u = dot(gate, h[r]) * scale[r], dot(up, h[r]) * scale[r]
                        y[r, j, i] = silu(g) * u


def experts(x: Tensor, norm: Norm, routing: Routing, w: ExpertWeights) -> Inner:
    """[n, H] → routed [n, k, I] and shared [n, Is]."""
    h, scale = weighed(x, norm)
    n, top_k = routing.experts.shape
    routed = torch.empty((n, top_k, w.gate_up.shape[1] // 2), dtype=torch.float32)
    ids = array(routing.experts)
    _experts_kernel(array(h), array(scale), array(w.gate_up), np.unique(ids), ids, array(routed))
    shared = None if w.shared_gate_up is None else gated(h, scale, w.shared_gate_up)
    return Inner(routed, shared)
