"""Compile every Triton kernel for a GPU that need not be here: sm_90, at a real model's sizes.

The interpreter accepts what the compiler refuses. Run as a program of its own, because Triton
decides once per process which of the two it is.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sametoken.ops import (
    attention_triton,
    combine_triton,
    delta_triton,
    experts_triton,
    glu_triton,
    linear_triton,
    norm_triton,
    qkv_triton,
    router_triton,
)

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "*i64"
TILES = {"tile": 16, "block": 16, "step": 128}
# Pointers and scalars by parameter name, wherever they occur; whatever is not named is an int32.
TYPES = (
    dict.fromkeys(["x", "y", "h", "q", "v", "weight", "skip", "gate_up", "down", "shared"], BF16)
    | dict.fromkeys(["projection", "recents", "out", "gate", "k_pool", "v_pool"], BF16)
    | dict.fromkeys(["routed", "shared_down"], BF16)
    | dict.fromkeys(["gain", "q_gain", "k_gain", "cos", "sin", "logits", "shares"], FP32)
    | dict.fromkeys(["gates", "peaks", "totals", "values", "conv", "decay", "dt_bias"], FP32)
    | dict.fromkeys(["states"], FP32)
    | dict.fromkeys(["listed", "count", "positions", "pages", "first", "slots"], INT32)
    | dict.fromkeys(["certain", "drafts", "replay"], INT32)
    | dict.fromkeys(["ids"], INT64)
    | dict.fromkeys(["eps", "q_eps", "k_eps", "unit_eps", "scale"], "fp32")
)
# Kernel, its constants, warps, and whether it must use the tensor cores.
KERNELS: list[tuple[Any, dict[str, Any], int, bool]] = [
    (norm_triton._norm_kernel, {"first": False, "block": 2048}, 4, False),
    (linear_triton._linear_kernel, {"residual": True, **TILES}, 4, True),
    (linear_triton._linear_kernel, {"residual": False, **TILES, "tile": 64}, 4, True),
    (router_triton._choose_kernel, {"top_k": 8, "renormalise": True, "block": 256}, 4, False),
    (experts_triton._distinct_kernel, {"block": 256, "step": 32}, 4, False),
    (experts_triton._experts_kernel, {"k_block": 8, **TILES}, 4, True),
    (glu_triton._glu_kernel, TILES, 4, True),
    (combine_triton._combine_kernel, {"has_shared": True, "k_block": 8, **TILES}, 4, True),
    (
        qkv_triton._qkv_kernel,
        {"gated": True, "first": False, "page": 256, "block": 256},
        1,
        False,
    ),
    (
        attention_triton._chunk_kernel,
        {"group": 8, "g_block": 16, "d_block": 256, "page": 256, "step": 32},
        4,
        True,
    ),
    (
        attention_triton._merge_kernel,
        {"group": 8, "d_block": 256, "page": 256, "gated": True},
        1,
        False,
    ),
    (delta_triton._delta_kernel, {"taps": 4, "dk": 128, "dv": 128}, 8, False),
    (delta_triton._log_kernel, {"taps": 4, "block": 256}, 2, False),
]


def build(kernel: Any, constants: dict[str, Any], warps: int) -> str:
    """The kernel's PTX."""
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, values)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    for kernel, constants, warps, dots in KERNELS:
        ptx = build(kernel, constants, warps)
        assert not dots or "mma" in ptx, f"{kernel} does not use the tensor cores"
