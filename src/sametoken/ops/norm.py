"""norm: root-mean-square normalisation of one row.

    y = x · rsqrt(mean(x²) + eps) · w

Zero-centred families store w − 1; loading adds the 1.

Shapes: x [H] or [heads, D], w [H] or [D]; the mean runs over the last axis.
Arithmetic: fp32 throughout. `round_first` families (Qwen3) round x · rsqrt(…) to the row's dtype
before the product with w, the others round once at the end.
Before a matrix (linear, glu, router, experts) the norm is part of the product:

    W · norm(x) = r · (W · round(x ⊙ w))        r = rsqrt(mean(x²) + eps)

x ⊙ w is rounded once to the row's dtype, and the product's fp32 result is multiplied by r in fp32
before anything else happens to it. `round_first` has no effect there; it matters for the op here
and for the norms of heads.
Why: r is a sum along the row like the product itself, so a kernel needs one pass over x.
Promised: a row's bits depend on that row and w alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.rows import alone


@dataclass(frozen=True, slots=True)
class Norm:
    """weight [H] fp32, ready to multiply; eps; where the norm op and the norms of heads round."""

    weight: Tensor
    eps: float
    round_first: bool


def norm_row(x: Tensor, norm: Norm) -> Tensor:
    """One row, or one row's heads: [..., H] → [..., H], same dtype."""
    size = (x.shape[-1],)
    if norm.round_first:
        return (F.rms_norm(x.float(), size, eps=norm.eps).to(x.dtype) * norm.weight).to(x.dtype)
    return F.rms_norm(x.float(), size, norm.weight, norm.eps).to(x.dtype)


def weighed(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """What a matrix reads of [..., H], and r [..., 1] fp32 that multiplies what it makes of it."""
    r = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
    return (x.float() * norm.weight).to(x.dtype), r


def norm(x: Tensor, weight: Norm) -> Tensor:
    """[n, H] → [n, H]."""
    return torch.stack([norm_row(row, weight) for row in alone(x)])
