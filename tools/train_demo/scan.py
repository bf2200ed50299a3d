"""Two operators the chunked delta rule needs, kept opaque to the compiler.

``unit_lower_inverse``: (I + A)⁻¹ for strictly lower triangular A. Forward substitution in fp32: a
product of powers of A would cancel badly when neighbouring keys are alike.
``matrix_scan``: X₀ = 0, Xₙ₊₁ = Mₙ Xₙ + Bₙ over the chunks of a sequence, all Xₙ returned. Its
adjoint is the same recurrence, transposed and run backwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only installation
    triton = None


if triton is not None:

    @triton.jit
    def _inverse_kernel(a_ptr, out_ptr, SIZE: tl.constexpr):
        """One program inverts one matrix, a row at a time, in registers."""
        base = tl.program_id(0).to(tl.int64) * SIZE * SIZE
        rows = tl.arange(0, SIZE)
        identity = (rows[:, None] == rows[None, :]).to(tl.float32)
        inverse = identity
        for i in range(1, SIZE):
            row = tl.load(a_ptr + base + i * SIZE + rows)
            row = tl.where(rows < i, row, 0.0)
            update = tl.sum(row[:, None] * inverse, axis=0)
            inverse = tl.where(rows[:, None] == i, inverse - update[None, :], inverse)
        tl.store(out_ptr + base + rows[:, None] * SIZE + rows[None, :], inverse)


@torch.library.custom_op("demo::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I + a)⁻¹ over the last two axes; ``a`` is strictly lower triangular."""
    a = a.contiguous()
    if a.is_cuda and triton is not None:
        out = torch.empty_like(a)
        size = a.shape[-1]
        _inverse_kernel[(a.numel() // (size * size),)](a, out, size, num_warps=4)
        return out
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, identity, upper=False, unitriangular=True)


@unit_lower_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _inverse_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ grad @ transposed).tril(-1)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_inverse_setup)


@torch.library.custom_op("demo::matrix_scan", mutates_args=())
def matrix_scan(m: Tensor, b: Tensor, backwards: bool) -> Tensor:
    """Scan ``m`` [R, N, D, D] and ``b`` [R, N, D, E]; return N + 1 states, the zero one first."""
    rows, count, size, width = b.shape
    # Chunk-major, so that each step reads and writes one contiguous block.
    states = b.new_zeros(count + 1, rows, size, width)
    for n in range(count):
        at = count - 1 - n if backwards else n
        matrix = m[:, at].transpose(-1, -2) if backwards else m[:, at]
        torch.baddbmm(b[:, at], matrix, states[n], out=states[n + 1])
    return states


@matrix_scan.register_fake
def _(m: Tensor, b: Tensor, backwards: bool) -> Tensor:
    rows, count, size, width = b.shape
    return b.new_empty(count + 1, rows, size, width)


def _scan_setup(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    m, states = ctx.saved_tensors
    # Adjoint of the state after step n: what arrives from outside plus Mᵀ times the next adjoint.
    # Scanning backwards with `m` shifted by one makes the two recurrences the same.
    outside = grad[1:].transpose(0, 1).contiguous()
    shifted = torch.cat([m[:, 1:], torch.zeros_like(m[:, :1])], dim=1)
    adjoint = matrix_scan(shifted, outside, True)[1:].flip(0)
    grad_m = adjoint @ states[:-1].transpose(-1, -2)
    return grad_m.transpose(0, 1), adjoint.transpose(0, 1), None


matrix_scan.register_autograd(_scan_backward, setup_context=_scan_setup)
