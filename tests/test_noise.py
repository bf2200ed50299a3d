"""The keyed generator is Philox4x32-10, and its noise is Gumbel."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.noise import gumbel, philox

# Counter, key and first output word, from the Random123 distribution's known answers.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
]


@pytest.mark.parametrize(("counter", "key", "word"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], word: int) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    assert philox((c0, c1, c2, c3), key[0] | key[1] << 32).tolist() == [word]


def test_every_part_of_the_key_matters() -> None:
    ids = torch.arange(50)
    base = gumbel(ids, seed=1, position=2)
    assert not torch.equal(base, gumbel(ids, seed=2, position=2))
    assert not torch.equal(base, gumbel(ids, seed=1 | 1 << 40, position=2))
    assert not torch.equal(base, gumbel(ids, seed=1, position=3))
    assert len(base.unique()) == 50


def test_noise_of_an_id_needs_no_other_id() -> None:
    everyone = gumbel(torch.arange(1000), seed=9, position=77)
    some = torch.tensor([999, 3, 500])
    assert torch.equal(gumbel(some, seed=9, position=77), everyone[some])


def test_moments_are_those_of_a_gumbel() -> None:
    noise = gumbel(torch.arange(200_000), seed=4, position=0)
    # Mean is Euler's constant, variance π²/6; five standard errors of 200,000 draws.
    assert abs(noise.mean().item() - 0.57722) < 5 * 1.2825 / 200_000**0.5
    assert abs(noise.var().item() - torch.pi**2 / 6) < 5 * 1.645 * (4.4 / 200_000) ** 0.5
