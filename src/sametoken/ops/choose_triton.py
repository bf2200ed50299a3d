"""choose: logits → tokens, as `pick` defines it, for many rows at once and without the host.

Nothing here depends on an order of summation: maxima, integer counts and integer masses are exact.

    seen       how often a token occurs before the row, in the prompt and in the output
    adjust     penalties and bias; the largest logit of each block of ids, and the lowest id with it
    cuts       only where top-k or top-p is asked: the last score and id that they keep
    sample     score + noise of what is kept; the largest of each block
    last       the largest block

Top-p sums probabilities as integers of 2^-40 of the largest, so that no sum rounds. What a pass
does not ask for (`Wants`) is not launched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.tiling import early, ready, up2
from sametoken.sampling import Sampling

# Ids of a program. 122 programs a row for 248,320 ids, about one for each multiprocessor.
_BLOCK = 2048
# Positions of a program that counts.
_COUNTED = 1024
# A token of the prompt; the bits below count it in the output.
_IN_PROMPT = tl.constexpr(1 << 30)
# 2^18 ids of at most 2^40 each sum to less than 2^63.
_MASS = 2.0**40


class Wants(NamedTuple):
    """What some row of a pass asks for beyond the largest logit."""

    penalises: bool = False
    orders: bool = False
    samples: bool = False

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> Wants:
        """What these settings need together."""
        sampled = [s for s in samplings if s.temperature > 0]
        return cls(
            penalises=any(s.penalises for s in samplings),
            orders=any(s.top_k > 0 or s.top_p < 1 for s in sampled),
            samples=bool(sampled),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """numbers [S, 6] float64: temperature, top-p, log min-p, repetition, presence and frequency
    penalty. integers [S, 3] int64: top-k, the length of the prompt, the seed's 64 bits.
    """

    numbers: Tensor
    integers: Tensor
    wants: Wants

    @classmethod
    def empty(cls, sequences: int, wants: Wants, device: torch.device) -> Settings:
        """Greedy for every sequence."""
        greedy = cls.of([Sampling()] * sequences, [0] * sequences, device)
        return cls(greedy.numbers, greedy.integers, wants)

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], prompts: Sequence[int], device: torch.device
    ) -> Settings:
        """Settings and prompt length of each sequence."""
        numbers = [
            (
                s.temperature,
                s.top_p,
                math.log(s.min_p) if s.min_p else -math.inf,
                s.repetition_penalty,
                s.presence_penalty,
                s.frequency_penalty,
            )
            for s in samplings
        ]
        integers = [
            (s.top_k, prompt, s.seed - (s.seed >> 63 << 64))
            for s, prompt in zip(samplings, prompts, strict=True)
        ]
        return cls(
            torch.tensor(numbers, dtype=torch.float64).to(device),
            torch.tensor(integers, dtype=torch.int64).to(device),
            Wants.of(samplings),
        )

    def write(self, samplings: Sequence[Sampling], prompts: Sequence[int]) -> None:
        """Replace all of them by others that want no more than these."""
        new = Settings.of(samplings, prompts, torch.device("cpu"))
        self.numbers.copy_(new.numbers)
        self.integers.copy_(new.integers)


@triton.jit
def _seen_kernel(history, span, position, integers, seen, vocabulary, length, block: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    own = tl.load(span + row)
    inside = at <= tl.load(position + row)
    token = tl.load(history + own.to(tl.int64) * length + at, mask=inside, other=0)
    prompt = tl.load(integers + own * 3 + 1)
    to = seen + row.to(tl.int64) * vocabulary + token
    tl.atomic_or(to, at * 0 + _IN_PROMPT, mask=inside & (at < prompt), sem="relaxed")
    tl.atomic_add(to, at * 0 + 1, mask=inside & (at >= prompt), sem="relaxed")


@triton.jit
def _store_best(values, ids, bad, best, best_id, at, vocabulary):
    """The largest value and the lowest id with it; id `vocabulary` if one is not a number."""
    top = tl.max(values, axis=0)
    low = tl.min(tl.where(values == top, ids, vocabulary), axis=0)
    broken = tl.max(bad.to(tl.int32), axis=0) > 0
    tl.store(best + at, tl.where(broken, float("inf"), top))
    tl.store(best_id + at, tl.where(broken, vocabulary, low))


@triton.jit
def _adjust_kernel(
    logits, seen, bias, span, numbers, best, best_id, vocabulary,
    penalises: tl.constexpr, biased: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * block + tl.arange(0, block)
    inside = ids < vocabulary
    ready(pdl)
    own = tl.load(logits + row * vocabulary + ids, mask=inside, other=-float("inf"))
    if penalises:
        setting = numbers + tl.load(span + row) * 6
        repetition = tl.load(setting + 3).to(tl.float32)
        presence = tl.load(setting + 4).to(tl.float32)
        frequency = tl.load(setting + 5).to(tl.float32)
        found = tl.load(seen + row * vocabulary + ids, mask=inside, other=0)
        count = (found & (_IN_PROMPT - 1)).to(tl.float32)
        new = tl.where(own > 0, own / repetition, own * repetition) - frequency * count
        new -= tl.where(count > 0, presence, 0.0)
        own = tl.where(found > 0, new, own)
    if biased:
        own += tl.load(bias + row * vocabulary + ids, mask=inside, other=0.0)
    if penalises or biased:
        tl.store(logits + row * vocabulary + ids, own, mask=inside)
    _store_best(own, ids, own != own, best, best_id, row * tl.num_programs(1) + part, vocabulary)


@triton.jit
def _sample_kernel(
    logits, largest, numbers, integers, span, position, cut, cut_id, best, best_id, vocabulary,
    orders: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * block + tl.arange(0, block)
    inside = ids < vocabulary
    ready(pdl)
    sequence = tl.load(span + row)
    temperature = tl.load(numbers + sequence * 6)
    own = tl.load(logits + row * vocabulary + ids, mask=inside, other=-float("inf"))
    greedy = temperature == 0
    scores = (own - tl.load(largest + row)).to(tl.float64) / tl.where(greedy, 1.0, temperature)
    kept = inside & (scores >= tl.load(numbers + sequence * 6 + 2))
    if orders:
        last = tl.load(cut + row)
        kept = kept & ((scores > last) | ((scores == last) & (ids <= tl.load(cut_id + row))))
    zero = ids * 0
    # The noise is that of the position the token will have.
    target = zero + tl.load(position + row) + 1
    seed = tl.load(integers + sequence * 3 + 2)
    word, _, _, _ = tl.philox(seed, ids, target, zero, zero)
    u = (word.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    noisy = tl.where(kept, scores - tl.log(-tl.log(u)), -float("inf"))
    values = tl.where(greedy, own.to(tl.float64), noisy)
    bad = inside & (scores != scores)
    _store_best(values, ids, bad, best, best_id, row * tl.num_programs(1) + part, vocabulary)


@triton.jit
def _last_kernel(
    best, best_id, token, largest, parts, vocabulary, block: tl.constexpr, pdl: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, block)
    ready(pdl)
    values = tl.load(best + row * parts + at, mask=at < parts, other=-float("inf"))
    ids = tl.load(best_id + row * parts + at, mask=at < parts, other=0)
    top = tl.max(values, axis=0)
    found = tl.min(tl.where((values == top) & (at < parts), ids, vocabulary), axis=0)
    broken = tl.max((ids == vocabulary).to(tl.int32), axis=0) > 0
    tl.store(token + row, tl.where(broken, vocabulary, found).to(tl.int64))
    tl.store(largest + row, top)


def choose(
    logits: Tensor,
    settings: Settings,
    span: Tensor,
    position: Tensor,
    history: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Rows' logits [n, V] fp32, which may be overwritten → tokens [n] int64, V where a row's logits
    are not numbers.

    span [n] and position [n] int32 place each row; its token will stand at position + 1. history
    [S, T] int32 holds the tokens of each sequence by position. bias [n, V] fp32 is added.
    """
    n, vocabulary = logits.shape
    device, wants = logits.device, settings.wants
    parts = triton.cdiv(vocabulary, _BLOCK)
    seen = _seen(history, span, position, settings, vocabulary) if wants.penalises else None
    best = torch.empty((n, parts), dtype=torch.float64, device=device)
    best_id = torch.empty((n, parts), dtype=torch.int32, device=device)
    token = torch.empty(n, dtype=torch.int64, device=device)
    largest = torch.empty(n, dtype=torch.float32, device=device)

    def last() -> None:
        _last_kernel[(n,)](
            best, best_id, token, largest, parts, vocabulary, block=up2(parts), num_warps=1,
            **early(device),
        )  # fmt: skip

    _adjust_kernel[(n, parts)](
        logits, seen, bias, span, settings.numbers, best, best_id, vocabulary,
        penalises=seen is not None, biased=bias is not None, block=_BLOCK, num_warps=4,
        **early(device),
    )  # fmt: skip
    last()
    if wants.samples:
        cut, cut_id = _cuts(logits, largest, settings, span) if wants.orders else (None, None)
        _sample_kernel[(n, parts)](
            logits, largest, settings.numbers, settings.integers, span, position, cut, cut_id,
            best, best_id, vocabulary, orders=wants.orders, block=_BLOCK, num_warps=4,
            **early(device),
        )  # fmt: skip
        last()
    return token


