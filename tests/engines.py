"""Engines for tests: the demo model, and checkpoints made on the spot."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sametoken.checkpoint import demo_path, open_checkpoint
from sametoken.engine import Engine
from sametoken.loading import build
from sametoken.text import Tokenizer
from sametoken.track import Track

# The backends that run whole models on this machine's processor.
CPU_BACKENDS = ("reference", "cpu")


@cache
def demo(backend: str = "cpu") -> Engine:
    """The demo model on a backend: room for many, MTP drafts of up to 3."""
    checkpoint = open_checkpoint(demo_path())
    return build(
        checkpoint,
        Tokenizer.from_folder(checkpoint.folder, checkpoint.config),
        draft="mtp",
        draft_max=3,
        device=torch.device("cpu"),
        dtype=torch.float32,
        context=1024,
        slots=48,
        backend=backend,
    )


def engine_of(
    folder: Path,
    *,
    draft: str | None = None,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> Engine:
    """A checkpoint of any kind, speaking token ids; on the default backend if none is named."""
    return build(
        open_checkpoint(folder),
        None,
        draft=draft,
        draft_max=3,
        device=torch.device("cpu"),
        dtype=dtype,
        backend=backend,
    )


def state(engine: Engine, track: Track | None) -> list[Tensor]:
    """What a kept sequence leaves behind, brought up to date and given back."""
    assert track is not None, "the sequence was not kept"
    engine.settle(track)
    left = engine.cache.snapshot(track.lease, track.computed)
    engine.release(track)
    return left
