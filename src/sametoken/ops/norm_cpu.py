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


@Kernel
def _weigh_kernel(x: Floats, weight: Floats, eps: float, y: Floats, scale: Floats) -> None:
    for r in numba.prange(x.shape[0]):
        mean = dot(x[r], x[r]) / np.float32(x.shape[1])
        scale[r] = np.float32(1) / np.sqrt(mean + np.float32(eps))
        for k in range(x.shape[1]):
            y[r, k] = x[r, k] * weight[k]


def weighed(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """What a matrix reads of [n, H], and r [n] that multiplies what it makes of it."""
    y, scale = torch.empty_like(x), x.new_empty(len(x))
    _weigh_kernel(array(x), array(norm.weight), norm.eps, array(y), array(scale))
    return y, scale


def norm(x: Tensor, weight: Norm) -> Tensor:
    """[n, H] → [n, H]."""
    y = torch.empty_like(x)
    _norm_kernel(array(x), array(weight.weight), weight.eps, array(y))
    return y
