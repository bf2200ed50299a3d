"""Law 3: whole streams. Whatever is drafted, and whoever shares the pass, the same tokens come out
and the same keys, values and recurrent state are left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from sametoken.drafters import Drafter
from sametoken.drafters.mtp import MtpDrafter
from sametoken.drafters.ngram import NgramDrafter
from sametoken.engine import Engine
from sametoken.job import Job
from sametoken.lab.check import first_difference, same_bits
from sametoken.request import Options
from sametoken.sampling import Sampling
from tests.engines import CPU_BACKENDS, demo, state
from tests.hostile import (
    AlwaysWrong,
    ChangingLength,
    CorrectUntilLast,
    EndToken,
    RandomTokens,
    Shifted,
)

# Long enough for the attention's sum to cross its first chunk edge at 256 inside the stream.
TOKENS = 400
PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
SETTINGS = {
    "greedy": Sampling(),
    "nucleus": Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=1),
    "topk": Sampling(
        temperature=1.0, top_k=40, presence_penalty=0.5, frequency_penalty=0.2, seed=2
    ),
    "minp": Sampling(
        temperature=1.3, min_p=0.05, repetition_penalty=1.05, frequency_penalty=0.3, seed=2**63
    ),
}
DRAFTERS = ("mtp", "ngram", "random", "shifted", "wrong", "end", "changing", "until-last")
LENGTHS = (1, 2, 3, 5, 8)


Stream = tuple[str, str, int, str]


def _streams(every_setting: bool) -> Iterator[Stream]:
    """Every drafter at every draft length under every setting on every backend; or a choice that
    ordinary runs have time for: on the compiled backend each pair under one setting in turn, so
    that each drafter and each length still meets all four, on the reference each drafter once.
    """
    names = list(SETTINGS)
    if every_setting:
        yield from product(CPU_BACKENDS, DRAFTERS, LENGTHS, names)
        return
    for i, drafter in enumerate(DRAFTERS):
        yield "reference", drafter, LENGTHS[i % len(LENGTHS)], names[i % len(names)]
        for j, length in enumerate(LENGTHS):
            yield "cpu", drafter, length, names[(i + j) % len(names)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stream" in metafunc.fixturenames:
        streams = list(_streams(metafunc.config.getoption("every_setting")))
        metafunc.parametrize("stream", streams, ids=lambda s: "-".join(map(str, s)))


@cache
def _prompt() -> tuple[int, ...]:
    tokenizer = demo().tokenizer
    assert tokenizer is not None
    return tuple(tokenizer.encode(PROMPT))


def _options(setting: str, **more: object) -> Options:
    base = Options(SETTINGS[setting], max_tokens=TOKENS, ignore_eos=True, keep=True, draft_max=0)
    return replace(base, **more)


@cache
def _plain(backend: str, setting: str) -> tuple[tuple[int, ...], list[Tensor]]:
    """The stream decoded plainly and alone, and what it leaves behind."""
    (done,) = demo(backend).generate(list(_prompt()), _options(setting))
    return done.tokens, state(demo(backend), done.kept)


def _drafter(backend: str, name: str, setting: str) -> Drafter:
    engine = demo(backend)
    vocabulary = engine.model.config.vocab_size
    script = {_prompt(): _plain(backend, setting)[0]}
    head = engine.model.weights.mtp
    assert head is not None, "the demo model has an MTP head"
    makers = {
        "mtp": lambda: MtpDrafter(engine.model, head, engine.cache),
        "ngram": NgramDrafter,
        "random": lambda: RandomTokens(vocabulary),
        "shifted": lambda: Shifted(script, vocabulary),
        "wrong": lambda: AlwaysWrong(script, vocabulary),
        "end": lambda: EndToken(engine.model.config.eos_ids[0]),
        "changing": lambda: ChangingLength(MtpDrafter(engine.model, head, engine.cache)),
        "until-last": lambda: CorrectUntilLast(script, vocabulary),
    }
    return makers[name]()


def _assert_same(
    found: tuple[int, ...], left: list[Tensor], backend: str, setting: str, what: str
) -> None:
    tokens, wanted = _plain(backend, setting)
    assert first_difference(found, tokens) is None, f"{what}: a token differs"
    assert same_bits(left, wanted), f"{what}: the state left behind differs"


def test_alone(stream: Stream) -> None:
    backend, drafter, length, setting = stream
    options = _options(setting, drafter=_drafter(backend, drafter, setting), draft_max=length)
    (done,) = demo(backend).generate(list(_prompt()), options)
    left = state(demo(backend), done.kept)
    _assert_same(done.tokens, left, backend, setting, f"{drafter} k={length}")


def test_drafts_were_really_accepted_and_rejected() -> None:
    """The streams above exercise both sides of the comparison."""
    options = _options("greedy", drafter=_drafter("cpu", "until-last", "greedy"), draft_max=3)
    (done,) = demo().generate(list(_prompt()), options)
    state(demo(), done.kept)
    first, _, last = done.stats.acceptance()
    assert first == 1.0
    assert last == 0.0


@pytest.mark.parametrize(
    ("backend", "setting"), [("reference", "nucleus"), *product(["cpu"], SETTINGS)]
)
def test_in_a_crowd(backend: str, setting: str) -> None:
    """Sequences of other prompts, settings, drafters and lengths come and go around the stream."""
    engine = demo(backend)
    mine = [
        engine.submit(
            list(_prompt()),
            _options(setting, drafter=_drafter(backend, name, setting), draft_max=length),
        )
        for name, length in zip(DRAFTERS, (3, 5, 1, 2, 3, 8, 5, 8), strict=True)
    ]
    crowd = _Crowd(engine)
    while any(job.finish_reason is None for job in mine):
        crowd.mill()
        engine.round()
    crowd.leave()
    for name, job in zip(DRAFTERS, mine, strict=True):
        tokens = tuple(p.token for p in job.picked)
        left = state(engine, job.track)
        _assert_same(tokens, left, backend, setting, f"{name} in a crowd")


class _Crowd:
    """Keeps a few short requests running, cancelling some half-way."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.generator = engine, torch.Generator().manual_seed(9)
        self.jobs: list[Job] = []
        self.rounds = 0

    def mill(self) -> None:
        self.rounds += 1
        self.jobs = [job for job in self.jobs if job.finish_reason is None]
        if self.rounds % 5 == 0 and len(self.jobs) < 3:
            self.jobs.append(self._join())
        if self.rounds % 23 == 0 and self.jobs:
            self.engine.cancel(self.jobs.pop())

    def leave(self) -> None:
        for job in self.jobs:
            self.engine.cancel(job)

    def _join(self) -> Job:
        high = self.engine.model.config.vocab_size
        length = int(torch.randint(1, 40, (1,), generator=self.generator))
        prompt = torch.randint(high, (length,), generator=self.generator).tolist()
        sampling = list(SETTINGS.values())[length % len(SETTINGS)]
        options = Options(sampling, max_tokens=1 + length % 17, draft_max=length % 4)
        return self.engine.submit(prompt, options)
