"""glu on a CPU: gate and up rows are widened once for all rows of the pass."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from sametoken.ops.compiled import BLOCK, Floats, Kernel, array, dot, silu, widen
from sametoken.ops.norm import Norm
from sametoken.ops.norm_cpu import norm as norm_rows


@Kernel
def _glu_kernel(x: Floats, gate_up: Any, y: Floats) -> None:
    inner = y.shape[1]
    for block in numba.prange((inner + BLOCK - 1) // BLOCK):
        gate = np.empty(gate_up.shape[1], dtype=np.float32)
        up = np.empty(gate_up.shape[1], dtype=np.float32)
        for i in range(block * BLOCK, min(inner, (block + 1) * BLOCK)):
            widen(gate_up[i], gate)
            widen(gate_up[inner + i], up)
            for r in range(x.shape[0]):
                y[r, i] = silu(dot(gate, x[r])) * dot(up, x[r])


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate x) ⊙ (up x) of normed rows: [n, H] → [n, I]."""
    y = torch.empty((len(x), len(gate_up) // 2), dtype=torch.float32)
    _glu_kernel(array(x), array(gate_up), array(y))
    return y


def glu(x: Tensor, norm: Norm, gate_up: Tensor) -> Tensor:
    """[n, H] → [n, I]."""
    return gated(norm_rows(x, norm), gate_up)
