"""Verification: how many drafts equal the tokens the target picked. A pure comparison.

There are no acceptance probabilities: the target's token is picked first, by the same op and with
the same noise as in plain decoding, so agreeing tokens are the plain tokens, sampled or greedy.
"""

from __future__ import annotations

from collections.abc import Sequence


def agreeing(drafts: Sequence[int], picked: Sequence[int]) -> int:
    """Length of the common prefix; `picked` has one token more, the bonus."""
    for i, (draft, own) in enumerate(zip(drafts, picked, strict=False)):
        if draft != own:
            return i
    return len(drafts)
