"""draft head: the head in 4 bits, for drafting only. No output depends on it, only acceptance.

    logits_v = Σ_g s_{v,g} · (Σ_{k in g} q_{v,k} · x_k) · s_x

Weights are signed 4-bit integers with one fp16 scale for each row and group of 128; the scale of a
group is that of a few tried which errs least. A draft's row is rounded to int8 with one scale. A
group's sum is of integers, exact in any order; groups are added in ascending order in fp32. The
two nibbles of a byte belong to neighbouring groups, and either one, moved to the upper half of the
byte, is a signed 8-bit integer sixteen times too large: no conversion is left to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.tiling import INTERPRETED, NARROW, early, ready, tile_for, up2

GROUP = 128
# A step of the sum is one group in the low nibbles and one in the high ones.
STEP = 2 * GROUP
# A little saturation costs less than coarse steps: shares of the group's largest value.
_SHARES = (1.0, 0.9, 0.8, 0.7)
# Rows packed at once, which bounds the memory of loading.
_PACKED_AT_ONCE = 8192
_PLAIN = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class DraftHead:
    """packed [V, K / 2] int8; scales [K / 128, V] fp16, a sixteenth of the groups' own."""

    packed: Tensor
    scales: Tensor


def can_pack(head: Tensor) -> bool:
    """Whether a head [V, K] divides into steps."""
    return head.shape[1] % STEP == 0


def pack(head: Tensor) -> DraftHead:
    """A head [V, K] in 4 bits."""
    parts = [_pack(rows) for rows in head.split(_PACKED_AT_ONCE)]
    packed, scales = zip(*parts, strict=True)
    return DraftHead(torch.cat(packed), torch.cat(scales, dim=1).contiguous())


def _pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    groups = rows.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
    best = torch.full_like(largest, torch.inf)
    scale = largest
    for share in _SHARES:
        tried = (largest * share / 7).half().float()
        error = (groups - _rounded(groups, tried) * tried).square().sum(-1, keepdim=True)
        scale = torch.where(error < best, tried, scale)
        best = torch.minimum(best, error)
    q = _rounded(groups, scale).to(torch.int8)
    low, high = q[:, 0::2], q[:, 1::2]
    return ((low & 15) | (high << 4)).flatten(1), (scale[..., 0].t() / 16).half()


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).round_().clamp_(-8, 7)


@triton.jit
def _low(word):
    if _PLAIN:
        return word << 4
    return tl.inline_asm_elementwise(
        "{.reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0;}",
        "=r,r", [word], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _high(word):
    if _PLAIN:
        return word & -16
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [word], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def _quantise_kernel(x, y, scale, size: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, block)
    ready(pdl)
    values = tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(values), axis=0) / 127, 1e-30)
    tl.store(y + row * size + at, tl.floor(values / step + 0.5).to(tl.int8), mask=at < size)
    tl.store(scale + row, step)


@triton.jit(do_not_specialize=["n"])
def _draft_head_kernel(
    x, scale, packed, scales, y, n, n_outs,
    size: tl.constexpr, group: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * block + tl.arange(0, block)
    rows = tl.program_id(1) * tile + tl.arange(0, tile)
    live, real = rows < n, outs < n_outs
    half = tl.arange(0, group)
    acc = tl.zeros((block, tile), dtype=tl.float32)
    ready(pdl)
    for step in range(0, size, 2 * group):
        at = outs[:, None].to(tl.int64) * (size // 2) + step // 2 + half[None, :]
        word = tl.load(packed + at, mask=real[:, None], other=0)
        own = x + rows[None, :] * size + step + half[:, None]
        low = tl.dot(_low(word), tl.load(own, mask=live[None, :], other=0), out_dtype=tl.int32)
        own += group
        high = tl.dot(_high(word), tl.load(own, mask=live[None, :], other=0), out_dtype=tl.int32)
        line = scales + (step // group) * n_outs + outs
        acc += low.to(tl.float32) * tl.load(line, mask=real, other=0.0).to(tl.float32)[:, None]
        line += n_outs
        acc += high.to(tl.float32) * tl.load(line, mask=real, other=0.0).to(tl.float32)[:, None]
    acc *= tl.load(scale + rows, mask=live, other=0.0)[None, :]
    to = y + rows[None, :].to(tl.int64) * n_outs + outs[:, None]
    tl.store(to, acc, mask=live[None, :] & real[:, None])


def draft_logits(x: Tensor, head: DraftHead) -> Tensor:
    """Rows [n, K] → logits [n, V] fp32."""
    n, size = x.shape
    outs = len(head.packed)
    rows = torch.empty((n, size), dtype=torch.int8, device=x.device)
    scale = torch.empty(n, dtype=torch.float32, device=x.device)
    y = torch.empty((n, outs), dtype=torch.float32, device=x.device)
    _quantise_kernel[(n,)](
        x.contiguous(), rows, scale, size=size, block=up2(size), num_warps=4, **early(x.device)
    )
    tile, block = max(NARROW, tile_for(n)), 64
    _draft_head_kernel[(triton.cdiv(outs, block), triton.cdiv(n, tile))](
        rows, scale, head.packed, head.scales, y, n, outs,
        size=size, group=GROUP, tile=tile, block=block,
        num_warps=4, num_stages=3, **early(x.device),
    )  # fmt: skip
    return y
