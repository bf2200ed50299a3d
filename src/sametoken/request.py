"""What is asked of the engine for one sequence, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sametoken.drafters import Drafter
from sametoken.errors import RequestError
from sametoken.sampling import Picked, Sampling
from sametoken.track import Track

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Options:
    """How to continue a prompt. The defaults are greedy, with the engine's drafter.

    max_tokens: longest answer; a context that ends before it ends the answer, as "length".
    stop: texts that end the sequence; the text ends just before the first of them.
    ignore_eos: go on past end tokens. draft_max: longest draft, 0 for plain decoding, None for
    the engine's. drafter: another drafter than the engine's. keep: leave the sequence's state in
    the cache, so that a later request can go on from `Generation.kept` by passing it, once, as
    `after`; a prompt that does not begin with the kept tokens starts afresh.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    drafter: Drafter | None = None
    draft_max: int | None = None
    keep: bool = False
    after: Track | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if self.draft_max is not None and self.draft_max < 0:
            raise RequestError(f"draft_max is {self.draft_max}; it must be at least 0.")
        if any(not stop for stop in self.stop):
            raise RequestError("stop holds an empty string; remove it.")


@dataclass(slots=True)
class Stats:
    """Counts of one sequence. `drafted[i]` and `accepted[i]` are of draft position i + 1."""

    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(self, drafted: int, agreed: int) -> None:
        """Count one verification of `drafted` tokens, the first `agreed` of which were right."""
        self.rounds += 1
        missing = drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < agreed

    def acceptance(self) -> list[float]:
        """By position: of all drafts that long, the share accepted up to and including it."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to one sequence; `index` is the prompt's place in the call.

    `drafted` counts how many of `picked`, from the first on, came from the draft.
    `generation` is the whole, in a sequence's last chunk; None before.
    """

    index: int
    text: str
    picked: tuple[Picked, ...]
    drafted: int
    generation: Generation | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished sequence. `tokens` include the end token, `text` does not show it.

    finish_reason: "stop" for an end token or a stop string, "length" for `max_tokens`.
    """

    text: str
    tokens: tuple[int, ...]
    picked: tuple[Picked, ...]
    finish_reason: str
    stats: Stats
    kept: Track | None