def _seen(
    history: Tensor, span: Tensor, position: Tensor, settings: Settings, vocabulary: int
) -> Tensor:
    """[n, V] int32: occurrences in the output, and a high bit for one in the prompt."""
    n, length = len(span), history.shape[1]
    seen = torch.zeros((n, vocabulary), dtype=torch.int32, device=span.device)
    _seen_kernel[(n, triton.cdiv(length, _COUNTED))](
        history, span, position, settings.integers, seen, vocabulary, length, block=_COUNTED,
        num_warps=4,
    )  # fmt: skip
    return seen


def _cuts(
    logits: Tensor, largest: Tensor, settings: Settings, span: Tensor
) -> tuple[Tensor, Tensor]:
    """The last score [n] float64 that top-k and top-p keep, and the last id [n] with it."""
    own = span.long()
    temperature, top_p = settings.numbers[own, 0], settings.numbers[own, 1]
    top_k = settings.integers[own, 0]
    scale = torch.where(temperature == 0, 1.0, temperature)
    scores = (logits - largest[:, None]).double() / scale[:, None]
    ordered, ids = torch.sort(scores, dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    within = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    masses = torch.where(within, (ordered.exp() * _MASS).round().long(), 0)
    before = masses.cumsum(1) - masses
    enough = top_p * masses.sum(1)
    within &= (before < enough[:, None]) | (top_p == 1)[:, None]
    end = within.sum(1, keepdim=True).clamp_min(1) - 1
    return ordered.gather(1, end)[:, 0].contiguous(), ids.gather(1, end)[:, 0].contiguous()
