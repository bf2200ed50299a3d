"""Engines for tests: the demo model, and checkpoints made on the spot."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import sametoken
from sametoken.checkpoint import open_checkpoint
from sametoken.engine import Engine
from sametoken.loading import build
from sametoken.track import Track


@cache
def demo() -> Engine:
    """The demo model as `sametoken.load` gives it: MTP drafts of up to 3."""
    return sametoken.load(slots=48, context=1024)


def engine_of(
    folder: Path, *, draft: str | None = None, dtype: torch.dtype = torch.float32
) -> Engine:
    """A checkpoint of any kind, speaking token ids."""
    return build(
        open_checkpoint(folder),
        None,
        draft=draft,
        draft_max=3,
        device=torch.device("cpu"),
        dtype=dtype,
    )


def state(engine: Engine, track: Track | None) -> list[Tensor]:
    """What a kept sequence leaves behind, brought up to date and given back."""
    assert track is not None, "the sequence was not kept"
    engine.settle(track)
    left = engine.cache.snapshot(track.lease, track.computed)
    engine.release(track)
    return left
