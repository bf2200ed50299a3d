"""experts: gate, up and SiLU of the chosen experts and of the shared one.

    inner_j = silu(gate_e x) ⊙ (up_e x)   for slot j with expert e

Shapes: h [H]; gate_up [E, 2I, H] (rows 0..I−1 gate, I..2I−1 up); shared_gate_up [2Is, H];
routed [k, I] in slot order, shared [Is].
Arithmetic: as in glu, each (row, expert) pair alone; rounded once, before the down projection.
Promised: a pair's bits depend on that row and that expert alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops.glu import gated
from sametoken.ops.linear import dot
from sametoken.ops.router import Routing
from sametoken.rows import alone


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """gate_up [E, 2I, H], down [E, H, I]; the shared pair [2Is, H], [H, Is] or None."""

    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None
    shared_down: Tensor | None


class Inner(NamedTuple):
    """What the down projections read: routed [n, k, I], shared [n, Is] or None."""

    routed: Tensor
    shared: Tensor | None


def experts_row(h: Tensor, chosen: Tensor, gate_up: Tensor) -> Tensor:
    """One row: [H] and experts [k] → [k, I]."""
    gate, up = torch.stack([dot(gate_up[e], h) for e in chosen.tolist()]).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(h.dtype)


def experts(h: Tensor, routing: Routing, w: ExpertWeights) -> Inner:
    """[n, H] → routed [n, k, I] and shared [n, Is]."""
    rows, chosen = alone(h), routing.experts.unbind()
    routed = [experts_row(row, e, w.gate_up) for row, e in zip(rows, chosen, strict=True)]
    shared = None
    if w.shared_gate_up is not None:
        shared = torch.stack([gated(row, w.shared_gate_up) for row in rows])
    return Inner(torch.stack(routed), shared)
