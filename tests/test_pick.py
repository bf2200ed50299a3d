"""Picking: settings mean what users of other engines expect them to mean."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from sametoken.errors import NumericError, RequestError
from sametoken.ops.pick import pick
from sametoken.sampling import Ask, Sampling


def _pick(logits: list[float], sampling: Sampling, past: tuple[int, ...] = (0,), prompt: int = 1):
    """Pick from given logits: an identity head and a row that holds them."""
    head = torch.eye(len(logits))
    return pick(torch.tensor([logits]), head, [Ask(sampling, past, prompt)])[0]


def _frequencies(logits: list[float], sampling: dict[str, object], draws: int = 3000) -> Tensor:
    """Relative frequency of each token over that many seeds."""
    counts = Counter(
        _pick(logits, Sampling(temperature=1.0, seed=seed, **sampling)).token
        for seed in range(draws)
    )
    return torch.tensor([counts[i] / draws for i in range(len(logits))])


LOGITS = [1.0, 2.5, 2.0, -1.0, 2.25]


def test_greedy_takes_the_largest_and_ties_go_to_the_lower_id() -> None:
    assert _pick(LOGITS, Sampling()).token == 1
    assert _pick([0.0, 3.0, 1.0, 3.0], Sampling()).token == 1


def test_sampling_follows_the_softmax() -> None:
    wanted = torch.softmax(torch.tensor(LOGITS), 0)
    # Five standard errors of 3,000 draws at p = ½.
    assert (_frequencies(LOGITS, {}) - wanted).abs().max() < 5 * 0.5 / 3000**0.5


def test_noise_is_keyed_by_the_absolute_position() -> None:
    flat, sampling = [0.0] * 1000, Sampling(temperature=1.0, seed=5)
    picks = [_pick(flat, sampling, past=(0,) * position).token for position in range(1, 65)]
    assert picks == [_pick(flat, sampling, past=(3,) * p).token for p in range(1, 65)]
    # 64 draws from 1,000: two birthdays are expected, a dozen would be a period.
    assert len(set(picks)) > 52


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {1, 4}),
        ({"top_k": 1}, {1}),
        # softmax of LOGITS is .09 .39 .24 .01 .30 (rounded); .39 + .30 reaches 0.6.
        ({"top_p": 0.6}, {1, 4}),
        ({"top_p": 0.05}, {1}),
        # At least half as likely as the likeliest: within ln 2 of 2.5.
        ({"min_p": 0.5}, {1, 2, 4}),
        ({"top_k": 3, "min_p": 0.7}, {1, 4}),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_keep_exactly(settings: dict[str, float], kept: set[int]) -> None:
    found = _frequencies(LOGITS, settings, draws=500)
    assert set(found.nonzero().flatten().tolist()) == kept


def test_top_k_cuts_a_tie_at_the_lower_id() -> None:
    found = _frequencies([2.0, 1.0, 1.0, 1.0], {"top_k": 2}, draws=300)
    assert set(found.nonzero().flatten().tolist()) == {0, 1}


def test_a_low_temperature_approaches_greedy_and_a_high_one_flattens() -> None:
    cold = [_pick(LOGITS, Sampling(temperature=0.01, seed=s)).token for s in range(50)]
    assert set(cold) == {1}
    hot = [_pick(LOGITS, Sampling(temperature=100.0, seed=s)).token for s in range(300)]
    assert set(hot) == {0, 1, 2, 3, 4}


def test_extreme_temperatures_and_logits_stay_numbers() -> None:
    assert _pick([1e30, 2e30, 0.0], Sampling(temperature=1e-300)).token == 1
    assert _pick([1e30, 2e30, 0.0], Sampling(temperature=1e-300, top_p=0.5, min_p=0.1)).token == 1
    with pytest.raises(NumericError, match="--dtype float32"):
        _pick([0.0, float("nan")], Sampling())


def test_penalties_see_the_prompt_or_the_output() -> None:
    # Token 1 leads token 4 by 0.25. It stands in the prompt, and not in the output.
    past, prompt = (1, 3), 1
    assert _pick(LOGITS, Sampling(presence_penalty=1.0), past, prompt).token == 1
    assert _pick(LOGITS, Sampling(frequency_penalty=1.0), past, prompt).token == 1
    assert _pick(LOGITS, Sampling(repetition_penalty=1.2), past, prompt).token == 4


def test_frequency_counts_and_presence_does_not() -> None:
    past = (0, 1, 1, 1)
    assert _pick(LOGITS, Sampling(presence_penalty=0.2), past).token == 1
    assert _pick(LOGITS, Sampling(frequency_penalty=0.2), past).token == 4


def test_repetition_multiplies_negative_logits() -> None:
    assert _pick([-1.0, -1.5], Sampling(repetition_penalty=2.0), past=(0,)).token == 1


def test_bias_adds_and_unknown_ids_are_ignored() -> None:
    assert _pick(LOGITS, Sampling(logit_bias={3: 10.0, 99: 50.0})).token == 3
    assert _pick(LOGITS, Sampling(logit_bias={1: -10.0})).token == 4


def test_logprobs_are_the_models_own_and_change_no_token() -> None:
    sampling = {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": {2: 0.3}}
    for seed in range(30):
        silent = _pick(LOGITS, Sampling(seed=seed, **sampling), past=(0, 1))
        told = _pick(LOGITS, Sampling(seed=seed, logprobs=2, **sampling), past=(0, 1))
        assert told.token == silent.token
        own = torch.log_softmax(torch.tensor(LOGITS), 0)
        assert told.logprob == pytest.approx(own[told.token].item(), abs=1e-6)
        assert [i for i, _ in told.top] == [1, 4]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("logit_bias", {-1: 1.0}),
        ("seed", -1),
        ("logprobs", 21),
    ],
)
def test_a_bad_setting_is_named(setting: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{setting} is "):
        Sampling(**{setting: value})
