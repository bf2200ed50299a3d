"""bench: figures that add up, scripted acceptance as stated, and silence where the law is red."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sametoken.drafters import Wish
from sametoken.drafters.scripted import ScriptedDrafter
from sametoken.engine import Engine
from sametoken.errors import RequestError
from sametoken.lab.bench import Plan, bench, bytes_needed, law_holds
from sametoken.lab.synthetic import SHAPES, RandomCheckpoint, random_engine
from sametoken.sampling import Sampling
from sametoken.track import Track
from sametoken.weights import read_weights
from tests.law.planted import PLANTED

PLAN = Plan(
    contexts=(5,), widths=(1, 3), draft_lengths=(2,), shares=(0.8, 0.5), tokens=9, repeats=2
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return random_engine("small", device="cpu", dtype=None, context=256, threads=1)


def test_every_figure_of_the_plan(engine: Engine) -> None:
    figures = {figure.what: figure for figure in bench(engine, PLAN, bandwidth=1e9)}
    assert set(figures) == {
        "plain", "prompt", "pass of 1", "pass of 3", "scripted k=2", "mtp k=2", "draft step",
    }  # fmt: skip
    plain = figures["plain"]
    assert plain.count == 8
    assert plain.least <= plain.median <= plain.most
    assert plain.floor_share == pytest.approx(bytes_needed(engine, 5) / 1e9 / plain.median)


def test_no_speed_without_a_green_law(engine: Engine) -> None:
    assert law_holds(engine, PLAN)
    _, ops = PLANTED["library matmul"]
    broken = Engine(
        replace(engine.model, ops=ops), engine.cache, drafter=engine.drafter, draft_max=3
    )
    assert not law_holds(broken, PLAN)


def test_bytes_are_those_a_token_reads(engine: Engine) -> None:
    config, weights = engine.model.config, engine.model.weights
    dense = sum(w.mixer.inputs.nbytes + w.mixer.out.nbytes for w in weights.layers)
    needed = bytes_needed(engine, 100)
    assert needed > dense + weights.head.nbytes
    # Two attention layers, keys and values, two heads of 64, fp32.
    assert bytes_needed(engine, 101) - needed == 2 * 2 * 2 * 64 * 4
    assert config.delta is not None


def test_scripted_acceptance_is_what_it_says() -> None:
    prompt, plain = [1, 2], list(range(100, 200))
    drafter = ScriptedDrafter({tuple(prompt): plain}, (0.9, 0.6, 0.3), vocabulary=300)
    track = Track([*prompt, *plain[:7]], lease=None, drafter=None)  # type: ignore[arg-type]
    rounds, reached = 4000, [0, 0, 0]
    for _ in range(rounds):
        (draft,) = drafter.propose([Wish(track, Sampling(), 2, 3)])
        right = [a == b for a, b in zip(draft, plain[7:10], strict=True)]
        reached = [n + all(right[: i + 1]) for i, n in enumerate(reached)]
    for count, share in zip(reached, (0.9, 0.6, 0.3), strict=True):
        # Five standard errors at worst.
        assert abs(count / rounds - share) < 5 * 0.5 / rounds**0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_random_shapes_are_whole(shape: str) -> None:
    checkpoint = RandomCheckpoint(shape, torch.bfloat16, torch.device("cpu"))
    weights = read_weights(checkpoint, torch.bfloat16, torch.device("meta"))
    assert weights.mtp is not None


def test_the_large_shape_has_the_released_size() -> None:
    checkpoint = RandomCheckpoint("qwen3.6-35b-a3b", torch.bfloat16, torch.device("cpu"))
    sizes = {n: torch.Size(checkpoint.shape(n)).numel() for n in checkpoint.names}
    head = sum(count for name, count in sizes.items() if name.startswith("mtp."))
    # 34.66 billion without vision and head, 844.6 million in the head: the released checkpoint's.
    assert sum(sizes.values()) - head == pytest.approx(34.66e9, rel=1e-3)
    assert head == pytest.approx(844.6e6, rel=1e-3)


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(RequestError, match="--shape is 'huge'"):
        random_engine("huge", device="cpu", dtype=None, context=8, threads=1)
