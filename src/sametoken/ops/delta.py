"""delta: causal convolution, gated DeltaNet recurrence and gated norm, token by token.

For one row with projection [u ; b ; a ; z], the last K−1 values of u before it, and state S:

    y = silu(Σ_j w_j ⊙ u_{t−K+1+j})             q, k, v = split(y)
    β = σ(b)    g = A · softplus(a + dt)         A = −exp(A_log)
    q̂ = q / √(Σq² + 1e−6) / √Dk                  k̂ = k / √(Σk² + 1e−6)
    S ← e^g S    d = β (v − Sᵀ k̂)    S ← S + k̂ dᵀ    o = Sᵀ q̂
    out = norm(o) ⊙ silu(z)

Shapes: u [C] with C = 2·Hk·Dk + Hv·Dv (all queries, all keys, all values); b, a [Hv]; z [Hv·Dv];
S [Hv, Dk, Dv]; conv w [K, C]; value head j reads key head j // (Hv / Hk). out [Hv·Dv].
Arithmetic: S and everything between the convolution and the norm in fp32; y, σ(b) and out are
rounded to the row's dtype, as is the normed o before its weight.
Past: the row at position p leaves (u, b, a) at index p % RING of its sequence's ring, as keys and
values are written at their position. The convolution reads positions p−K+1..p−1; those before the
sequence began count as zero and are never read. A pass writes its rows from position
start + certain − (K−1) on, as no earlier one can be needed again, and takes its own rows from the
projection. Where replay + K − 1 + certain + drafts exceeds RING, as in a long prompt, a row written
may fall on one that is read: whoever writes waits until everybody has read.
Rewind: S only ever holds rows that stay. Draft rows run on a copy; the accepted ones, at positions
start − replay..start − 1, are replayed from the ring at the start of the next pass, the rejected
ones are overwritten.
Promised: a row's bits depend on that row and the rows before it in its own sequence. The chunked
form of the recurrence rounds differently and is never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.config import DeltaShape
from sametoken.ops.norm import Norm, norm_row
from sametoken.rows import Rows, Span, alone

# Of the family's definition; not the config's rms_norm_eps.
UNIT_EPS = 1e-6
# A pass reads at most replay + K − 1 rows before its start and writes at most K − 1 + drafts. With
# drafts of 16 and K = 4 that is 19 and 19, and while decoding no row written may fall on one that
# is read: 38 at least. A power of two makes p % RING a mask.
RING = 64


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """conv [K, C]; decay = −exp(A_log) [Hv] fp32; dt_bias [Hv] fp32; norm over Dv."""

    shape: DeltaShape
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Norm


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """One layer's recurrent state: state [slots, Hv, Dk, Dv] fp32, and the rings
    recent [slots, RING, C + 2·Hv]: (u, b, a) of the row at position p at index p % RING.
    """

    state: Tensor
    recent: Tensor


def recall(ring: Tensor, first: int, stop: int) -> Tensor:
    """The rows at positions first..stop−1 of a ring [RING, …]; zeros before position 0."""
    began = max(first, 0)
    blank = ring.new_zeros((began - first, ring.shape[1]))
    return torch.cat((blank, ring[_places(began, stop)]))


def past(ring: Tensor, span: Span, kept: int) -> Tensor:
    """What lies before a span's own rows: the convolution's window, then the rows to replay."""
    return recall(ring, span.start - span.replay - kept, span.start)


def leave(ring: Tensor, span: Span, block: Tensor, kept: int) -> None:
    """Write those rows of a span's block [width, …] that a later pass may need."""
    skipped = max(0, span.certain - kept)
    ring[_places(span.start + skipped, span.start + span.width)] = block[skipped:, : ring.shape[1]]


def _places(first: int, stop: int) -> list[int]:
    return [position % RING for position in range(first, stop)]


def absorb(entry: Tensor, window: Tensor, state: Tensor, w: DeltaWeights) -> tuple[Tensor, Tensor]:
    """One row into the state: entry [C + 2·Hv], window [K−1, C + 2·Hv] → q̂ [Hv, Dk], new state."""
    shape, channels = w.shape, w.shape.conv_channels
    taps = torch.cat((window[:, :channels], entry[None, :channels]))
    mixed = F.silu((taps.float() * w.conv).sum(0)).to(entry.dtype).float()
    key_width = 2 * shape.key_heads * shape.key_dim
    q, k = _keys(mixed[:key_width], shape)
    b, a = entry[channels:].chunk(2)
    keep = torch.exp(w.decay * F.softplus(a.float() + w.dt_bias))
    state = state * keep[:, None, None]
    seen = torch.bmm(k[:, None], state)
    change = (mixed[key_width:].view(seen.shape) - seen) * torch.sigmoid(b).float()[:, None, None]
    return q, torch.baddbmm(state, k[:, :, None], change)


def _keys(mixed: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor]:
    """All queries, all keys [2·Hk·Dk] → q̂ and k̂ [Hv, Dk], repeated for their value heads."""
    size, group = shape.key_dim, shape.value_heads // shape.key_heads
    # x / √(Σx² + ε) is an RMS norm with ε / Dk, divided by √Dk.
    normed = F.rms_norm(mixed.view(-1, size), (size,), eps=UNIT_EPS / size) * size**-0.5
    q, k = normed.repeat_interleave(group, 0).chunk(2)
    return q * size**-0.5, k


def emit(q: Tensor, z: Tensor, state: Tensor, w: DeltaWeights) -> Tensor:
    """What one row reads from the updated state: q̂ [Hv, Dk], z [Hv·Dv] → [Hv·Dv]."""
    read = torch.bmm(q[:, None], state)[:, 0].to(z.dtype)
    normed = norm_row(read, w.norm)
    return (normed.float() * F.silu(z.float()).view_as(normed)).to(z.dtype).flatten()


class _Tape:
    """One sequence's state as rows are played onto it."""

    def __init__(self, window: Tensor, state: Tensor, w: DeltaWeights) -> None:
        self.window, self.state, self.w = window, state, w

    def play(self, entry: Tensor) -> Tensor:
        """Absorb one logged row; returns its q̂."""
        q, self.state = absorb(entry, self.window, self.state, self.w)
        self.window = torch.cat((self.window[1:], entry[None]))
        return q

    def run(self, projections: Tensor) -> list[Tensor]:
        """Absorb whole rows [n, u ; b ; a ; z]; returns their outputs."""
        logged = self.window.shape[1]
        return [
            emit(self.play(row[:logged]), row[logged:], self.state, self.w)
            for row in alone(projections)
        ]


def delta(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, rows: Rows) -> Tensor:
    """[n, C + 2·Hv + Hv·Dv] → [n, Hv·Dv]; advances each span's state by its certain rows."""
    kept = w.shape.conv_kernel - 1
    out: list[Tensor] = []
    for span, block in rows.blocks(projection):
        ring = layer.recent[span.slot]
        before = past(ring, span, kept)
        tape = _Tape(before[:kept], layer.state[span.slot].clone(), w)
        for entry in alone(before[kept:]):
            tape.play(entry)
        out += tape.run(block[: span.certain])
        layer.state[span.slot] = tape.state
        out += tape.run(block[span.certain :])
        leave(ring, span, block, kept)
    return torch.stack(out) if out else projection[:, :0]
