"""tune: find the fastest schedules of this GPU for a model's shapes, and admit only exact ones.

A schedule is tried only if every row it puts out has the very bits of the first schedule, at
several widths. Times are of one op in a CUDA graph over weights too large for any cache.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor

from sametoken.config import Mixer, ModelConfig
from sametoken.lab.check import same_bits
from sametoken.ops.combine_triton import combine
from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.experts_triton import experts
from sametoken.ops.linear_triton import project
from sametoken.ops.norm import Norm
from sametoken.ops.router import RouterWeights, Routing
from sametoken.ops.router_triton import router
from sametoken.ops.schedules import FIRST, Schedule, key, own_path, table
from sametoken.ops.tiling import NARROW

# Weights of a trial in all: several times the largest cache of today's GPUs, 60 MB.
_BYTES = 400 << 20
# Rows of a pass whose times are added up: plain decoding and a verification of three drafts.
WIDTHS = (1, 4)
# Rows of the passes that are compared bit by bit.
_CHECKED = (1, 3, 16)
_REPEATS = 15
# Bytes a program should have in flight. Latency times bandwidth is some 32 KB for each of a
# Hopper GPU's processors, and its shared memory holds 227 KB.
_LEAST, _MOST = 8 << 10, 100 << 10

Run = Callable[[int, int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Trial:
    """A kernel on a weight shape: `run(copy, rows)` runs the op on one of `copies` weights."""

    kernel: str
    outs: int
    size: int
    copies: int
    run: Run
    blocks: Sequence[int]

    @property
    def key(self) -> str:
        """Its name in the table."""
        return key(self.kernel, self.outs, self.size, NARROW)

    def candidates(self) -> Iterator[Schedule]:
        """Every schedule worth a trial."""
        parts = 2 if self.kernel == "experts" else 1
        for block, step, warps, stages in product(
            self.blocks, (128, 256, 512), (2, 4, 8), (2, 3, 4, 5)
        ):
            ahead = parts * block * step * 2 * (stages - 1)
            loads = parts * block * step // (32 * warps * 8)
            if step <= self.size and _LEAST <= ahead <= _MOST and 1 <= loads <= 16:
                yield Schedule(block, step, warps, stages)


def trials(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, small: bool = False
) -> list[Trial]:
    """What a model of this shape runs in a narrow pass; `small` makes one copy of each weight."""
    make = _Material(config, device, dtype, 1 if small else _BYTES)
    hidden, shape = config.hidden_size, config.attention
    width = shape.q_heads * shape.head_dim
    inputs = width * (2 if shape.gated else 1) + 2 * shape.kv_heads * shape.head_dim
    found = {(inputs, hidden): True, (hidden, width): False, (config.vocab_size, hidden): False}
    if config.delta is not None and Mixer.DELTA in config.mixers:
        delta = config.delta
        values = delta.value_heads * delta.value_dim
        found |= {
            (delta.conv_channels + 2 * delta.value_heads + values, hidden): True,
            (hidden, values): False,
        }
    linears = [make.linear(outs, size, normed) for (outs, size), normed in found.items()]
    return linears if config.moe is None else [*linears, *make.moe()]


class _Material:
    """Random weights and rows of one model's shape."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, size: int
    ) -> None:
        self.config, self.device, self.dtype, self.size = config, device, dtype, size
        self.generator = torch.Generator(device).manual_seed(0)
        self.rows = self.matrix(NARROW, config.hidden_size)
        self.norm = Norm(1 + self.matrix(1, config.hidden_size)[0].float(), 1e-6, False)

    def matrix(self, *shape: int) -> Tensor:
        values = torch.empty(shape, device=self.device, dtype=self.dtype)
        return values.normal_(generator=self.generator).mul_(shape[-1] ** -0.5)

    def linear(self, outs: int, size: int, normed: bool) -> Trial:
        copies = max(1, self.size // (outs * size * self.dtype.itemsize))
        weights = [self.matrix(outs, size) for _ in range(copies)]
        rows, norm = self.matrix(NARROW, size), self.norm if normed else None

        def run(copy: int, n: int) -> tuple[Tensor, ...]:
            return (project(rows[:n], weights[copy], None, self.dtype, norm),)

        return Trial("linear", outs, size, copies, run, (16, 32, 64, 128))

    def moe(self) -> list[Trial]:
        shape, hidden = self.config.moe, self.config.hidden_size
        assert shape is not None, "a mixture of experts"
        inner, shared = shape.intermediate, shape.shared_intermediate
        weights = ExpertWeights(
            self.matrix(shape.experts, 2 * inner, hidden),
            self.matrix(shape.experts, hidden, inner),
            self.matrix(2 * shared, hidden) if shared else None,
            self.matrix(hidden, shared) if shared else None,
        )
        return [*self._experts(weights), self._router()]

    def _experts(self, weights: ExpertWeights) -> list[Trial]:
        shape, hidden = self.config.moe, self.config.hidden_size
        assert shape is not None, "a mixture of experts"
        # Experts drawn anew for every copy stand for the weights of another layer.
        copies = max(1, shape.experts // shape.top_k)
        drawn = [self._routing(i) for i in range(copies)]
        routings = [{n: _first(one, n) for n in range(1, NARROW + 1)} for one in drawn]
        width = 0 if weights.shared_down is None else weights.shared_down.shape[1]
        inner = Inner(
            self.matrix(NARROW, shape.top_k, shape.intermediate),
            self.matrix(NARROW, width) if width else None,
        )

        def up(copy: int, n: int) -> tuple[Tensor, ...]:
            out = experts(self.rows[:n], self.norm, routings[copy][n], weights)
            return (out.routed,) if out.shared is None else (out.routed, out.shared)

        def down(copy: int, n: int) -> tuple[Tensor, ...]:
            own = Inner(inner.routed[:n], None if inner.shared is None else inner.shared[:n])
            return (combine(own, routings[copy][n], weights, self.rows[:n]),)

        double = 2 * shape.intermediate
        return [
            Trial("experts", double, hidden, copies, up, (16, 32, 64)),
            Trial("combine", hidden, shape.intermediate, copies, down, (16, 32, 64)),
        ]

    def _routing(self, seed: int) -> Routing:
        shape = self.config.moe
        assert shape is not None, "a mixture of experts"
        generator = torch.Generator(self.device).manual_seed(seed)
        order = torch.rand(NARROW, shape.experts, device=self.device, generator=generator).argsort()
        ids = order[:, : shape.top_k].sort(dim=1).values
        weights = torch.rand(ids.shape, device=self.device, generator=generator)
        return Routing(ids, weights, weights[:, :1].contiguous())

    def _router(self) -> Trial:
        shape, hidden = self.config.moe, self.config.hidden_size
        assert shape is not None, "a mixture of experts"
        width = shape.experts + (1 if shape.shared_intermediate else 0)
        copies = max(1, self.size // 4 // (width * hidden * self.dtype.itemsize))
        weights = [
            RouterWeights(self.norm, self.matrix(width, hidden), shape.experts, shape.top_k, True)
            for _ in range(copies)
        ]

        def run(copy: int, n: int) -> tuple[Tensor, ...]:
            found = router(self.rows[:n], weights[copy])
            return found.experts, found.weights

        return Trial("router", width, hidden, copies, run, (16, 32, 64))


def _first(routing: Routing, n: int) -> Routing:
    """The routing of the first n rows, with their distinct experts found beforehand."""
    ids = routing.experts[:n].contiguous()
    found = torch.unique(ids)
    listed = torch.cat((found.new_tensor([len(found)]), found, found[:1])).int()
    shared = None if routing.shared is None else routing.shared[:n].contiguous()
    return Routing(ids, routing.weights[:n].contiguous(), shared, listed)


@dataclass(frozen=True, slots=True)
class Result:
    """A schedule's seconds by width of pass; `exact` is whether its bits are the first's."""

    schedule: Schedule
    exact: bool
    seconds: tuple[float, ...]


def measure(trial: Trial, schedule: Schedule, device: torch.device) -> Result | None:
    """Check and time one schedule; None where it does not fit the device."""
    own = table(device.type, device.index or 0)
    before = own.pop(trial.key, None)
    try:
        wanted = [trial.run(0, n) for n in _CHECKED]
        own[trial.key] = schedule
        try:
            found = [trial.run(0, n) for n in _CHECKED]
        except triton.OutOfResources:
            return None
        exact = all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
        return Result(schedule, exact, tuple(_seconds(trial, n) for n in WIDTHS) if exact else ())
    finally:
        own.pop(trial.key, None)
        if before is not None:
            own[trial.key] = before


def _seconds(trial: Trial, n: int) -> float:
    """Median seconds of one op among many in a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(trial.copies):
            trial.run(copy, n)
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000 / trial.copies)
    return statistics.median(times)


def compile_all(
    config: ModelConfig, dtype: torch.dtype, jobs: int, kernels: Sequence[str] = ()
) -> None:
    """Compile every candidate of every trial, or of some kernels', with `jobs` processes.

    A kernel takes about a second to compile and a millisecond to time.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(_compile_part, config, dtype, i, jobs, kernels) for i in range(jobs)]
        for part in parts:
            part.result()


def _compile_part(
    config: ModelConfig, dtype: torch.dtype, part: int, parts: int, kernels: Sequence[str]
) -> None:
    device = torch.device("cuda")
    every = [
        (trial, schedule)
        for trial in trials(config, device, dtype, small=True)
        for schedule in trial.candidates()
        if not kernels or trial.kernel in kernels
    ]
    for trial, schedule in every[part::parts]:
        table(device.type, 0)[trial.key] = schedule
        with contextlib.suppress(triton.OutOfResources):
            trial.run(0, 1)
    torch.cuda.synchronize()


def tune(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[Tuned]:
    """The best admitted schedule for everything a model of this shape runs in a narrow pass."""
    for trial in trials(config, device, dtype):
        candidates = [FIRST[trial.kernel][NARROW], *trial.candidates()]
        measured = (measure(trial, candidate, device) for candidate in candidates)
        results = [result for result in measured if result is not None]
        admitted = [result for result in results if result.exact]
        best = min(admitted, key=lambda result: sum(result.seconds))
        yield Tuned(trial.key, admitted[0], best, len(results), len(admitted))


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome for one entry of the table: how many schedules ran, how many were exact."""

    key: str
    first: Result
    best: Result
    tried: int
    admitted: int


def save(found: Sequence[Tuned], device: torch.device) -> Path:
    """Write this machine's table, keeping entries of other shapes; returns where it lies."""
    name = torch.cuda.get_device_name(device)
    where = own_path(name)
    entries = {k: list(s) for k, s in table(device.type, device.index or 0).items()}
    entries |= {one.key: list(one.best.schedule) for one in found}
    where.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": name, "triton": triton.__version__, "schedules": entries}
    where.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return where
