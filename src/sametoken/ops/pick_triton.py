"""pick on a GPU: the head by the linear sum; greedy rows by a maximum, which no order can change.

Rows with other settings go through the reference's filters, on the device, one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.errors import NumericError
from sametoken.ops.linear_triton import project
from sametoken.ops.pick import pick_logits
from sametoken.sampling import Ask, Picked, Sampling


def pick(h: Tensor, head: Tensor, asks: Sequence[Ask]) -> list[Picked]:
    """[n, H] and one ask per row → one token per row."""
    if not asks:
        return []
    logits = project(h.contiguous(), head, None, torch.float32)
    plain = [_plain(ask.sampling) for ask in asks]
    greedy = _lowest_of_largest(logits).tolist() if any(plain) else []
    if any(own and token == len(head) for own, token in zip(plain, greedy, strict=False)):
        raise NumericError("the model's logits are not numbers; load it with --dtype float32.")
    return [
        Picked(greedy[i]) if plain[i] else pick_logits(logits[i], ask) for i, ask in enumerate(asks)
    ]


def _plain(sampling: Sampling) -> bool:
    """Whether the token is the argmax of the raw logits and nothing else is asked."""
    return (
        sampling.temperature == 0
        and not sampling.penalises
        and not sampling.logit_bias
        and sampling.logprobs is None
    )


def _lowest_of_largest(logits: Tensor) -> Tensor:
    """[n, V] → the lowest id of each row's largest value, V where a row holds no number."""
    vocabulary = logits.shape[1]
    ids = torch.arange(vocabulary, device=logits.device)
    largest = logits.amax(dim=1, keepdim=True)
    return torch.where(logits == largest, ids, vocabulary).amin(dim=1)
