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
    board_triton,
    choose_triton,
    combine_triton,
    delta_triton,
    draft_head_triton,
    experts_triton,
    glu_triton,
    linear_triton,
    norm_triton,
    qkv_triton,
    router_triton,
)

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "*i64"
TILES = {"size": 2048, "tile": 16, "block": 16, "step": 128, "pdl": True}
HEADS = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "dv": 128}
DELTA = {**HEADS, "ring_size": 64, "taps": 4, "dk": 128, "pdl": True}
MOE = {"inner": 512, "top_k": 8, "k_block": 8}
# Pointers and scalars by parameter name, wherever they occur; whatever is not named is an int32.
TYPES = (
    dict.fromkeys(["x", "y", "q", "weight", "skip", "gate_up", "down", "shared"], BF16)
    | dict.fromkeys(["projection", "rings", "out", "gate", "k_pool", "v_pool", "read"], BF16)
    | dict.fromkeys(["routed"], BF16)
    | dict.fromkeys(["gain", "q_gain", "k_gain", "cos", "sin", "shares", "scale_of"], FP32)
    | dict.fromkeys(["gates", "peaks", "totals", "values", "conv", "decay", "dt_bias"], FP32)
    | dict.fromkeys(["states", "parts", "squares", "made"], FP32)
    | dict.fromkeys(["listed", "counters", "position", "positions", "pages", "first"], INT32)
    | dict.fromkeys(
        ["firsts", "ends", "experts", "spans", "widths", "slots", "starts", "width_of"], INT32
    )
    | dict.fromkeys(["certain", "drafts", "replay", "left", "longest", "start"], INT32)
    | dict.fromkeys(["history", "step_position", "ask", "step_positions"], INT32)
    | dict.fromkeys(["ids", "pairs", "token", "picked", "last", "report", "to_shared"], INT64)
    | dict.fromkeys(["eps", "q_eps", "k_eps", "unit_eps"], "fp32")
)
CHOICE = {
    **dict.fromkeys(["logits", "bias", "largest"], FP32),
    **dict.fromkeys(["numbers", "best", "cut"], "*fp64"),
    **dict.fromkeys(["integers", "token", "cut_id"], INT64),
    **dict.fromkeys(["span", "best_id", "seen"], INT32),
    "parts": "i32",
}
INT8, SCALE = "*i8", {"scale": FP32}
SCALAR64 = {"to_shared": "i64", "scale": "fp32"}
# Kernel, its constants, warps, whether it must use the tensor cores, and types of its own.
Case = tuple[Any, dict[str, Any], int, bool, dict[str, str]]
KERNELS: list[Case] = [
    (norm_triton._norm_kernel, {**TILES, "first": False, "block": 2048}, 4, False, {}),
    (linear_triton._weigh_kernel, TILES, 4, True, {"scale": FP32}),
    *(
        (linear_triton._linear_kernel, {"normed": how, "residual": True, **tiles}, 4, True, {})
        for how in (0, 1, 2)
        for tiles in (TILES, TILES | {"tile": 64, "block": 64, "step": 64})
    ),
    (glu_triton._glu_kernel, {"normed": 1, **TILES}, 4, True, {}),
    (router_triton._logits_kernel, {**TILES, "width": 257, "chunk_size": 512}, 4, True, {}),
    (
        router_triton._choose_kernel,
        {"size": 2048, "chunks": 4, "experts": 256, "has_shared": True, "top_k": 8, "pdl": True}
        | {"renormalise": True, "listing": True, "block": 256, "step": 128},
        8,
        False,
        {"shared": FP32, "counter": INT32},
    ),
    (
        experts_triton._distinct_kernel,
        {"block": 256, "step": 32},
        4,
        False,
        {"experts": "i32"},
    ),
    (experts_triton._experts_kernel, {**TILES, **MOE, "has_shared": True}, 4, True, {}),
    (experts_triton._grouped_kernel, {**TILES, **MOE}, 4, True, {"scale": FP32}),
    (
        combine_triton._combine_kernel,
        {**TILES, **MOE, "shared_inner": 512, "l_block": 128},
        4,
        True,
        {},
    ),
    (combine_triton._down_kernel, {**TILES, **MOE}, 4, True, {}),
    (
        combine_triton._sum_kernel,
        {**TILES, **MOE, "has_shared": True, "block": 1024},
        4,
        False,
        {"shared": FP32},
    ),
    (
        qkv_triton._qkv_kernel,
        {"gated": True, "first": False, "page": 256, "block": 256, "pdl": True},
        1,
        False,
        {},
    ),
    *(
        (
            attention_triton._chunk_kernel,
            {"q_heads": 16, "kv_heads": 2, "size": 256, "group": 8, "rows": rows, "tiles": 1}
            | {"block": 8 * rows if rows > 1 else 16, "d_block": 256, "page": 256, "step": 64}
            | {"pdl": True},
            4 if rows < 8 else 8,
            True,
            {"width": INT32},
        )
        for rows in (1, 4, 8)
    ),
    (
        attention_triton._merge_kernel,
        {"q_heads": 16, "size": 256, "d_block": 128, "c_block": 4, "page": 256, "gated": True}
        | {"ahead": 16, "pdl": True},
        1,
        False,
        {},
    ),
    (delta_triton._delta_kernel, {**DELTA, "long": False}, 8, False, {}),
    (delta_triton._delta_kernel, {**DELTA, "long": True}, 8, False, {}),
    (delta_triton._make_kernel, DELTA, 8, False, {}),
    (delta_triton._leave_kernel, DELTA, 8, False, {}),
    (delta_triton._open_kernel, {**HEADS, "pdl": True}, 8, False, {}),
    (board_triton._put_kernel, {}, 1, False, {}),
    (board_triton._begin_kernel, {}, 1, False, {}),
    (
        board_triton._advance_kernel,
        {"block": 4, "kinds_block": 2},
        1,
        False,
        {"ends": INT64},
    ),
    (choose_triton._seen_kernel, {"block": 1024}, 4, False, CHOICE),
    (
        choose_triton._adjust_kernel,
        {"penalises": True, "biased": True, "block": 2048, "pdl": True},
        4,
        False,
        CHOICE,
    ),
    (
        choose_triton._sample_kernel,
        {"orders": True, "block": 2048, "pdl": True},
        4,
        False,
        CHOICE,
    ),
    (choose_triton._last_kernel, {"block": 128, "pdl": True}, 1, False, CHOICE),
    (draft_head_triton._quantise_kernel, {**TILES, "block": 2048}, 4, False, {"y": INT8, **SCALE}),
    (
        draft_head_triton._draft_head_kernel,
        {"size": 2048, "group": 128, "tile": 16, "block": 64, "pdl": True},
        4,
        True,
        {"x": INT8, "packed": INT8, "scales": "*fp16", "y": FP32, **SCALE},
    ),
]


def build(kernel: Any, constants: dict[str, Any], warps: int, own: dict[str, str]) -> str:
    """The kernel's PTX."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    known = TYPES | SCALAR64 | own
    types = {n: "constexpr" if n in constants else known.get(n, "i32") for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, values)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    for kernel, constants, warps, dots, own in KERNELS:
        ptx = build(kernel, constants, warps, own)
        assert not dots or "mma" in ptx, f"{kernel} does not use the tensor cores"
