"""Rounds that stay on the device: draft, pass, pick, compare, commit and rewind in CUDA graphs.

The host launches a round before it has read the one before, so it is never waited for; it learns
tokens and counts a round late. A sequence that ends on the device (an end token, its last allowed
token) is left alone by the round already under way. One set of graphs per number of sequences,
draft length, bound of the context and kind of pick; without graphs the same kernels run one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from sametoken.cache import Cache, pages_for
from sametoken.errors import NumericError
from sametoken.job import Job, take
from sametoken.model import Model
from sametoken.ops.attention import PAGE
from sametoken.ops.board_triton import Board, advance, begin, empty_board
from sametoken.ops.choose_triton import Wants
from sametoken.ops.pick_triton import pick_rows
from sametoken.sampling import Picked
from sametoken.track import Track

# Rounds under way at once: one that runs and one that waits for it.
_AHEAD = 2
# Pages of context that a graph is captured for at least; beyond, the next power of two.
_LEAST_PAGES = 4


class DeviceDrafter(Protocol):
    """What a drafter needs to take part in rounds on the device; without it, it drafts on the host.

    Both only enqueue work on the board's tensors, always the same.
    """

    def draft_on(self, board: Board) -> None:
        """Enter the drafts of every sequence, from `board.carried`."""
        ...

    def observe_on(self, board: Board, hidden: Tensor, picked: Tensor) -> None:
        """Learn the rows of the pass [n, H] and their picked tokens [n], after `advance`."""
        ...

    def carry(self, board: Board, tracks: Sequence[Track]) -> None:
        """Load `board.carried` with what is held for each sequence."""
        ...

    def uncarry(self, board: Board, tracks: Sequence[Track]) -> None:
        """Take it back."""
        ...


@dataclass(frozen=True)
class _Graphs:
    """A board and what runs a round on it."""

    board: Board
    graph: torch.cuda.CUDAGraph | None
    reports: tuple[Tensor, ...]
    events: tuple[torch.cuda.Event, ...]


class Rounds:
    """Runs rounds of the same jobs until something about them changes, then `land`s.

    Between `round` and `land` the jobs' tracks lag behind the device.
    """

    def __init__(self, model: Model, cache: Cache, *, graphs: bool = True) -> None:
        self._model, self._cache, self._graphs = model, cache, graphs
        self._made: dict[tuple[int, int, int, Wants, DeviceDrafter | None], _Graphs] = {}
        self._jobs: list[Job] = []
        self._lengths: list[int] = []
        self._drafter: DeviceDrafter | None = None
        self._now: _Graphs | None = None
        self._launched = 0
        self._flying: deque[int] = deque()
        self._eos = torch.tensor(model.config.eos_ids, dtype=torch.int64)

    @property
    def flying(self) -> bool:
        """Whether the tracks lag behind."""
        return self._now is not None

    def serves(self, jobs: Sequence[Job]) -> bool:
        """Whether these jobs' next rounds can stay on the device."""
        drafters = {job.placed.drafter for job in jobs} - {None}
        return len(drafters) <= 1 and all(_steady(job) for job in jobs)

    def round(self, jobs: Sequence[Job], lengths: Sequence[int]) -> None:
        """Launch a round with drafts of up to `lengths`, and deliver the one before it."""
        if self._jobs != list(jobs) or not self._fits():
            self.land()
            self._board(jobs, lengths)
        self._launch()
        while len(self._flying) >= (_AHEAD if self._may_lag() else 1):
            self._deliver()
        if any(job.finish_reason is not None for job in self._jobs):
            self.land()

    def land(self) -> None:
        """Wait for what is under way and bring the jobs' tracks up to date."""
        while self._flying:
            self._deliver()
        if self._now is not None and self._drafter is not None:
            self._drafter.uncarry(self._now.board, [job.placed for job in self._jobs])
        self._jobs, self._now = [], None

    # -- boarding ------------------------------------------------------------------------------

    def _board(self, jobs: Sequence[Job], lengths: Sequence[int]) -> None:
        self._jobs, self._lengths = list(jobs), list(lengths)
        drafts = max(lengths)
        drafter = next((j.placed.drafter for j in jobs if j.placed.drafter is not None), None)
        self._drafter = cast(DeviceDrafter, drafter) if drafter is not None and drafts else None
        longest = max(len(job.placed.ids) for job in jobs) + (_AHEAD + 1) * (drafts + 1)
        chunks = _LEAST_PAGES
        while chunks < pages_for(longest):
            chunks *= 2
        wants = Wants.of([job.options.sampling for job in jobs])
        key = (len(jobs), drafts, chunks, wants, self._drafter)
        if key not in self._made:
            self._made[key] = self._make(len(jobs), drafts, chunks, wants)
        self._now = self._made[key]
        _fill(self._now.board, jobs, lengths, self._eos)
        if self._drafter is not None:
            self._drafter.carry(self._now.board, [job.placed for job in jobs])

    def _fits(self) -> bool:
        """Whether the next round stays within the context its graph is made for."""
        assert self._now is not None, "jobs are on board"
        board = self._now.board
        ahead = (_AHEAD + 1) * board.ids.shape[1]
        return max(len(job.placed.ids) for job in self._jobs) + ahead <= board.rows.longest

    def _make(self, sequences: int, drafts: int, chunks: int, wants: Wants) -> _Graphs:
        model, device = self._model, self._model.device
        positions = self._cache.context + self._cache.longest_draft + 1
        board = empty_board(
            sequences,
            drafts,
            positions=positions,
            pages=pages_for(positions),
            longest=chunks * PAGE,
            ends=len(self._eos),
            hidden=model.config.hidden_size,
            wants=wants,
            dtype=model.dtype,
            device=device,
        )
        pin = device.type == "cuda"
        reports = tuple(
            torch.empty(board.report.shape, dtype=torch.int64, pin_memory=pin)
            for _ in range(_AHEAD)
        )
        if not (pin and self._graphs):
            return _Graphs(board, None, reports, ())
        # On an empty board a round changes nothing; run once, every kernel is compiled and loaded.
        self._enqueue(board)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._enqueue(board)
        return _Graphs(board, graph, reports, tuple(torch.cuda.Event() for _ in range(_AHEAD)))

    # -- one round -----------------------------------------------------------------------------

    def _enqueue(self, board: Board) -> None:
        model, rows = self._model, board.placed()
        if self._drafter is not None:
            self._drafter.draft_on(board)
        begin(board)
        hidden = model.hidden(board.ids.flatten(), rows, self._cache)
        picked = pick_rows(
            hidden,
            model.weights.head,
            board.settings,
            board.rows.span,
            board.rows.position,
            board.history,
        )
        advance(board, picked)
        if self._drafter is not None:
            self._drafter.observe_on(board, hidden, picked)

    def _launch(self) -> None:
        now = self._now
        assert now is not None, "jobs are on board"
        if now.graph is None:
            self._enqueue(now.board)
        else:
            now.graph.replay()
        index = self._launched % _AHEAD
        now.reports[index].copy_(now.board.report, non_blocking=True)
        if now.events:
            now.events[index].record()
        self._flying.append(index)
        self._launched += 1

    def _may_lag(self) -> bool:
        """Stop strings are found by the host alone: state that is kept must not run past one."""
        return not any(job.options.stop and job.options.keep for job in self._jobs)

    def _deliver(self) -> None:
        """Read the oldest round under way."""
        now, index = self._now, self._flying.popleft()
        assert now is not None, "jobs are on board"
        if now.events:
            now.events[index].synchronize()
        elif self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        drafts = now.board.drafts
        vocabulary = len(self._model.weights.head)
        lines = now.reports[index].tolist()
        for job, length, line in zip(self._jobs, self._lengths, lines, strict=True):
            if job.finish_reason is not None:
                continue
            if max(line[drafts:]) >= vocabulary:
                raise NumericError(
                    "the model's logits are not numbers; load it with --dtype float32."
                )
            picked = [Picked(token) for token in line[drafts:]]
            take(job, line[:length], picked, self._ends(job))

    def _ends(self, job: Job) -> tuple[int, ...]:
        return () if job.options.ignore_eos else self._model.config.eos_ids


