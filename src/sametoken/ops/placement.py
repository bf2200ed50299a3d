"""Where the rows of a pass belong, as tensors that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sametoken.rows import Rows


@dataclass(frozen=True, slots=True)
class Placement:
    """int32 tensors. Per row: span [n], position [n]. Per span: first (index of its first row),
    width, slot, start, certain, drafts, replay [spans], and pages [spans, longest table], −1 where
    the span has no page. `longest` bounds the positions of the pass from above, `widest` the rows
    of a span.
    """

    span: Tensor
    position: Tensor
    first: Tensor
    width: Tensor
    slot: Tensor
    start: Tensor
    certain: Tensor
    drafts: Tensor
    replay: Tensor
    pages: Tensor
    longest: int
    widest: int


@dataclass(frozen=True, slots=True)
class PlacedRows(Rows):
    """Rows whose placement lies on the device already, and may change there between passes."""

    placement: Placement | None = None


def place(rows: Rows, device: torch.device) -> Placement:
    """The placement of a pass; every layer of the pass asks for the same one."""
    if isinstance(rows, PlacedRows) and rows.placement is not None:
        return rows.placement
    return _placed(rows, device)


@lru_cache(maxsize=2)
def _placed(rows: Rows, device: torch.device) -> Placement:
    spans = rows.spans
    table = max((len(span.pages) for span in spans), default=1)
    columns: list[list[int]] = [
        [i for i, span in enumerate(spans) for _ in range(span.width)],
        rows.positions(),
        [sum(span.width for span in spans[:i]) for i in range(len(spans))],
        [span.width for span in spans],
        [span.slot for span in spans],
        [span.start for span in spans],
        [span.certain for span in spans],
        [span.drafts for span in spans],
        [span.replay for span in spans],
        [page for span in spans for page in (*span.pages, *[-1] * (table - len(span.pages)))],
    ]
    # One copy for all of them: each crossing to the device costs as much as a small kernel.
    flat = torch.tensor([v for column in columns for v in column], dtype=torch.int32)
    parts = list(flat.to(device, non_blocking=True).split([len(column) for column in columns]))
    parts[-1] = parts[-1].view(len(spans), table)
    longest = max((span.start + span.width for span in spans), default=0)
    widest = max((span.width for span in spans), default=0)
    return Placement(*parts, longest, widest)  # type: ignore[call-arg]  # as many as columns
