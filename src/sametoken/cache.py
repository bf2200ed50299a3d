"""What a sequence leaves behind: pages of keys and values, and recurrent state.

Keys, values and the rings of the convolutions rewind by length: what lies beyond it is overwritten
or never read. Recurrent state rewinds because it only ever absorbs rows that stay (see ops/delta).
A sequence holds a slot (its recurrent state and rings) and enough pages for the longest it may
become; both are given back when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.config import DeltaShape, Mixer, ModelConfig
from sametoken.errors import CheckpointError
from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.delta import RING, DeltaLayer, recall


@dataclass(frozen=True, slots=True)
class Lease:
    """One sequence's place: its slot and its pages, `PAGE` positions each."""

    slot: int
    pages: tuple[int, ...]


class Cache:
    """State of up to `slots` sequences of up to `context` positions each.

    `kv` has one layer per full-attention layer of the trunk, then the MTP head's if there is one;
    `delta` one per DeltaNet layer. `longest_draft` bounds the draft rows of a sequence in one pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        context: int,
        longest_draft: int,
        with_mtp: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        pages = slots * pages_for(context)
        self._trunk_kv = config.mixers.count(Mixer.ATTENTION)
        attention = self._trunk_kv + (1 if with_mtp else 0)
        shape = config.attention
        page = (pages, shape.kv_heads, PAGE, shape.head_dim)
        # Left unwritten on purpose: a system that commits memory on first touch pays for what is
        # used, and no op may read a position that was never written.
        self.kv = tuple(
            KvLayer(*(torch.empty(page, dtype=dtype, device=device) for _ in "kv"))
            for _ in range(attention)
        )
        self.delta = tuple(
            _delta_layer(_fitting(config.delta, longest_draft), slots, dtype, device)
            for _ in range(config.mixers.count(Mixer.DELTA))
        )
        self._window = config.delta.conv_kernel - 1 if config.delta else 0
        self.context, self.longest_draft = context, longest_draft
        self._free_slots = list(reversed(range(slots)))
        self._free_pages = list(reversed(range(pages)))

    def lease(self, positions: int) -> Lease | None:
        """A fresh place for a sequence of at most `positions`, or None while there is no room."""
        count = pages_for(positions)
        if not self._free_slots or count > len(self._free_pages):
            return None
        slot = self._free_slots.pop()
        for layer in self.delta:
            layer.state[slot] = 0
        return Lease(slot, tuple(self._free_pages.pop() for _ in range(count)))

    def extend(self, lease: Lease, positions: int) -> Lease | None:
        """The same place with room for `positions`, or None while there is none."""
        missing = max(0, pages_for(positions) - len(lease.pages))
        if missing > len(self._free_pages):
            return None
        more = tuple(self._free_pages.pop() for _ in range(missing))
        return Lease(lease.slot, lease.pages + more)

    def release(self, lease: Lease) -> None:
        """Give a place back; the lease must not be used again."""
        self._free_slots.append(lease.slot)
        self._free_pages += reversed(lease.pages)

    def snapshot(self, lease: Lease, length: int) -> list[Tensor]:
        """Copies of all a sequence of `length` computed rows has left in the trunk's layers:
        keys and values by position, recurrent state and convolution window. For comparing.
        """
        parts = [
            _by_position(pool, lease, length)
            for kv in self.kv[: self._trunk_kv]
            for pool in (kv.k, kv.v)
        ]
        for layer in self.delta:
            window = recall(layer.recent[lease.slot], length - self._window, length)
            parts += [layer.state[lease.slot].clone(), window]
        return parts


def _by_position(pool: Tensor, lease: Lease, length: int) -> Tensor:
    """[pages, Nkv, PAGE, D] → one sequence's [Nkv, length, D]."""
    return torch.cat([pool[page] for page in lease.pages], dim=1)[:, :length]


def pages_for(positions: int) -> int:
    """Pages that hold `positions`."""
    return -(-positions // PAGE)


def _fitting(shape: DeltaShape | None, longest_draft: int) -> DeltaShape:
    """The shape, if a pass's reads and writes fit its ring side by side (see ops/delta)."""
    assert shape is not None, "a linear_attention layer without a DeltaNet shape"
    side = longest_draft + shape.conv_kernel - 1
    if 2 * side > RING:
        raise CheckpointError(
            f"a convolution over {shape.conv_kernel} rows with drafts of up to {longest_draft} "
            f"needs {2 * side} rows of its past, and {RING} are kept."
        )
    return shape


def _delta_layer(
    shape: DeltaShape, slots: int, dtype: torch.dtype, device: torch.device
) -> DeltaLayer:
    state = (slots, shape.value_heads, shape.key_dim, shape.value_dim)
    logged = shape.conv_channels + 2 * shape.value_heads
    return DeltaLayer(
        torch.zeros(state, dtype=torch.float32, device=device),
        # Unwritten, as keys and values are, and for the same reason.
        torch.empty((slots, RING, logged), dtype=dtype, device=device),
    )
