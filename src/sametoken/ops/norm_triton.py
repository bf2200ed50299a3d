"""norm on a GPU: one program a row; the mean is one reduction of one fixed shape per size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.norm import Norm
from sametoken.ops.tiling import up2


@triton.jit
def normed(x, gain, size, eps, first: tl.constexpr, dtype: tl.constexpr):
    """A row's fp32 values, padded with zeros → the norm, rounded to `dtype`."""
    scaled = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if first:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * gain).to(dtype)


@triton.jit
def _norm_kernel(x, gain, y, size, eps, first: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    values = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(gain + at, mask=inside, other=0.0)
    out = normed(values, weight, size, eps, first, y.dtype.element_ty)
    tl.store(y + row * size + at, out, mask=inside)


def norm(x: Tensor, weight: Norm) -> Tensor:
    """[n, H] → [n, H]."""
    y = torch.empty_like(x)
    size = x.shape[-1]
    # Four warps whatever the width: the reduction's shape is the size's, not the pass's.
    _norm_kernel[(len(x),)](
        x, weight.weight, y, size, weight.eps, weight.round_first, up2(size), num_warps=4
    )
    return y
