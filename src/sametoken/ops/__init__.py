"""The only door from the models to arithmetic.

Each op has one home, `ops/<name>.py`: the contract in its docstring, then the one-row reference.
A backend is one implementation of every op, chosen once per engine and never by the shape of a
pass. The law every op keeps: a row's bits are a function of that row's input, the weights and its
own sequence's past; never of how many rows ride along, of its index, or of its company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from sametoken.config import AttentionShape
from sametoken.ops.attention import KvLayer
from sametoken.ops.delta import DeltaLayer, DeltaWeights
from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.norm import Norm
from sametoken.ops.qkv import HeadNorms, Rope
from sametoken.ops.router import RouterWeights, Routing
from sametoken.rows import Rows
from sametoken.sampling import Ask, Picked

# Backend → where the function named after the op lives.
BACKENDS = {
    "reference": "sametoken.ops.{op}",
    "cpu": "sametoken.ops.{op}_cpu",
    "triton": "sametoken.ops.{op}_triton",
}


class Linear(Protocol):
    """[n, K] → [n, N], with an optional norm before and an optional residual after."""

    def __call__(  # noqa: D102
        self,
        x: Tensor,
        weight: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """Every op of one backend, by name; `ops/<field>.py` tells what it means."""

    backend: str
    embed: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    norm: Callable[[Tensor, Norm], Tensor]
    linear: Linear
    qkv: Callable[
        [Tensor, AttentionShape, HeadNorms, Rope, KvLayer, Rows], tuple[Tensor, Tensor | None]
    ]
    attention: Callable[[Tensor, Tensor | None, KvLayer, Rows], Tensor]
    delta: Callable[[Tensor, DeltaWeights, DeltaLayer, Rows], Tensor]
    glu: Callable[[Tensor, Norm, Tensor], Tensor]
    router: Callable[[Tensor, RouterWeights], Routing]
    experts: Callable[[Tensor, Norm, Routing, ExpertWeights], Inner]
    combine: Callable[[Inner, Routing, ExpertWeights, Tensor], Tensor]
    pick: Callable[[Tensor, Tensor, Sequence[Ask]], list[Picked]]


OP_NAMES = tuple(field.name for field in fields(Ops) if field.name != "backend")


def load_ops(backend: str) -> Ops:
    """The ops of a backend named in `BACKENDS`; imports only that backend's modules."""
    home = BACKENDS[backend]
    functions = {op: getattr(import_module(home.format(op=op)), op) for op in OP_NAMES}
    return Ops(backend=backend, **functions)
