"""delta: causal convolution, gated DeltaNet recurrence and gated norm, token by token.

For one row with projection [u ; b ; a ; z], the window of the last K−1 values of u, and state S:

    y = silu(Σ_j w_j ⊙ u_{t−K+1+j})             q, k, v = split(y)
    β = σ(b)    g = A · softplus(a + dt)         A = −exp(A_log)
    q̂ = q / √(Σq² + 1e−6) / √Dk                  k̂ = k / √(Σk² + 1e−6)
    S ← e^g S    d = β (v − Sᵀ k̂)    S ← S + k̂ dᵀ    o = Sᵀ q̂
    out = norm(o) ⊙ silu(z)

Shapes: u [C] with C = 2·Hk·Dk + Hv·Dv (all queries, all keys, all values); b, a [Hv]; z [Hv·Dv];
S [Hv, Dk, Dv]; conv w [K, C]; value head j reads key head j // (Hv / Hk). out [Hv·Dv].
Arithmetic: S and everything between the convolution and the norm in fp32; y, σ(b) and out are
rounded to the row's dtype, as is the normed o before its weight.
Rewind: S only ever holds rows that stay. Draft rows run on a copy and leave (u, b, a) in a log
behind the convolution window; the accepted ones are replayed from it at the start of the next pass.
Promised: a row's bits depend on that row and the rows before it in its own sequence. The chunked
form of the recurrence rounds differently and is never used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.config import DeltaShape
from sametoken.ops.norm import Norm, norm_row
from sametoken.rows import Rows, alone

# Of the family's definition; not the config's rms_norm_eps.
_UNIT_EPS = 1e-6


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
    """One layer's recurrent state: state [slots, Hv, Dk, Dv] fp32, and
    recent [slots, K − 1 + longest draft, C + 2·Hv]: the window, then the log of draft rows.
    """

    state: Tensor
    recent: Tensor


def absorb(entry: Tensor, window: Tensor, state: Tensor, w: DeltaWeights) -> tuple[Tensor, Tensor]:
    """One row into the state: entry [C + 2·Hv], window [K−1, C + 2·Hv] → q̂ [Hv, Dk], new state."""
    shape, channels = w.shape, w.shape.conv_channels
    taps = torch.cat((window[:, :channels], entry[None, :channels]))
    mixed = F.silu((taps.float() * w.conv).sum(0)).to(entry.dtype).float()
    key_width = shape.key_heads * shape.key_dim
    q, k, v = torch.split(mixed, [key_width, key_width, shape.value_heads * shape.value_dim])
    q = _unit(q.view(-1, shape.key_dim)) * shape.key_dim**-0.5
    k = _unit(k.view(-1, shape.key_dim))
    b, a = entry[channels:].chunk(2)
    beta = torch.sigmoid(b).float()
    keep = torch.exp(w.decay * F.softplus(a.float() + w.dt_bias))
    group = shape.value_heads // shape.key_heads
    q, k = q.repeat_interleave(group, 0), k.repeat_interleave(group, 0)
    state = state * keep[:, None, None]
    seen = torch.bmm(k[:, None], state)[:, 0]
    change = beta[:, None] * (v.view(-1, shape.value_dim) - seen)
    return q, torch.baddbmm(state, k[:, :, None], change[:, None])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)


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

    def run(self, projections: Iterable[Tensor]) -> list[Tensor]:
        """Absorb whole rows [u ; b ; a ; z]; returns their outputs."""
        logged = self.window.shape[1]
        out = []
        for row in projections:
            entry, z = alone(row[:logged]), alone(row[logged:])
            out.append(emit(self.play(entry), z, self.state, self.w))
        return out


def delta(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, rows: Rows) -> Tensor:
    """[n, C + 2·Hv + Hv·Dv] → [n, Hv·Dv]; advances each span's state by its certain rows."""
    kept = w.shape.conv_kernel - 1
    out: list[Tensor] = []
    for span, block in rows.blocks(projection):
        recent = layer.recent[span.slot]
        tape = _Tape(alone(recent[:kept]), alone(layer.state[span.slot]), w)
        for entry in recent[kept : kept + span.replay]:
            tape.play(alone(entry))
        out += tape.run(block[: span.certain])
        layer.state[span.slot] = tape.state
        recent[:kept] = tape.window
        drafts = block[span.certain :]
        recent[kept : kept + span.drafts] = drafts[:, : recent.shape[1]]
        out += tape.run(drafts)
    return torch.stack(out) if out else projection[:, :0]
