"""Where the rows of a pass belong, as tensors that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sametoken.rows import Rows


@dataclass(frozen=True, slots=True)
class Placement:
    """int32 tensors: positions [n]; pages [n, longest], a row's own page table; and per span
    first (index of its first row), slots, certain, drafts, replay [spans].
    """

    positions: Tensor
    pages: Tensor
    first: Tensor
    slots: Tensor
    certain: Tensor
    drafts: Tensor
    replay: Tensor
    longest: int


@lru_cache(maxsize=2)
def place(rows: Rows, device: torch.device) -> Placement:
    """The placement of a pass; every layer of the pass asks for the same one."""
    spans = rows.spans
    longest = max((position for _, position in rows.each()), default=0) + 1
    table = max((len(span.pages) for span in spans), default=1)
    pages = [[*span.pages, *[0] * (table - len(span.pages))] for span, _ in rows.each()]
    starts = [sum(span.width for span in spans[:i]) for i in range(len(spans))]

    def on_device(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Placement(
        positions=on_device(rows.positions()),
        pages=on_device(pages),
        first=on_device(starts),
        slots=on_device([span.slot for span in spans]),
        certain=on_device([span.certain for span in spans]),
        drafts=on_device([span.drafts for span in spans]),
        replay=on_device([span.replay for span in spans]),
        longest=longest,
    )
