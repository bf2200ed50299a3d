"""Law 2: one pass over n rows is n passes over one row. Hiddens, picks and all state compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sametoken.engine import Engine
from sametoken.lab.check import same_bits
from sametoken.ops import Ops, load_ops
from sametoken.ops.delta import RING, recall
from sametoken.rows import Rows, Span
from sametoken.sampling import Ask, Sampling
from sametoken.step import Work, settle, step
from sametoken.track import Track
from tests.engines import CPU_BACKENDS, demo
from tests.law.backends import BACKENDS
from tests.law.cases import World, delta_sequence, world
from tests.law.planted import REWIND

SAMPLING = Sampling(temperature=0.9, repetition_penalty=1.2, seed=5)
# Spans the convolution window (4) and lets a pass begin inside it.
LENGTH = 40


@pytest.fixture(scope="module", params=CPU_BACKENDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return demo(request.param)


def _tokens(engine: Engine) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    high = engine.model.config.vocab_size
    return torch.randint(high, (LENGTH,), generator=generator).tolist()


class Walk:
    """Feeds fixed tokens to one sequence, in passes of any shape."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tokens = engine, _tokens(engine)
        lease = engine.cache.lease(LENGTH + 32)
        assert lease is not None
        self.track = Track(self.tokens, lease, None)
        self.hidden: list[Tensor] = []
        self.picked: list[int] = []

    def go(self, certain: int, drafts: int = 0, accepted: int | None = None) -> None:
        """One pass; `accepted` of the draft rows are kept, all of them if not told."""
        kept = drafts if accepted is None else accepted
        start = self.track.computed
        ids = self.tokens[start : start + certain + drafts]
        asks = [Ask(SAMPLING, self.tokens[: start + i + 1], 4) for i in range(len(ids))]
        (outcome,) = step(
            self.engine.model,
            self.engine.cache,
            [Work(self.track.span(certain, drafts), ids, asks)],
        )
        self.track.computed, self.track.replay = start + certain + kept, kept
        self.hidden += outcome.hidden[: certain + kept].unbind()
        self.picked += [p.token for p in outcome.picked[: certain + kept]]

    def end(self) -> tuple[Tensor, list[int], list[Tensor]]:
        track, cache = self.track, self.engine.cache
        settle(self.engine.model, cache, track.span(certain=0))
        state = cache.snapshot(track.lease, track.computed)
        cache.release(track.lease)
        return torch.stack(self.hidden), self.picked, state


@torch.inference_mode()
def _singly(engine: Engine, length: int) -> tuple[Tensor, list[int], list[Tensor]]:
    walk = Walk(engine)
    for _ in range(length):
        walk.go(1)
    return walk.end()


def _assert_same(
    found: tuple[Tensor, list[int], list[Tensor]], wanted: tuple[Tensor, list[int], list[Tensor]]
) -> None:
    for row, (a, b) in enumerate(zip(found[0], wanted[0], strict=True)):
        assert same_bits([a], [b]), f"hidden row {row} differs"
    assert found[1] == wanted[1], "picked tokens differ"
    assert same_bits(found[2], wanted[2]), "the state left behind differs"


@pytest.mark.parametrize("width", [2, 3, 4, 5, 7, 9, 16, 17])
def test_certain_rows(engine: Engine, width: int) -> None:
    walk = Walk(engine)
    with torch.inference_mode():
        while walk.track.computed + width <= LENGTH:
            walk.go(width)
    _assert_same(walk.end(), _singly(engine, walk.track.computed))


@pytest.mark.parametrize("drafts", [1, 2, 3, 5, 8, 16])
def test_accepted_drafts(engine: Engine, drafts: int) -> None:
    walk = Walk(engine)
    with torch.inference_mode():
        while walk.track.computed + 1 + drafts <= LENGTH:
            walk.go(1, drafts)
    _assert_same(walk.end(), _singly(engine, walk.track.computed))


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_rejected_drafts(engine: Engine, drafts: int) -> None:
    """Every number of accepted drafts in turn, so that every rewind follows every other."""
    walk = Walk(engine)
    _walk_with_rejections(walk, drafts)
    _assert_same(walk.end(), _singly(engine, walk.track.computed))


@torch.inference_mode()
def _walk_with_rejections(walk: Walk, drafts: int) -> None:
    accepted = 0
    while walk.track.computed + 1 + drafts <= LENGTH:
        walk.go(1, drafts, accepted)
        accepted = (accepted + 2) % (drafts + 1)


def _play(ops: Ops, w: World, passes: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one sequence in passes of (certain, drafts, accepted of them); what stays of it."""
    projection, weights, layer = delta_sequence(w)
    kept, start, replay = [], 0, 0
    for certain, drafts, accepted in passes:
        block = projection[start : start + certain + drafts]
        span = Span(1, (), start, certain, drafts, replay)
        out = ops.delta(block, weights, layer, Rows((span,)))
        kept.append(out[: certain + accepted])
        start, replay = start + certain + accepted, accepted
    ops.delta(projection[:0], weights, layer, Rows((Span(1, (), start, 0, 0, replay),)))
    window = recall(layer.recent[1], start - weights.shape.conv_kernel + 1, start)
    return torch.cat(kept), layer.state.clone(), window


# Blocks, every number of rejected drafts, and rows that go around the ring.
PASSES = {
    "blocks": [(4, 0, 0), (1, 0, 0), (6, 0, 0)],
    "drafts": [(1, 3, 3), (1, 3, 0), (1, 3, 1), (2, 1, 1), (1, 2, 0)],
    "long drafts": [(2, 4, 1), (1, 4, 4), (1, 4, 2)],
    "around the ring": [(RING - 2, 0, 0), (1, 16, 16), (1, 16, 5), (1, 3, 3), (RING, 0, 0)],
}


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_recurrence_in_passes(backend: str, dtype: torch.dtype, passes: str) -> None:
    ops = load_ops(backend)
    plan = PASSES[passes]
    length = sum(certain + accepted for certain, _, accepted in plan)
    singly = _play(ops, world(4, dtype, backend), [(1, 0, 0)] * length)
    together = _play(ops, world(4, dtype, backend), plan)
    assert same_bits(together, singly)
    assert not any(part.isnan().any() for part in together), "a row that was never left was read"


@pytest.mark.parametrize("violation", REWIND)
def test_a_broken_rewind_is_caught(engine: Engine, violation: str) -> None:
    ops = replace(engine.model.ops, delta=REWIND[violation])
    broken = Engine(replace(engine.model, ops=ops), engine.cache)
    walk = Walk(broken)
    _walk_with_rejections(walk, 3)
    with pytest.raises(AssertionError, match="differs"):
        _assert_same(walk.end(), _singly(engine, walk.track.computed))
