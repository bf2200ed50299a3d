"""Rounds: draft, one pass, pick, compare, commit or rewind; for every sequence at once.

Plain decoding is a draft of length 0 through the same code. Sequences join and leave between
rounds. The engine decides which rows ride in a pass; by the law that decides nothing about them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sametoken.cache import Cache
from sametoken.drafters import Drafter, Seen, Wish
from sametoken.errors import RequestError
from sametoken.job import PROMPT_CHUNK, Job, deliver, work_for
from sametoken.model import Model
from sametoken.request import Chunk, Generation, Options, Prompt
from sametoken.step import settle, step
from sametoken.stream import TextStream
from sametoken.text import Tokenizer
from sametoken.track import Track

if TYPE_CHECKING:
    from sametoken.rounds import Rounds


class Engine:
    """Runs requests on one model. Not thread-safe: one caller drives the rounds.

    `drafter` and `draft_max` are what a request gets that does not name its own. Without a
    `tokenizer` prompts must be token ids, and there is no text. With `rounds`, sequences that only
    decode stay on the device from round to round.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        draft_max: int = 0,
        rounds: Rounds | None = None,
    ) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.drafter, self.draft_max = drafter, draft_max
        self._rounds = rounds
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    # -- front doors ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: Options | Sequence[Options] | None = None,
    ) -> list[Generation]:
        """Continue one prompt or many; one `Options` for all, or one each.

        Raises `RequestError` for a prompt or setting that cannot be served.
        """
        jobs = self._submit_all(prompts, options)
        for _ in self._drive(jobs):
            pass
        return [job.generation() for job in jobs]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: Options | Sequence[Options] | None = None,
    ) -> Iterator[Chunk]:
        """As `generate`, but yields every round's chunks as they are made.

        Closing the iterator cancels what has not finished.
        """
        yield from self._drive(self._submit_all(prompts, options))

    def submit(self, prompt: Prompt, options: Options, index: int = 0) -> Job:
        """Queue one request; `round` moves it on, `Job.chunks` receives what it makes.

        A kept sequence given as `after` is handed over, whatever becomes of the request.
        """
        try:
            ids = self._ids(prompt)
            self._check(ids, options)
        except RequestError:
            if options.after is not None:
                self.release(options.after)
            raise
        room = self.cache.context - len(ids)
        options = replace(options, max_tokens=min(options.max_tokens, room))
        stream = TextStream(self.tokenizer, options.stop) if self.tokenizer else None
        job = Job(index, ids, options, stream)
        self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Forget a request, wherever it is; its state is given back."""
        if job in self._waiting:
            self._waiting.remove(job)
            if job.after is not None:
                self.release(job.after)
        elif job in self._running:
            self._land()
            self._running.remove(job)
            self.release(job.placed)

    def release(self, track: Track) -> None:
        """Give back the state of a kept sequence."""
        if track.drafter is not None:
            track.drafter.forget(track)
        self.cache.release(track.lease)

    def settle(self, track: Track) -> None:
        """Bring a kept sequence's recurrent state up to `track.computed`, as a pass would."""
        settle(self.model, self.cache, track.span(certain=0))
        track.replay = 0

    # -- one round -----------------------------------------------------------------------------

    @torch.inference_mode()
    def round(self) -> None:
        """Admit what fits, run one pass over every running sequence, and deliver its tokens.

        On the device, tokens are delivered a round late.
        """
        if self._waiting:
            self._land()
        self._admit()
        jobs = list(self._running)
        if not jobs:
            if self._waiting:
                raise RequestError(
                    "every place in the cache is held by kept sequences; release one of them."
                )
            return
        if self._rounds is not None and self._rounds.serves(jobs):
            self._rounds.round(
                jobs, [self._longest(job) if job.placed.drafter else 0 for job in jobs]
            )
        else:
            self._land()
            self._pass(jobs)
        self._retire()

    def _pass(self, jobs: Sequence[Job]) -> None:
        """One round driven from the host."""
        drafts = self._draft(jobs)
        works = [work_for(job, draft) for job, draft in zip(jobs, drafts, strict=True)]
        outcomes = step(self.model, self.cache, works)
        seen = [
            deliver(job, work, draft, outcome, self._eos(job))
            for job, work, draft, outcome in zip(jobs, works, drafts, outcomes, strict=True)
        ]
        _tell_drafters(seen)

    def _land(self) -> None:
        """Have the tracks say what the device knows."""
        if self._rounds is not None:
            self._rounds.land()

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            track = self._place(job)
            if track is None:
                return
            job.track = track
            job.stats.prompt_tokens = len(job.prompt)
            job.stats.cached_tokens = track.computed
            self._running.append(self._waiting.popleft())

    def _place(self, job: Job) -> Track | None:
        """A request's place: that of the sequence it goes on from, or a fresh one, or None yet."""
        positions = len(job.prompt) + job.options.max_tokens
        drafter = (job.options.drafter or self.drafter) if self._longest(job) else None
        old = job.after
        if old is not None:
            if drafter is old.drafter and job.prompt[: len(old.ids)] == old.ids:
                lease = self.cache.extend(old.lease, positions)
                if lease is None:
                    return None
                old.ids, old.lease = list(job.prompt), lease
                return old
            self.release(old)
            job.after = None
        lease = self.cache.lease(positions)
        return None if lease is None else Track(list(job.prompt), lease, drafter)

    def _draft(self, jobs: Sequence[Job]) -> list[list[int]]:
        """A proposal for each job; empty where the prompt is not through or drafts cannot pay."""
        drafts: list[list[int]] = [[] for _ in jobs]
        by_drafter: dict[Drafter, list[tuple[int, Wish]]] = {}
        for i, job in enumerate(jobs):
            track, length = job.placed, self._draft_length(job)
            if track.drafter is not None and length > 0:
                wish = Wish(track, job.options.sampling, len(job.prompt), length)
                by_drafter.setdefault(track.drafter, []).append((i, wish))
        for drafter, wishes in by_drafter.items():
            proposals = drafter.propose([wish for _, wish in wishes])
            for (i, wish), proposal in zip(wishes, proposals, strict=True):
                drafts[i] = proposal[: wish.length]
        return drafts

    def _draft_length(self, job: Job) -> int:
        """The longest draft that could be used: a round gives one token more than its draft."""
        if len(job.placed.ids) - job.placed.computed > PROMPT_CHUNK:
            return 0
        return min(self._longest(job), job.options.max_tokens - len(job.picked) - 1)

    def _longest(self, job: Job) -> int:
        own = job.options.draft_max
        return self.draft_max if own is None else own

    def _eos(self, job: Job) -> tuple[int, ...]:
        return () if job.options.ignore_eos else self.model.config.eos_ids

    def _retire(self) -> None:
        ended = [job for job in self._running if job.finish_reason is not None]
        self._running = [job for job in self._running if job.finish_reason is None]
        for job in ended:
            if not job.options.keep:
                self.release(job.placed)

    # -- requests ------------------------------------------------------------------------------

    def _submit_all(
        self, prompts: Prompt | Sequence[Prompt], options: Options | Sequence[Options] | None
    ) -> list[Job]:
        many = _as_many(prompts)
        if options is None or isinstance(options, Options):
            options = [options or Options()] * len(many)
        if len(options) != len(many):
            raise RequestError(f"{len(many)} prompts have {len(options)} options; match them.")
        jobs: list[Job] = []
        try:
            for index, (prompt, own) in enumerate(zip(many, options, strict=True)):
                jobs.append(self.submit(prompt, own, index))
        except BaseException:
            for job in jobs:
                self.cancel(job)
            raise
        return jobs

    def _drive(self, jobs: Sequence[Job]) -> Iterator[Chunk]:
        try:
            while any(job.finish_reason is None for job in jobs):
                self.round()
                for job in jobs:
                    while job.chunks:
                        yield job.chunks.popleft()
        finally:
            for job in jobs:
                self.cancel(job)

    def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give the prompt as token ids.")
        ids: list[int] = self.tokenizer.encode(prompt)
        return ids

    def _check(self, ids: Sequence[int], options: Options) -> None:
        if not ids:
            raise RequestError("the prompt is empty; give at least one token.")
        vocabulary = self.model.config.vocab_size
        outside = next((i for i in ids if not 0 <= i < vocabulary), None)
        if outside is not None:
            raise RequestError(f"token id {outside} is outside the vocabulary of {vocabulary}.")
        context = self.cache.context
        if len(ids) >= context:
            raise RequestError(
                f"the prompt's {len(ids)} tokens do not fit a context of {context}; "
                "shorten it or raise --context."
            )
        longest = self.cache.longest_draft
        if (options.draft_max or 0) > longest:
            raise RequestError(f"draft_max is {options.draft_max}; the engine allows {longest}.")
        if options.stop and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer, and this model has none.")


def _as_many(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt is a string or a sequence of ids; anything else is a sequence of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    one: list[int] = [p for p in prompts if isinstance(p, int)]
    if len(one) == len(prompts):
        return [one]
    return [p for p in prompts if not isinstance(p, int)]


def _tell_drafters(seen: Iterable[Seen]) -> None:
    by_drafter: dict[Drafter, list[Seen]] = {}
    for one in seen:
        if one.track.drafter is not None:
            by_drafter.setdefault(one.track.drafter, []).append(one)
    for drafter, rows in by_drafter.items():
        drafter.observe(rows)
