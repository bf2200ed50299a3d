"""The engine's promises to a caller: ends, usage, kept state, joining, leaving, refusing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sametoken.cache import Cache
from sametoken.drafters.ngram import NgramDrafter
from sametoken.engine import Engine
from sametoken.errors import CheckpointError, RequestError
from sametoken.lab.check import same_bits
from sametoken.request import Options
from sametoken.sampling import Sampling
from tests.engines import demo, state
from tests.hostile import CorrectUntilLast, Scripted

PROMPT = "import os\n\n\ndef main():\n"


class Oracle(Scripted):
    """Always right, so that every end falls inside an accepted run."""

    def bend(self, plain, said, length):
        return list(plain[said : said + length])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return demo()


@pytest.fixture(scope="module")
def ids(engine: Engine) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def plain(engine: Engine, ids: list[int]) -> tuple[int, ...]:
    """Sixty tokens of plain decoding, past any end token."""
    options = Options(max_tokens=60, draft_max=0, ignore_eos=True)
    return engine.generate(ids, options)[0].tokens


@pytest.fixture
def oracle(engine: Engine, ids: list[int], plain: tuple[int, ...]) -> Oracle:
    return Oracle({tuple(ids): plain}, engine.model.config.vocab_size)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 11])
def test_max_tokens_inside_an_accepted_run(
    engine: Engine, ids: list[int], plain: tuple[int, ...], oracle: Oracle, length: int
) -> None:
    options = Options(max_tokens=length, ignore_eos=True, keep=True)
    (short,) = engine.generate(ids, replace(options, drafter=oracle, draft_max=8))
    (slow,) = engine.generate(ids, replace(options, draft_max=0))
    assert short.tokens == slow.tokens == plain[:length]
    assert short.finish_reason == "length"
    assert short.text == slow.text
    assert same_bits(state(engine, short.kept), state(engine, slow.kept))


def test_an_end_token_inside_an_accepted_run(
    engine: Engine, ids: list[int], plain: tuple[int, ...], oracle: Oracle
) -> None:
    """Some token of the continuation is made an end token: everything stops exactly there."""
    place = next(i for i in range(9, 60) if plain[i] not in plain[:i])
    config = replace(engine.model.config, eos_ids=(plain[place],))
    ending = Engine(replace(engine.model, config=config), engine.cache, tokenizer=engine.tokenizer)
    options = Options(max_tokens=60, keep=True)
    (fast,) = ending.generate(ids, replace(options, drafter=oracle, draft_max=8))
    (slow,) = ending.generate(ids, replace(options, draft_max=0))
    assert fast.tokens == slow.tokens == plain[: place + 1]
    assert fast.finish_reason == slow.finish_reason == "stop"
    assert fast.text == slow.text
    assert engine.tokenizer is not None
    assert fast.text == engine.tokenizer.decode(plain[:place])
    assert same_bits(state(engine, fast.kept), state(engine, slow.kept))


def test_a_stop_string_inside_an_accepted_run(
    engine: Engine, ids: list[int], plain: tuple[int, ...], oracle: Oracle
) -> None:
    assert engine.tokenizer is not None
    whole = engine.tokenizer.decode(plain)
    stop = whole[len(whole) // 2 :][:3]
    options = Options(max_tokens=60, ignore_eos=True, stop=(stop, "never said"), keep=True)
    (fast,) = engine.generate(ids, replace(options, drafter=oracle, draft_max=8))
    (slow,) = engine.generate(ids, replace(options, draft_max=0))
    assert fast.text == slow.text == whole[: whole.index(stop)]
    assert fast.tokens == slow.tokens
    assert len(fast.tokens) < 60
    assert fast.finish_reason == "stop"
    assert same_bits(state(engine, fast.kept), state(engine, slow.kept))


@pytest.mark.parametrize("draft_max", [0, 3, 8])
def test_the_next_turn_goes_on_from_kept_state(
    engine: Engine, ids: list[int], draft_max: int
) -> None:
    """State past an end would poison the next turn; a fresh run of the same tokens tells."""
    options = Options(max_tokens=17, draft_max=draft_max, ignore_eos=True, keep=True)
    (first,) = engine.generate(ids, options)
    turn = [*ids, *first.tokens, *ids]
    (second,) = engine.generate(turn, replace(options, after=first.kept, max_tokens=30))
    (fresh,) = engine.generate(turn, replace(options, max_tokens=30))
    assert second.stats.cached_tokens == len(ids) + 16
    assert fresh.stats.cached_tokens == 0
    assert second.tokens == fresh.tokens
    assert same_bits(state(engine, second.kept), state(engine, fresh.kept))


def test_kept_state_that_does_not_fit_the_prompt_is_not_used(
    engine: Engine, ids: list[int]
) -> None:
    options = Options(max_tokens=6, ignore_eos=True, keep=True)
    (first,) = engine.generate(ids, options)
    other = [ids[0], *ids]
    (second,) = engine.generate(other, replace(options, after=first.kept))
    (fresh,) = engine.generate(other, replace(options, draft_max=0))
    assert second.stats.cached_tokens == 0
    assert second.tokens == fresh.tokens
    state(engine, second.kept)
    state(engine, fresh.kept)


def test_the_context_ends_an_answer_that_is_longer(engine: Engine) -> None:
    model = engine.model
    small = Cache(
        model.config,
        slots=1,
        context=20,
        longest_draft=8,
        with_mtp=True,
        dtype=model.dtype,
        device=model.device,
    )
    for drafter in (None, NgramDrafter()):
        options = Options(max_tokens=50, drafter=drafter, draft_max=8, ignore_eos=True)
        (done,) = Engine(model, small).generate([5, 6] * 8, options)
        assert len(done.tokens) == 4
        assert done.finish_reason == "length"


def test_drafts_too_long_for_the_ring_are_refused(engine: Engine) -> None:
    model = engine.model
    with pytest.raises(CheckpointError, match="drafts of up to 30 needs 66 rows"):
        Cache(
            model.config,
            slots=1,
            context=20,
            longest_draft=30,
            with_mtp=True,
            dtype=model.dtype,
            device=model.device,
        )


def test_a_kept_sequence_is_handed_over_even_if_the_request_fails(
    engine: Engine, ids: list[int]
) -> None:
    before = _free(engine)
    options = Options(max_tokens=4, ignore_eos=True, keep=True)
    (first,) = engine.generate(ids, options)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.generate("", replace(options, after=first.kept))
    (second,) = engine.generate(ids, options)
    job = engine.submit([*ids, 1], replace(options, after=second.kept))
    engine.cancel(job)
    assert _free(engine) == before


def test_streamed_chunks_add_up(engine: Engine, ids: list[int]) -> None:
    options = Options(max_tokens=40, draft_max=4, ignore_eos=True)
    chunks = list(engine.stream([ids, ids[:3]], options))
    for index, prompt in enumerate((ids, ids[:3])):
        (whole,) = engine.generate(prompt, options)
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == whole.text
        assert tuple(p.token for chunk in own for p in chunk.picked) == whole.tokens
        assert [chunk.generation is None for chunk in own] == [True] * (len(own) - 1) + [False]
        assert sum(chunk.drafted for chunk in own) + len(own) == len(whole.tokens)


def test_statistics_count_what_happened(
    engine: Engine, ids: list[int], plain: tuple[int, ...]
) -> None:
    drafter = CorrectUntilLast({tuple(ids): plain}, engine.model.config.vocab_size)
    options = Options(max_tokens=41, ignore_eos=True, drafter=drafter, draft_max=4)
    (done,) = engine.generate(ids, options)
    # One token with the prompt, then four a round: three right drafts and the target's own.
    assert done.stats.rounds == 1 + 10
    assert done.stats.drafted[:3] == [10, 10, 10]
    assert done.stats.accepted[:3] == [10, 10, 10]
    assert done.stats.prompt_tokens == len(ids)


def test_logprobs_do_not_depend_on_drafting(engine: Engine, ids: list[int]) -> None:
    sampling = Sampling(temperature=0.9, presence_penalty=0.3, logprobs=3, seed=8)
    options = Options(sampling, max_tokens=30, ignore_eos=True)
    (slow,) = engine.generate(ids, replace(options, draft_max=0))
    (fast,) = engine.generate(ids, replace(options, draft_max=5))
    assert fast.picked == slow.picked
    assert len(fast.picked[0].top) == 3


def test_more_sequences_than_places_wait_their_turn(engine: Engine, ids: list[int]) -> None:
    options = Options(max_tokens=3, ignore_eos=True)
    many = engine.generate([ids] * 60, options)
    assert len({done.tokens for done in many}) == 1


def test_closing_a_stream_gives_everything_back(engine: Engine, ids: list[int]) -> None:
    before = _free(engine)
    stream = engine.stream([ids] * 3, Options(max_tokens=50, ignore_eos=True))
    next(stream)
    assert _free(engine) != before
    assert isinstance(stream, Iterator)
    stream.close()
    assert _free(engine) == before


def _free(engine: Engine) -> tuple[int, int]:
    """Slots and pages a new sequence could have."""
    taken = []
    while (lease := engine.cache.lease(1)) is not None:
        taken.append(lease)
    for lease in taken:
        engine.cache.release(lease)
    return len(taken), len(taken)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", Options(), "the prompt is empty"),
        ([], Options(), "the prompt is empty"),
        ([0, 10**9], Options(), "token id 1000000000 is outside the vocabulary"),
        ("x " * 2000, Options(), "do not fit a context of 1024"),
        ("x", Options(draft_max=17), "draft_max is 17; the engine allows 16"),
    ],
)
def test_bad_requests_are_named(
    engine: Engine, prompt: str | list[int], options: Options, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(prompt, options)


def test_a_bad_request_among_good_ones_leaves_nothing_behind(engine: Engine) -> None:
    before = _free(engine)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.generate(["fine", ""], Options(max_tokens=5))
    engine.round()
    assert _free(engine) == before


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"draft_max": -1}, {"stop": ("",)}])
def test_bad_options_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        Options(**bad)