def _steady(job: Job) -> bool:
    """Whether a job only decodes from here on, with tokens the device can pick by itself."""
    track, sampling = job.placed, job.options.sampling
    return (
        track.computed == len(track.ids) - 1
        and sampling.logprobs is None
        and not sampling.logit_bias
        and (track.drafter is None or hasattr(track.drafter, "draft_on"))
    )


def _fill(board: Board, jobs: Sequence[Job], lengths: Sequence[int], eos: Tensor) -> None:
    """Write the jobs' state to the board, in a few copies."""
    tracks = [job.placed for job in jobs]
    starts = [track.computed for track in tracks]
    _put_ints(board.rows.start, starts)
    _put_ints(board.ask, starts)
    _put_ints(board.steps.position, [start - 1 for start in starts])
    _put_ints(board.rows.slot, [track.lease.slot for track in tracks])
    _put_ints(board.rows.replay, [track.replay for track in tracks])
    _put_ints(board.left, [job.options.max_tokens - len(job.picked) for job in jobs])
    _put_ints(board.longest, lengths)
    table, history = torch.full(board.rows.pages.shape, -1), torch.zeros(board.history.shape)
    ends = torch.full(board.ends.shape, -1)
    table, history = table.int(), history.int()
    for i, (job, track) in enumerate(zip(jobs, tracks, strict=True)):
        table[i, : len(track.lease.pages)] = torch.tensor(track.lease.pages)
        history[i, : len(track.ids)] = torch.tensor(track.ids)
        if not job.options.ignore_eos and len(eos):
            ends[i, : len(eos)] = eos
    samplings = [job.options.sampling for job in jobs]
    board.settings.write(samplings, [len(job.prompt) for job in jobs])
    board.rows.pages.copy_(table)
    board.history.copy_(history)
    board.ends.copy_(ends)
    board.ids[:, 0] = torch.tensor([track.ids[-1] for track in tracks], device=board.ids.device)


def _put_ints(to: Tensor, values: Sequence[int]) -> None:
    to.copy_(torch.tensor(values, dtype=to.dtype))
