"""Which rows ride in a pass, and which sequence each belongs to.

A pass is a list of spans; a span is one sequence's consecutive positions. Nothing here computes:
ops read it to find a row's own past, and no op may use it for anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows in a pass: `certain` rows that stay, then `drafts` that may be rewound.

    `start` is the absolute position of the first row. `replay` counts the draft rows of the
    sequence's previous pass that were accepted: recurrent state absorbs them before anything else.
    `pages[i]` holds the keys and values of positions `i * PAGE` onwards.
    """

    slot: int
    pages: tuple[int, ...]
    start: int
    certain: int
    drafts: int = 0
    replay: int = 0

    @property
    def width(self) -> int:
        """Rows of this span."""
        return self.certain + self.drafts

    def piece(self, first: int, count: int) -> Span:
        """Some of its rows, for an op that only reads their past."""
        return Span(self.slot, self.pages, self.start + first, count)


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a pass, span after span."""

    spans: tuple[Span, ...]

    @property
    def width(self) -> int:
        """Rows in the pass."""
        return sum(span.width for span in self.spans)

    def positions(self) -> list[int]:
        """Absolute position of every row."""
        return [span.start + i for span in self.spans for i in range(span.width)]

    def blocks(self, values: Tensor) -> Iterator[tuple[Span, Tensor]]:
        """Each span with its own rows of `values` [width, ...]."""
        yield from zip(self.spans, torch.split(values, [s.width for s in self.spans]), strict=True)

    def each(self) -> Iterator[tuple[Span, int]]:
        """Each row as its span and its absolute position."""
        for span in self.spans:
            for i in range(span.width):
                yield span, span.start + i


def alone(values: Tensor) -> list[Tensor]:
    """The rows of [n, ...], each a copy in memory of its own.

    A view into a wider tensor starts wherever its index puts it, and a library may take another
    path for another alignment; a fresh allocation always starts the same way.
    """
    return [row.clone(memory_format=torch.contiguous_format) for row in values.unbind()]
