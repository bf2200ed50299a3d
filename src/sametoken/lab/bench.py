"""bench: how fast, against what the memory allows, and only beside a green law check.

All times are of whole rounds through the engine's own door, or of single passes through `step`.
Acceptance that was not measured is scripted, and labelled so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from sametoken.config import Mixer
from sametoken.drafters import Drafter, Wish
from sametoken.drafters.mtp import MtpDrafter
from sametoken.drafters.scripted import ScriptedDrafter
from sametoken.engine import Engine
from sametoken.errors import LawError
from sametoken.lab.check import check
from sametoken.lab.inspection import active_bytes
from sametoken.request import Generation, Options
from sametoken.sampling import Ask, Sampling
from sametoken.step import Work, step
from sametoken.track import Track

# Tokens of every stream in the law check that goes before.
_CHECKED_TOKENS = 12
# Larger than any cache of today: 60 MB of L2 on a datacentre GPU, some hundred on a server CPU.
_FLOOR_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `shares` are scripted acceptance by position, unconditional."""

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    shares: tuple[float, ...]
    tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: seconds are of one round or pass; tokens_per_second where tokens came out."""

    what: str
    context: int
    median: float
    least: float
    most: float
    count: int
    tokens_per_second: float | None = None
    acceptance: tuple[float, ...] = ()
    floor_share: float | None = None

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def law_holds(engine: Engine, plan: Plan) -> bool:
    """Whether plain and drafted decoding agree bit by bit, here and now."""
    longest = max(plan.draft_lengths, default=1)
    return all(verdict.exact for verdict in check(engine, longest, _CHECKED_TOKENS))


def read_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes a second at which this device reads memory: a maximum over a large tensor."""
    data = torch.zeros(_FLOOR_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    times = _timed(lambda: data.max(), device, repeats)
    return data.nbytes / statistics.median(times)


def bytes_needed(engine: Engine, context: int) -> int:
    """Bytes that one plain token must move: weights, recurrent state both ways, keys and values."""
    config, model = engine.model.config, engine.model
    state = 0
    if config.delta is not None:
        shape = config.delta
        cells = shape.value_heads * shape.key_dim * shape.value_dim
        state = 2 * 4 * cells * config.mixers.count(Mixer.DELTA)
    attention = config.attention
    row = 2 * attention.kv_heads * attention.head_dim * model.dtype.itemsize
    return (
        active_bytes(model.weights) + state + context * row * config.mixers.count(Mixer.ATTENTION)
    )


def bench(engine: Engine, plan: Plan, bandwidth: float) -> Iterator[Measured]:
    """Every figure of the plan, as it is measured."""
    for context in plan.contexts:
        prompt = _prompt(engine, context)
        floor = bytes_needed(engine, context) / bandwidth
        base = Options(max_tokens=plan.tokens, ignore_eos=True, draft_max=0)
        plain, figure = _stream(engine, prompt, base, "plain")
        yield replace(figure, floor_share=floor / figure.median)
        yield _prefill(plain, context)
        yield from (_pass(engine, prompt, width, plan.repeats) for width in plan.widths)
        yield from _drafted(engine, prompt, plain, plan, base)
        yield from _draft_step(engine, prompt, plan.repeats)


def _prompt(engine: Engine, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    high = engine.model.config.vocab_size
    return torch.randint(high, (length,), generator=generator).tolist()


def _stream(
    engine: Engine, prompt: list[int], options: Options, what: str
) -> tuple[Generation, Measured]:
    """One sequence, every round after the prompt timed."""
    job, times = engine.submit(prompt, options), []
    while not job.picked:
        engine.round()
    while job.finish_reason is None:
        times += _timed(engine.round, engine.model.device, 1)
    done = job.generation()
    figure = _figure(what, len(prompt), times)
    speed = (len(done.tokens) - 1) / sum(times)
    shares = tuple(done.stats.acceptance())
    return done, replace(figure, tokens_per_second=speed, acceptance=shares)


def _prefill(plain: Generation, context: int) -> Measured:
    seconds = plain.stats.prompt_seconds
    return replace(_figure("prompt", context, [seconds]), tokens_per_second=context / seconds)


def _drafted(
    engine: Engine, prompt: list[int], plain: Generation, plan: Plan, base: Options
) -> Iterator[Measured]:
    script = {tuple(prompt): plain.tokens}
    drafters: dict[str, Drafter] = {
        "scripted": ScriptedDrafter(script, plan.shares, engine.model.config.vocab_size)
    }
    if isinstance(engine.drafter, MtpDrafter):
        drafters["mtp"] = engine.drafter
    for name, drafter in drafters.items():
        for length in plan.draft_lengths:
            options = replace(base, drafter=drafter, draft_max=length)
            done, figure = _stream(engine, prompt, options, f"{name} k={length}")
            if done.tokens != plain.tokens:
                raise LawError(f"{name} with drafts of {length} changed the text; run check.")
            yield figure


def _pass(engine: Engine, prompt: list[int], width: int, repeats: int) -> Measured:
    """One verification pass of a width, its drafts rejected, again and again at one place."""
    track = _placed(engine, prompt, width)
    drafts, past = prompt[: width - 1], [*prompt, *prompt[: width - 1]]
    asks = [Ask(Sampling(), past[: len(prompt) + i], len(prompt)) for i in range(width)]
    work = Work(track.span(1, width - 1), [prompt[-1], *drafts], asks)
    with torch.inference_mode():
        times = _timed(
            lambda: step(engine.model, engine.cache, [work]), engine.model.device, repeats
        )
    engine.release(track)
    return _figure(f"pass of {width}", len(prompt), times)


def _draft_step(engine: Engine, prompt: list[int], repeats: int) -> Iterator[Measured]:
    """One chained step of the MTP head: two drafts less one."""
    if not isinstance(engine.drafter, MtpDrafter):
        return
    options = Options(max_tokens=2, ignore_eos=True, draft_max=1, keep=True)
    (done,) = engine.generate(prompt, options)
    track = done.kept
    assert track is not None, "the sequence is kept"
    drafter = engine.drafter

    def times(length: int) -> list[float]:
        wish = Wish(track, Sampling(), len(prompt), length)
        return _timed(lambda: drafter.propose([wish]), engine.model.device, repeats)

    with torch.inference_mode():
        one, two = times(1), times(2)
    engine.release(track)
    yield _figure("draft step", len(prompt), [b - a for a, b in zip(one, two, strict=True)])


def _placed(engine: Engine, prompt: list[int], room: int) -> Track:
    """A sequence whose prompt is through but for its last token."""
    lease = engine.cache.lease(len(prompt) + room)
    assert lease is not None, "bench runs alone"
    track = Track(prompt, lease, None)
    with torch.inference_mode():
        if len(prompt) > 1:
            step(engine.model, engine.cache, [Work(track.span(len(prompt) - 1), prompt[:-1], [])])
    track.computed = len(prompt) - 1
    return track


def _timed(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each run, the device's work included; one run goes before to warm up."""
    if repeats > 1:
        run()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _figure(what: str, context: int, times: Sequence[float]) -> Measured:
    return Measured(what, context, statistics.median(times), min(times), max(times), len(times))
