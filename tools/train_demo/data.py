"""Token streams on the device and the batches cut from them."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_stream(path: Path, device: torch.device, limit: int | None = None) -> Tensor:
    """Read a compressed stream of token ids."""
    ids = np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")[:limit]
    return torch.from_numpy(ids.astype(np.int16)).to(device)


def batches(stream: Tensor, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield [rows, length] windows for ever: each epoch shifts the grid and shuffles it."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length, device=stream.device)
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        count = (len(stream) - shift) // length
        order = torch.randperm(count, generator=generator).to(stream.device)
        for start in range(0, count - rows + 1, rows):
            starts = shift + order[start : start + rows] * length
            yield stream[starts[:, None] + offsets].long()
