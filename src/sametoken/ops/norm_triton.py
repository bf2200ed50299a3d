"""norm on a GPU: one program a row; the mean is one reduction of one fixed shape per size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.norm import Norm
from sametoken.ops.tiling import early, ready, up2


@triton.jit
def _norm_kernel(
    x, gain, y, eps,
    size: tl.constexpr, first: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    weight = tl.load(gain + at, mask=inside, other=0.0)
    ready(pdl)
    values = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    if first:
        scaled = scaled.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * size + at, (scaled * weight).to(y.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Norm) -> Tensor:
    """[n, H] → [n, H]."""
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    # Four warps whatever the width: the reduction's shape is the size's, not the pass's.
    _norm_kernel[(len(x),)](
        x, weight.weight, y, weight.eps,
        size=size, first=weight.round_first, block=up2(size), num_warps=4, **early(x.device),
    )  # fmt: skip
    return y
