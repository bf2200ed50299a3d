"""pick on a GPU: the head by the linear sum, then `choose` for all rows at once.

Log-probabilities, which few requests want, are computed by the reference from the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.errors import NumericError
from sametoken.ops.choose_triton import Settings, choose
from sametoken.ops.linear_triton import project
from sametoken.ops.pick import top_logprobs
from sametoken.sampling import Ask, Picked


def pick_rows(
    h: Tensor, head: Tensor, settings: Settings, span: Tensor, position: Tensor, history: Tensor
) -> Tensor:
    """[n, H] → tokens [n], with everything on the device; see `choose`."""
    logits = project(h.contiguous(), head, None, torch.float32)
    return choose(logits, settings, span, position, history)


def pick(h: Tensor, head: Tensor, asks: Sequence[Ask]) -> list[Picked]:
    """[n, H] and one ask per row → one token per row."""
    if not asks:
        return []
    device = h.device
    logits = project(h.contiguous(), head, None, torch.float32)
    told = [None if a.sampling.logprobs is None else logits[i].clone() for i, a in enumerate(asks)]
    settings = Settings.of([a.sampling for a in asks], [a.prompt for a in asks], device)
    position = torch.tensor([len(a.past) - 1 for a in asks], dtype=torch.int32, device=device)
    span = torch.arange(len(asks), dtype=torch.int32, device=device)
    history = _history(asks, device, whole=settings.wants.penalises)
    tokens = choose(logits, settings, span, position, history, _bias(asks, logits)).tolist()
    if max(tokens) == len(head):
        raise NumericError("the model's logits are not numbers; load it with --dtype float32.")
    return [
        Picked(token) if own is None else top_logprobs(own, token, ask.sampling.logprobs or 0)
        for token, own, ask in zip(tokens, told, asks, strict=True)
    ]


def _history(asks: Sequence[Ask], device: torch.device, *, whole: bool) -> Tensor:
    """Tokens of each row's past; only penalties read them."""
    longest = max(len(a.past) for a in asks) if whole else 1
    rows = [[*a.past[:longest], *[0] * (longest - len(a.past))] for a in asks]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _bias(asks: Sequence[Ask], logits: Tensor) -> Tensor | None:
    """What is added to the logits of each row, if any row asks for it."""
    if not any(a.sampling.logit_bias for a in asks):
        return None
    bias = torch.zeros_like(logits)
    for row, ask in zip(bias, asks, strict=True):
        inside = {i: b for i, b in ask.sampling.logit_bias.items() if i < len(row)}
        if inside:
            index = torch.tensor(list(inside), device=row.device)
            row[index] = torch.tensor(list(inside.values()), dtype=row.dtype, device=row.device)
    return bias
