"""ngram: prompt lookup. What followed the last few tokens when they last occurred, will follow."""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.drafters import Seen, Wish
from sametoken.track import Track

# Longest suffix looked up first. Two tokens are the fewest that say more than "a common word".
_LONGEST, _SHORTEST = 4, 2


class NgramDrafter:
    """Needs no model and no hidden rows; pays on text that repeats itself."""

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """The continuation of the latest earlier occurrence of each sequence's suffix."""
        return [lookup(wish.track.ids, wish.length) for wish in wishes]

    def observe(self, seen: Sequence[Seen]) -> None:
        """Nothing to learn: the tokens are the whole state."""

    def forget(self, track: Track) -> None:
        """Nothing is held."""


def lookup(ids: Sequence[int], length: int) -> list[int]:
    """Up to `length` tokens that followed the latest earlier occurrence of the longest suffix."""
    for size in range(min(_LONGEST, len(ids) - 1), _SHORTEST - 1, -1):
        suffix = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == suffix:
                after = start + size
                return list(ids[after : after + length])
    return []
