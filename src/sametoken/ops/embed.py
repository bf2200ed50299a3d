"""embed: a token's row of the embedding table.

Shapes: ids [n] int64, table [V, H] → [n, H] in `dtype`. A copy and a cast; nothing is summed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """[n] → [n, H]."""
    return table[ids].to(dtype)
