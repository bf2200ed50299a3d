"""Noise of the pick op: a counter-based generator keyed by (seed, position, token id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), key = the two
halves of the seed, counter = (token id, position, 0, 0); the first of its four words is used. Being
a pure function of its key, the noise of a position is the same in a draft, in a verification and
in plain decoding, whoever else is in the pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
# Multipliers and Weyl increments of the paper, section 4.3 and table 2.
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> Tensor:
    """First of the four output words for each counter; words are int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_M0, c0)
        high1, low1 = _multiply(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor · x, in halves because int64 has no room for 64 bits."""
    low = (factor & 0xFFFF) * x
    high = (factor >> 16) * x
    middle = (low >> 16) + (high & 0xFFFF)
    return (high >> 16) + (middle >> 16), ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel(ids: Tensor, seed: int, position: int) -> Tensor:
    """−log(−log u) for each token id [n] int64, float64; u = (word + ½) / 2^32."""
    zero = torch.zeros_like(ids)
    word = philox((ids, torch.full_like(ids, position), zero, zero), seed)
    u = (word.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(u))
