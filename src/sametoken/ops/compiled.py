"""What the CPU kernels share: compilation, and the one dot product all of them use.

A kernel is compiled twice from one source, serial and with its outer loop spread over threads;
every output is computed whole by one thread, so the number of threads changes no bit. A weight is
widened to fp32 once and then used for every row of the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Indices = NDArray[np.int32]

# Outputs of one step of a kernel's outer loop: enough work to be worth handing to a thread.
BLOCK = 32


class Kernel:
    """A function on arrays, compiled on first use and cached on disk."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.__doc__ = function.__doc__
        self._serial = numba.njit(cache=True, nogil=True)(function)
        self._threaded = numba.njit(cache=True, nogil=True, parallel=True)(function)

    def __call__(self, *arguments: Any) -> None:
        """Run on as many threads as numba is set to."""
        run = self._threaded if numba.get_num_threads() > 1 else self._serial
        run(*arguments)


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def dot(a: Floats, b: Floats) -> Any:
    """Σ a_k b_k in fp32. The compiler lays the sum out in lanes, once for all lengths, rows and
    threads: its order is a function of the length alone.
    """
    total = np.float32(0)
    for k in range(a.size):
        total += a[k] * b[k]
    return total


def widen(row: Any, out: Floats) -> None:
    """A stored row of weights as fp32: bf16, held as its bits, or fp32 itself."""
    raise NotImplementedError("only compiled code calls this")


@overload(widen)
def _widen(row: Any, out: Any) -> Callable[..., None]:
    def from_bf16(row: Any, out: Any) -> None:
        bits = out.view(np.uint32)
        for k in range(row.size):
            bits[k] = np.uint32(row[k]) << np.uint32(16)

    def from_fp32(row: Any, out: Any) -> None:
        out[:] = row

    return from_bf16 if row.dtype == types.uint16 else from_fp32


@numba.njit(cache=True, nogil=True)
def silu(x: Any) -> Any:
    """x σ(x) in fp32."""
    return x / (np.float32(1) + np.exp(-x))


def array(tensor: Tensor) -> Any:
    """A tensor as a NumPy array over the same memory; bf16 as its bits."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()
