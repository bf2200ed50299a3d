"""Which backends can run here, and on what.

Without a GPU the Triton kernels run in Triton's interpreter: their logic is then tested, on fewer
widths because it is slow, and not the bits of a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sametoken.ops import BACKENDS

# One more than a tile of the GPU's tensor cores.
ROWS = 17
HAS_GPU = torch.cuda.is_available()
ALL_WIDTHS = tuple(range(1, ROWS + 1))


def device_of(backend: str) -> str:
    """Where a backend is tested."""
    return "cuda" if backend == "triton" and HAS_GPU else "cpu"


def widths_of(backend: str) -> Sequence[int]:
    """Every width; in the interpreter one inside a tile and one beyond it."""
    return (3, ROWS) if backend == "triton" and not HAS_GPU else ALL_WIDTHS


__all__ = ["ALL_WIDTHS", "BACKENDS", "HAS_GPU", "ROWS", "device_of", "widths_of"]
