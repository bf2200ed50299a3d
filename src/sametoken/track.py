"""One sequence as the engine and the drafters see it: its tokens and its place in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sametoken.cache import Lease
from sametoken.rows import Span

if TYPE_CHECKING:
    from sametoken.drafters import Drafter


@dataclass(eq=False, slots=True)
class Track:
    """`ids` are the tokens so far; rows 0..computed−1 of them are in the cache.

    Between rounds `computed` is `len(ids) − 1` once the prompt is through: the last token has been
    picked but not run. `replay` counts accepted draft rows that the recurrent state has yet to
    absorb. `drafter` has followed the sequence from its first row. Compared by identity: two
    sequences with equal tokens are two sequences.
    """

    ids: list[int]
    lease: Lease
    drafter: Drafter | None
    computed: int = 0
    replay: int = 0

    def span(self, certain: int, drafts: int = 0) -> Span:
        """The next rows of this sequence in a pass."""
        lease = self.lease
        return Span(lease.slot, lease.pages, self.computed, certain, drafts, self.replay)

    def rows_at(self, start: int, count: int) -> Span:
        """`count` certain rows at `start`, of a part of the model without recurrent state."""
        return Span(self.lease.slot, self.lease.pages, start, count)
