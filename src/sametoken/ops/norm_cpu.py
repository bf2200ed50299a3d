"""norm on a CPU: each row by one thread, with the one dot product."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from sametoken.ops.compiled import Floats, Kernel, array, dot
from sametoken.ops.norm import Norm


@numba.njit(cache=True, nogil=True)
def normalise(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """One vector. In fp32 the two families' rounding points are one."""
    scale = np.float32(1) / np.sqrt(dot(x, x) / np.float32(x.size) + np.float32(eps))
    for k in range(x.size):
        out[k] = x[k] * scale * weight[k]


@Kernel
def _norm_kernel(x: Floats, weight: Floats, eps: float, y: Floats) -> None:
    for r in numba.prange(x.shape[0]):
        normalise(x[r], weight, eps, y[r])


def norm(x: Tensor, weight: Norm) -> Tensor:
    """[n, H] → [n, H]."""
    y = torch.empty_like(x)
    _norm_kernel(array(x), array(weight.weight), weight.eps, array(y))
    return y
