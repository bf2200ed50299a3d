"""choose picks what the reference picks, and a row's token is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sametoken.ops.choose_triton import Settings, choose
from sametoken.ops.pick import pick_logits
from sametoken.sampling import Ask, Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Two blocks of ids, the second one cut short.
VOCABULARY = 2500
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_k=7, seed=2**63 + 5),
    Sampling(temperature=1.3, top_p=0.7, seed=11),
    Sampling(temperature=0.7, min_p=0.2, seed=4),
    Sampling(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, seed=5),
    Sampling(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    Sampling(temperature=0.9, repetition_penalty=0.8, frequency_penalty=-0.5, seed=6),
]
PROMPT = 4


def _asks() -> list[Ask]:
    """Rows of every kind whose pasts have many lengths and repeat tokens."""
    some = torch.Generator().manual_seed(1)
    return [
        Ask(s, torch.randint(0, 9, (5 + 3 * i,), generator=some).tolist(), PROMPT)
        for i, s in enumerate(SETTINGS * 2)
    ]


def _logits(rows: int) -> torch.Tensor:
    """Rounded, so that ties occur among the largest and at every cut."""
    logits = 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(2))
    return (logits * 4).round() / 4


def _choose(logits: torch.Tensor, asks: list[Ask]) -> list[int]:
    """The asks as rows of sequences of their own."""
    settings = Settings.of([a.sampling for a in asks], [a.prompt for a in asks], DEVICE)
    longest = max(len(a.past) for a in asks)
    history = _ints([[*a.past, *[0] * (longest - len(a.past))] for a in asks])
    position = _ints([len(a.past) - 1 for a in asks])
    span = _ints(list(range(len(asks))))
    return choose(logits.to(DEVICE, copy=True), settings, span, position, history).tolist()


def _ints(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_the_token_is_the_references() -> None:
    asks, logits = _asks(), _logits(16)
    wanted = [pick_logits(row, ask).token for row, ask in zip(logits, asks, strict=True)]
    assert _choose(logits, asks) == wanted
    assert len(set(wanted)) > len(wanted) // 2


def test_a_row_alone_gets_the_same_token() -> None:
    asks, logits = _asks(), _logits(16)
    together = _choose(logits, asks)
    assert [_choose(logits[i : i + 1], [asks[i]])[0] for i in range(16)] == together
    assert _choose(logits.flip(0), asks[::-1])[::-1] == together


def test_the_largest_block_wins_and_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[0, [70, 2400]] = 1.0
    logits[1, 2400] = 2.0
    assert _choose(logits, [Ask(Sampling(), [0], 1)] * 3) == [70, 2400, 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.5)])
def test_what_is_not_a_number_is_no_token(sampling: Sampling) -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 2300] = torch.nan
    logits[1, 7] = 1e30
    tokens = _choose(logits, [Ask(sampling, [0], 1)] * 2)
    assert tokens[0] < VOCABULARY
    assert tokens[1] == VOCABULARY


def test_rows_of_one_sequence_share_its_settings_and_history() -> None:
    sampling = Sampling(temperature=0.9, presence_penalty=2.0, top_k=30, seed=8)
    past = [5, 5, 6, 7, 8, 9]
    asks = [Ask(sampling, past[: 3 + i], 2) for i in range(4)]
    logits = _logits(4)
    found = choose(
        logits.to(DEVICE, copy=True),
        Settings.of([sampling], [2], DEVICE),
        _ints([0, 0, 0, 0]),
        _ints([2, 3, 4, 5]),
        _ints([past]),
    )
    wanted = [pick_logits(row, ask).token for row, ask in zip(logits, asks, strict=True)]
    assert found.tolist() == wanted
