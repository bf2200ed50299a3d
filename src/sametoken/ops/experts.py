"""experts: norm, gate, up and SiLU of the chosen experts and of the shared one.

    inner_j = silu(gate_e norm(x)) ⊙ (up_e norm(x))   for slot j with expert e

Shapes: x [H]; gate_up [E, 2I, H] (rows 0..I−1 gate, I..2I−1 up); shared_gate_up [2Is, H];
routed [k, I] in slot order, shared [Is].
Arithmetic: as in glu, with r · (gate_e · round(x ⊙ w)) for gate_e norm(x), each (row, expert) pair
alone; rounded once, before the down projection. The norm is the router's.
Promised: a pair's bits depend on that row, the norm and that expert alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.ops.glu import gated
from sametoken.ops.norm import Norm
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


def experts_row(x: Tensor, norm: Norm, chosen: Tensor, gate_up: Tensor) -> Tensor:
    """One row: [H] and experts [k] → [k, I]."""
    return torch.stack([gated(x, norm, gate_up[e]) for e in chosen.tolist()])


def experts(x: Tensor, norm: Norm, routing: Routing, w: ExpertWeights) -> Inner:
    """[n, H] → routed [n, k, I] and shared [n, Is]."""
    rows, chosen = alone(x), routing.experts.unbind()
    routed = [experts_row(row, norm, e, w.gate_up) for row, e in zip(rows, chosen, strict=True)]
    shared = None
    if w.shared_gate_up is not None:
        shared = torch.stack([gated(row, norm, w.shared_gate_up) for row in rows])
    return Inner(torch.stack(routed), shared)
