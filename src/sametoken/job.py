"""One request on its way: its next rows, what it takes from a pass, and where it ends.

The end (an end token, a stop string, `max_tokens`) may fall inside an accepted run. Text, usage and
kept state then all stop exactly there: what is committed is what plain decoding would hold.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sametoken.drafters import Seen
from sametoken.request import Chunk, Generation, Options, Stats
from sametoken.sampling import Ask, Picked
from sametoken.step import Outcome, Work
from sametoken.stream import TextStream
from sametoken.track import Track
from sametoken.verify import agreeing

# Prompt rows of one sequence in one pass: bounds the memory of a pass, changes no bit.
PROMPT_CHUNK = 128


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way: waiting while `track` is None, then running, then done."""

    index: int
    prompt: list[int]
    options: Options
    text: TextStream | None
    track: Track | None = None
    after: Track | None = field(init=False)
    stats: Stats = field(default_factory=Stats)
    picked: list[Picked] = field(default_factory=list)
    chunks: deque[Chunk] = field(default_factory=deque)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    clock: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.after = self.options.after

    @property
    def placed(self) -> Track:
        """The place of a job that runs or has run."""
        assert self.track is not None, "the request is still waiting"
        return self.track

    def emit(self, picked: Sequence[Picked], drafted: int, eos: Sequence[int]) -> list[Picked]:
        """Take tokens one by one up to the sequence's end; the first `drafted` were drafts."""
        text, taken = "", []
        for one in picked:
            taken.append(one)
            self.picked.append(one)
            text += self._read(one.token, eos)
            if self.finish_reason is not None:
                break
        self.pieces.append(text)
        now, began = time.perf_counter(), self.clock
        if self.stats.prompt_seconds == 0.0:
            self.stats.prompt_seconds, self.clock = now - began, now
        else:
            self.stats.decode_seconds = now - began
        drafted = min(drafted, len(taken))
        whole = self.generation() if self.finish_reason is not None else None
        self.chunks.append(Chunk(self.index, text, tuple(taken), drafted, whole))
        return taken

    def _read(self, token: int, eos: Sequence[int]) -> str:
        """The text a token makes certain; sets `finish_reason` where the sequence ends."""
        ended = token in eos
        text = self.text.push(token) if self.text and not ended else ""
        if ended or (self.text and self.text.stopped is not None):
            self.finish_reason = "stop"
        elif len(self.picked) == self.options.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text:
            text += self.text.flush()
        return text

    def generation(self) -> Generation:
        """The finished sequence."""
        assert self.finish_reason is not None, "the sequence has not ended"
        kept = self.track if self.options.keep else None
        tokens = tuple(p.token for p in self.picked)
        text = "".join(self.pieces)
        return Generation(text, tokens, tuple(self.picked), self.finish_reason, self.stats, kept)


def work_for(job: Job, draft: Sequence[int]) -> Work:
    """The job's next rows: what is pending of its tokens, then the draft."""
    track = job.placed
    pending = track.ids[track.computed : track.computed + PROMPT_CHUNK]
    asks: list[Ask] = []
    if track.computed + len(pending) == len(track.ids):
        past = track.ids + list(draft)
        asks = [
            Ask(job.options.sampling, past[: len(track.ids) + i], len(job.prompt))
            for i in range(len(draft) + 1)
        ]
    return Work(track.span(len(pending), len(draft)), [*pending, *draft], asks)


def deliver(
    job: Job, work: Work, draft: Sequence[int], outcome: Outcome, eos: Sequence[int]
) -> Seen:
    """What a pass brought: compare, emit, commit; returns the rows that stay."""
    track, start = job.placed, work.span.start
    if not work.asks:
        track.computed, track.replay = start + work.span.certain, 0
        return Seen(track, start, outcome.hidden)
    take(job, draft, outcome.picked, eos)
    return Seen(track, start, outcome.hidden[: track.computed - start])


def take(job: Job, draft: Sequence[int], picked: Sequence[Picked], eos: Sequence[int]) -> None:
    """Compare, emit up to the end, and commit exactly what plain decoding would hold."""
    track = job.placed
    agreed = agreeing(draft, [p.token for p in picked])
    job.stats.record(len(draft), agreed)
    emitted = job.emit(picked[: agreed + 1], agreed, eos)
    track.ids += [p.token for p in emitted]
    track.computed, track.replay = len(track.ids) - 1, len(emitted) - 1
