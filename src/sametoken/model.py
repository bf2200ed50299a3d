"""The trunk: token ids → hidden rows, written with ops only.

    x = embed(ids)
    x = x + mixer(norm(x));  x = x + mlp(norm(x))      for every layer
    hidden = norm(x)

Nothing here knows how many rows there are or which of them are drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.cache import Cache
from sametoken.config import AttentionShape, ModelConfig
from sametoken.ops import Ops
from sametoken.ops.attention import KvLayer
from sametoken.ops.delta import DeltaLayer
from sametoken.ops.qkv import Rope
from sametoken.rows import Rows
from sametoken.weights import AttentionMixer, DeltaMixer, DenseMlp, Layer, MoeMlp, Weights


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, the ops that run them, and the angles of every position of the context."""

    config: ModelConfig
    weights: Weights
    ops: Ops
    rope: Rope
    dtype: torch.dtype
    device: torch.device

    def hidden(self, ids: Tensor, rows: Rows, cache: Cache) -> Tensor:
        """ids [n] → the post-final-norm hidden [n, H], which the head and the MTP layer read."""
        w = self.weights
        x = self.ops.embed(ids, w.embed, self.dtype)
        kv, delta = iter(cache.kv), iter(cache.delta)
        for layer in w.layers:
            state = next(kv) if isinstance(layer.mixer, AttentionMixer) else next(delta)
            x = self.layer(x, layer, state, rows)
        return self.ops.norm(x, w.norm)

    def delta_mixers(self) -> list[DeltaMixer]:
        """The mixers with recurrent state, in the order of `Cache.delta`."""
        return [w.mixer for w in self.weights.layers if isinstance(w.mixer, DeltaMixer)]

    def layer(self, x: Tensor, w: Layer, state: KvLayer | DeltaLayer, rows: Rows) -> Tensor:
        """One decoder layer with its own state: [n, H] → [n, H]."""
        match w.mixer, state:
            case AttentionMixer() as mixer, KvLayer() as kv:
                x = attention(self.ops, x, mixer, self.config.attention, self.rope, kv, rows)
            case DeltaMixer() as mixer, DeltaLayer() as recurrent:
                x = delta(self.ops, x, mixer, recurrent, rows)
            case _:
                raise TypeError("a layer met the state of another kind of layer")
        return mlp(self.ops, x, w.mlp)


def attention(
    ops: Ops,
    x: Tensor,
    w: AttentionMixer,
    shape: AttentionShape,
    rope: Rope,
    kv: KvLayer,
    rows: Rows,
) -> Tensor:
    """x + W_o attention(…): [n, H] → [n, H]."""
    projection = ops.linear(x, w.inputs, norm=w.norm)
    q, gate = ops.qkv(projection, shape, w.heads, rope, kv, rows)
    return ops.linear(ops.attention(q, gate, kv, rows), w.out, residual=x)


def delta(ops: Ops, x: Tensor, w: DeltaMixer, state: DeltaLayer, rows: Rows) -> Tensor:
    """x + W_o delta(…): [n, H] → [n, H]."""
    projection = ops.linear(x, w.inputs, norm=w.norm)
    return ops.linear(ops.delta(projection, w.delta, state, rows), w.out, residual=x)


def mlp(ops: Ops, x: Tensor, w: DenseMlp | MoeMlp) -> Tensor:
    """x + mlp(norm(x)): [n, H] → [n, H]."""
    if isinstance(w, DenseMlp):
        return ops.linear(ops.glu(x, w.norm, w.gate_up), w.down, residual=x)
    routing = ops.router(x, w.router)
    inner = ops.experts(x, w.router.norm, routing, w.experts)
    return ops.combine(inner, routing, w.experts, x)
