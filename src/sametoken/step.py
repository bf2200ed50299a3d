"""One pass over the rows of several sequences: ids in, hiddens and picked tokens out.

Plain decoding, verification and prompt chunks are all this one function; they differ only in how
many rows each span has. The target's own token is picked here, before anything is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.cache import Cache
from sametoken.model import Model
from sametoken.rows import Rows, Span
from sametoken.sampling import Ask, Picked


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a pass: its rows' tokens, and what its last rows are asked for.

    `asks` belong to the last `len(asks)` rows; earlier rows are asked for nothing, so no logits
    are made for them.
    """

    span: Span
    ids: Sequence[int]
    asks: Sequence[Ask]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sequence's part of the result: hidden [width, H], and a picked token per ask."""

    hidden: Tensor
    picked: Sequence[Picked]


def step(model: Model, cache: Cache, works: Sequence[Work]) -> list[Outcome]:
    """Run one pass; returns an outcome for each work, in order."""
    rows = Rows(tuple(work.span for work in works))
    ids = torch.tensor([i for work in works for i in work.ids], device=model.device)
    hidden = model.hidden(ids, rows, cache)
    blocks = [block for _, block in rows.blocks(hidden)]
    asked = [
        block[len(block) - len(work.asks) :] for block, work in zip(blocks, works, strict=True)
    ]
    asks = [ask for work in works for ask in work.asks]
    picked = model.ops.pick(torch.cat(asked), model.weights.head, asks)
    outcomes = []
    for block, work in zip(blocks, works, strict=True):
        own, picked = picked[: len(work.asks)], picked[len(work.asks) :]
        outcomes.append(Outcome(block, own))
    return outcomes


def settle(model: Model, cache: Cache, span: Span) -> None:
    """Let the recurrent state absorb the accepted drafts it still has in its log."""
    rows = Rows((span,))
    for mixer, state in zip(model.delta_mixers(), cache.delta, strict=True):
        width = mixer.inputs.shape[0]
        nothing = torch.empty((0, width), dtype=model.dtype, device=model.device)
        model.ops.delta(nothing, mixer.delta, state, rows)
