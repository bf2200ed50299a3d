"""pick: the head, then the token that plain decoding takes at this position.

    logits = W · h
    repetition, presence and frequency penalties, bias, temperature, top-k, top-p, min-p
    token = argmax(logits + noise)       noise = Gumbel keyed by (seed, position, token id)

The adjustments apply in this order. Temperature 0 takes the argmax after penalties and bias.
Shapes: h [H], W [V, H]; one token out.
Arithmetic: fp32 logits, never rounded; filters in float64. All ties go to the lower id: in top-k,
in the order top-p sums in, and in the final argmax.
Promised: the token depends on that row, its sequence's past tokens, its settings and W alone. A
draft picked with the same settings meets the same noise, so sampling costs acceptance little.
Log-probabilities are those of the model itself, before penalties, bias, temperature and filters;
asking for them changes nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.errors import NumericError
from sametoken.ops.linear import dot
from sametoken.ops.noise import gumbel
from sametoken.rows import alone
from sametoken.sampling import Ask, Picked, Sampling


def pick_row(h: Tensor, head: Tensor, ask: Ask) -> Picked:
    """One row [H] → the token at position len(ask.past)."""
    return pick_logits(dot(head, h), ask)


def pick_logits(logits: Tensor, ask: Ask) -> Picked:
    """One row's logits [V] fp32 → the token."""
    wanted = ask.sampling
    token = _choose(_adjust(logits, ask), wanted, len(ask.past))
    return (
        Picked(token) if wanted.logprobs is None else top_logprobs(logits, token, wanted.logprobs)
    )


def top_logprobs(logits: Tensor, token: int, count: int) -> Picked:
    """One row's logits [V] as the model gave them, and its token → that with log-probabilities."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = (t[:count].tolist() for t in _ranked(logprobs))
    return Picked(token, float(logprobs[token]), tuple(zip(ids, values, strict=True)))


def _ranked(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values in descending order with their ids, ties to the lower id."""
    return torch.sort(values, descending=True, stable=True)


def _adjust(logits: Tensor, ask: Ask) -> Tensor:
    """Penalties for the tokens before the position, then the bias."""
    s = ask.sampling
    if s.penalises:
        logits = _penalise(logits, ask)
    if s.logit_bias:
        inside = {i: b for i, b in s.logit_bias.items() if i < logits.numel()}
        index = torch.tensor(list(inside), dtype=torch.long, device=logits.device)
        bias = torch.tensor(list(inside.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, index, bias)
    return logits


def _penalise(logits: Tensor, ask: Ask) -> Tensor:
    s = ask.sampling
    output = Counter(ask.past[ask.prompt :])
    seen = sorted(set(ask.past))
    index = torch.tensor(seen, dtype=torch.long, device=logits.device)
    counts = torch.tensor([float(output[i]) for i in seen], device=logits.device)
    old = logits[index]
    repeated = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
    new = repeated - s.frequency_penalty * counts - s.presence_penalty * (counts > 0).float()
    return logits.index_copy(0, index, new)


def _choose(logits: Tensor, s: Sampling, position: int) -> int:
    if s.temperature == 0:
        return _argmax(logits, torch.arange(logits.numel(), device=logits.device))
    # Relative to the largest, so that no temperature overflows where it matters.
    scores, ids = _ranked((logits - logits.max()).double() / s.temperature)
    keep = _kept(scores, s)
    ids = ids[:keep]
    return _argmax(scores[:keep] + gumbel(ids, s.seed, position), ids)


def _kept(scores: Tensor, s: Sampling) -> int:
    """How many of the descending scores survive top-k, then top-p, then min-p; at least one."""
    keep = min(s.top_k, scores.numel()) if s.top_k else scores.numel()
    if s.top_p < 1:
        probabilities = torch.softmax(scores[:keep], dim=-1)
        before = probabilities.cumsum(-1) - probabilities
        keep = max(1, int((before < s.top_p).sum()))
    if s.min_p > 0:
        keep = int((scores[:keep] >= scores[0] + math.log(s.min_p)).sum())
    return keep


def _argmax(values: Tensor, ids: Tensor) -> int:
    """The lowest id of the largest value; torch's argmax promises none of several."""
    largest = ids[values == values.max()]
    if not len(largest):
        raise NumericError("the model's logits are not numbers; load it with --dtype float32.")
    return int(largest.min())


def pick(h: Tensor, head: Tensor, asks: Sequence[Ask]) -> list[Picked]:
    """[n, H] and one ask per row → one token per row."""
    return [pick_row(row, head, ask) for row, ask in zip(alone(h), asks, strict=True)]
