"""What the Triton kernels share: the dot, sums of squares, tiles of rows, and early launches.

Weights stand on the M side of every `tl.dot` and rows on its N side, padded to a tile: the tensor
core then forms each output element alone, in ascending K, whatever the tile is. A row's sum of
squares is the diagonal of x · xᵀ by the same dot, so it too has the same bits under any tile and
any number of warps, which a plain reduction has not. The number of rows is not specialised on:
one binary serves every width of a tile. No kernel is autotuned at run time: a
stopwatch must not choose the order of a sum.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl

# The interpreter runs kernels on a CPU for tests; its bf16 dot is wrong (Triton 3.9), so there
# the inputs are widened, which keeps their values.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_WIDEN = tl.constexpr(INTERPRETED)

# Rows in a tile: the smallest N of the tensor core's instruction family that serves all widths up
# to 16 at the same bits; wider passes take larger tiles of the same sum.
NARROW, MIDDLE, WIDE = 16, 64, 128
# From this many rows on, the weights are read often enough for the largest tile to pay.
_MANY = 256
# Programmatic dependent launch exists from this compute capability on.
_EARLY_FROM = (9, 0)


def tile_for(rows: int) -> int:
    """Rows in a tile of a pass that wide."""
    if rows <= NARROW:
        return NARROW
    return MIDDLE if rows < _MANY else WIDE


def up2(size: int) -> int:
    """The next power of two: Triton's vectors have no other length."""
    return int(triton.next_power_of_2(size))


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that calls `ready`: it may be set up while the one before runs."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _EARLY_FROM
    return {"pdl": able, "launch_pdl": able}


@triton.jit
def ready(pdl: tl.constexpr):
    """Wait for the kernel before; only weights may be read earlier. Then let the next one set up.

    In this order a kernel that is being set up has at most one unfinished kernel before it.
    """
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def dot(a, b, acc):
    """acc [M, N] fp32 + a [M, K] · b [K, N], products in full precision."""
    if _WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def diagonal(gram, tile: tl.constexpr):
    """gram [tile, tile] → its diagonal [tile]: a sum of one value and zeros, exact in any order."""
    own = tl.arange(0, tile)
    return tl.sum(tl.where(own[:, None] == own[None, :], gram, 0.0), axis=0)
