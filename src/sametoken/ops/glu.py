"""glu: norm, gate and up projections and SiLU of a dense MLP.

    [g ; u] = W · norm(x) = r · (W · round(x ⊙ w))        y = silu(g) ⊙ u

Shapes: x [H], W [2I, H] (rows 0..I−1 gate, I..2I−1 up), y [I].
Arithmetic: the norm as ops/norm tells; fp32 accumulators; r, SiLU and product in fp32; one rounding
to the row's dtype, which is the input of the down projection.
Promised: a row's bits depend on that row, the norm and W alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops.linear import dot_normed
from sametoken.ops.norm import Norm
from sametoken.rows import alone


def gated(x: Tensor, norm: Norm, gate_up: Tensor) -> Tensor:
    """silu(gate norm(x)) ⊙ (up norm(x)): [H] → [I] in the row's dtype."""
    gate, up = dot_normed(gate_up, x, norm).chunk(2)
    return (F.silu(gate) * up).to(x.dtype)


def glu(x: Tensor, norm: Norm, gate_up: Tensor) -> Tensor:
    """[n, H] → [n, I]."""
    return torch.stack([gated(row, norm, gate_up) for row in alone(x)])
