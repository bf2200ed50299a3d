"""glu on a CPU: gate and up rows are widened once for all rows of the pass."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from sametoken.ops.compiled import BLOCK, Floats, Kernel, array, dot, silu, widen
from sametoken.ops.norm import Norm
from sametoken.ops.norm_cpu import weighed


@Kernel
def _glu_kernel(x: Floats, scale: Floats, gate_up: Any, y: Floats) -> None:
    inner = y.shape[1]
    for block in numba.prange((inner + BLOCK - 1) // BLOCK):
        gate = np.empty(gate_up.shape[1], dtype=np.float32)
        up = np.empty(gate_up.shape[1], dtype=np.float32)
        for i in range(block * BLOCK, min(inner, (block + 1) * BLOCK)):
            widen(gate_up[i], gate)
            widen(gate_up[inner + i], up)
            for r in range(x.shape[0]):
                g, u = dot(gate, x[r]) * scale[r], dot(up, x[r]) * scale[r]
                y[r, i] = silu(g) * u


def gated(h: Tensor, scale: Tensor, gate_up: Tensor) -> Tensor:
    """Gate, up and SiLU of weighed rows [n, H] with their r [n] → [n, I]."""
    y = torch.empty((len(h), len(gate_up) // 2), dtype=torch.float32)
    _glu_kernel(array(h), array(scale), array(gate_up), array(y))
    return y


def glu(x: Tensor, norm: Norm, gate_up: Tensor) -> Tensor:
    """[n, H] → [n, I]."""
    return gated(*weighed(x, norm), gate_up)
