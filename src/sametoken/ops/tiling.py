"""What the Triton kernels share: the dot, and the tiles of rows.

Weights stand on the M side of every `tl.dot` and rows on its N side, padded to a tile: the tensor
core then forms each output element alone, in ascending K, whatever the tile is. No kernel is
autotuned at run time: a stopwatch must not choose the order of a sum.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter runs kernels on a CPU for tests; its bf16 dot is wrong (Triton 3.9), so there
# the inputs are widened, which keeps their values.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_WIDEN = tl.constexpr(INTERPRETED)

# Rows in a tile: the smallest N of the tensor core's instruction family that serves all widths up
# to 16 at the same bits; wider passes take larger tiles of the same sum.
NARROW, WIDE = 16, 64


def tile_for(rows: int) -> int:
    """Rows in a tile of a pass that wide."""
    return NARROW if rows <= NARROW else WIDE


def up2(size: int) -> int:
    """The next power of two: Triton's vectors have no other length."""
    return int(triton.next_power_of_2(size))


@triton.jit
def dot(a, b, acc):
    """acc [M, N] fp32 + a [M, K] · b [K, N], products in full precision."""
    if _WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
