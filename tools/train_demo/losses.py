"""Losses of the trunk and of the head; each is small enough to compile into a few kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

HARD_SHARE = 0.5


def trunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next token, and the logits."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), logits


def head_loss(hidden: Tensor, weight: Tensor, teacher: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the loss of chained step ``step`` and how often its argmax is the trunk's.

    Row t is compared with the trunk's distribution at position t + step; the last rows have none.
    A draft is accepted when its argmax is the trunk's, so the trunk teaches, not the text: half by
    its whole distribution, half by its argmax.
    """
    teacher = teacher[:, step:].detach()
    student = F.linear(hidden[:, :-step], weight).float().log_softmax(-1)
    soft = -(teacher.float().softmax(-1) * student).sum(-1).mean()
    choice = teacher.argmax(-1)
    hard = -student.gather(-1, choice.unsqueeze(-1)).mean()
    agreement = (student.argmax(-1) == choice).float().mean()
    return HARD_SHARE * hard + (1 - HARD_SHARE) * soft, agreement
