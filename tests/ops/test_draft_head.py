"""The 4-bit head is near the head it copies, and a row's logits are its own."""

from __future__ import annotations

import torch

from sametoken.ops.draft_head_triton import GROUP, STEP, draft_logits, pack
from sametoken.ops.tiling import INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A block of the kernel and a part of one; two steps of the sum.
VOCABULARY, HIDDEN = 72, 2 * STEP
# Errors of rounding to 4 bits, in steps of the largest of a group over 7: 1/√12 of 2.3 deviations.
ERROR = 0.12


def _head() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def _rows(n: int) -> torch.Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(4)).to(DEVICE)


def test_the_logits_are_near_the_heads() -> None:
    head, x = _head(), _rows(5)
    wanted = x @ head.t()
    found = draft_logits(x, pack(head))
    assert (found - wanted).norm() < ERROR * wanted.norm()


def test_the_logits_are_those_of_the_packed_values() -> None:
    head, x = _head(), _rows(3)
    packed = pack(head)
    nibbles = packed.packed.view(VOCABULARY, -1, GROUP)
    low, high = (nibbles << 4) >> 4, nibbles >> 4
    signed = torch.stack((low, high), 2).flatten(1, 2).double()
    weights = signed * 16 * packed.scales.t()[:, :, None].double()
    step = x.abs().amax(1, keepdim=True).double() / 127
    rounded = torch.floor(x.double() / step + 0.5)
    wanted = rounded @ weights.flatten(1).t() * step
    torch.testing.assert_close(draft_logits(x, packed).double(), wanted, rtol=1e-4, atol=1e-3)


def test_a_row_alone_has_the_same_logits() -> None:
    packed, x = pack(_head()), _rows(3 if INTERPRETED else 40)
    together = draft_logits(x, packed)
    for i, row in enumerate(x):
        assert torch.equal(draft_logits(row[None], packed)[0], together[i])
