"""linear on a CPU: a row of weights is widened once and multiplied with every row of the pass."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from sametoken.ops.compiled import BLOCK, Floats, Kernel, array, dot, widen
from sametoken.ops.norm import Norm
from sametoken.ops.norm_cpu import weighed


@Kernel
def _linear_kernel(
    x: Floats, scale: Floats, weight: Any, skip: Floats, residual: bool, y: Floats
) -> None:
    outs = weight.shape[0]
    for block in numba.prange((outs + BLOCK - 1) // BLOCK):
        row = np.empty(weight.shape[1], dtype=np.float32)
        for o in range(block * BLOCK, min(outs, (block + 1) * BLOCK)):
            widen(weight[o], row)
            for r in range(x.shape[0]):
                total = dot(row, x[r]) * scale[r]
                y[r, o] = skip[r, o] + total if residual else total


def linear(
    x: Tensor, weight: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """[n, K] → [n, N]."""
    # A product with one changes no bit.
    h, scale = (x.contiguous(), x.new_ones(len(x))) if norm is None else weighed(x, norm)
    y = torch.empty((len(x), len(weight)), dtype=torch.float32)
    skip = y if residual is None else residual
    _linear_kernel(
        array(h), array(scale), array(weight), array(skip), residual is not None, array(y)
    )
    return y
