"""pick on a CPU: the head by the linear kernel; then each row by itself, as in the reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sametoken.ops.linear_cpu import linear
from sametoken.ops.pick import pick_logits
from sametoken.rows import alone
from sametoken.sampling import Ask, Picked


def pick(h: Tensor, head: Tensor, asks: Sequence[Ask]) -> list[Picked]:
    """[n, H] and one ask per row → one token per row."""
    if not asks:
        return []
    logits = alone(linear(h, head))
    return [pick_logits(row, ask) for row, ask in zip(logits, asks, strict=True)]
