"""Drafters propose; nothing they do can change the output, only how many rounds it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.sampling import Sampling
from sametoken.track import Track


@dataclass(frozen=True, slots=True)
class Wish:
    """A proposal asked for: up to `length` tokens after `track.ids`.

    `prompt` counts the leading prompt tokens of the track; the request's settings let a drafter
    pick as the target will.
    """

    track: Track
    sampling: Sampling
    prompt: int
    length: int


@dataclass(frozen=True, slots=True)
class Seen:
    """True rows of a track after a pass: hidden [n, H] of positions start..start+n−1.

    The token after each of them is already in `track.ids`.
    """

    track: Track
    start: int
    hidden: Tensor


class Drafter(Protocol):
    """What the engine needs of a drafter. One drafter serves many sequences at once."""

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """At most `length` tokens for each wish; fewer, or none, is always allowed."""
        ...

    def observe(self, seen: Sequence[Seen]) -> None:
        """Learn the true rows of the last pass."""
        ...

    def forget(self, track: Track) -> None:
        """Drop whatever is held for a sequence that has ended."""
        ...
