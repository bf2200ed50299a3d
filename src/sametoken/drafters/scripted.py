"""scripted: replays a known continuation, right up to a drawn position, for measuring speed.

Speed at a stated acceptance needs no trained head. Every round draws how many of its tokens will
be right, so that position i is reached with the stated, unconditional share; the next one is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from sametoken.drafters import Seen, Wish
from sametoken.track import Track


class ScriptedDrafter:
    """`plain` maps a prompt to what plain decoding says after it; `shares` do not increase."""

    def __init__(
        self,
        plain: Mapping[tuple[int, ...], Sequence[int]],
        shares: Sequence[float],
        vocabulary: int,
        seed: int = 0,
    ) -> None:
        self._plain, self._shares, self._vocabulary = plain, shares, vocabulary
        self._random = random.Random(seed)

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """The known tokens, wrong from the drawn position on."""
        return [self._draft(wish) for wish in wishes]

    def observe(self, seen: Sequence[Seen]) -> None:
        """Nothing to learn."""

    def forget(self, track: Track) -> None:
        """Nothing is held."""

    def _draft(self, wish: Wish) -> list[int]:
        said = len(wish.track.ids) - wish.prompt
        known = self._plain[tuple(wish.track.ids[: wish.prompt])]
        draft = list(known[said : said + min(wish.length, len(self._shares))])
        drawn = self._random.random()
        right = sum(share > drawn for share in self._shares)
        return [t if i < right else (t + 1) % self._vocabulary for i, t in enumerate(draft)]
