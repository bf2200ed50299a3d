"""inspect: what a checkpoint is, without reading its weights.

Names and shapes are checked by the very tables that loading uses, on tensors without storage.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.checkpoint import Checkpoint
from sametoken.config import Mixer
from sametoken.weights import (
    AttentionMixer,
    DeltaMixer,
    DenseMlp,
    Layer,
    MoeMlp,
    MtpWeights,
    Weights,
    read_weights,
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """bytes and counts of a checkpoint.

    `active_bytes` are the weights that plain decoding reads for one token: every layer with only
    its chosen experts, and the head; the state of the sequence comes on top. `mtp` is "present",
    "absent", or what is wrong with the head.
    """

    model_type: str
    layers: int
    attention_layers: int
    delta_layers: int
    hidden_size: int
    vocab_size: int
    experts: int
    experts_per_token: int
    context: int
    formats: dict[str, int]
    parameters: int
    file_bytes: int
    active_bytes: int
    mtp: str
    mtp_bytes: int


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Raises `CheckpointError` where loading would."""
    config = checkpoint.config
    formats = Counter(_format(checkpoint.dtype(name)) for name in checkpoint.names)
    weights = read_weights(checkpoint, checkpoint.main_dtype, torch.device("meta"))
    mtp = "absent" if weights.mtp is None else "present"
    return Inspection(
        model_type=config.model_type,
        layers=config.layers,
        attention_layers=config.mixers.count(Mixer.ATTENTION),
        delta_layers=config.mixers.count(Mixer.DELTA),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        experts=config.moe.experts if config.moe else 0,
        experts_per_token=config.moe.top_k if config.moe else 0,
        context=config.max_positions,
        formats=dict(formats.most_common()),
        parameters=sum(torch.Size(checkpoint.shape(n)).numel() for n in checkpoint.names),
        file_bytes=checkpoint.nbytes,
        active_bytes=active_bytes(weights),
        mtp=weights.mtp_problem or mtp,
        mtp_bytes=_mtp_bytes(weights.mtp),
    )


def _format(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def active_bytes(weights: Weights) -> int:
    """Bytes of weights that plain decoding reads for one token."""
    row = weights.embed[:1]
    layers = sum(_layer_bytes(layer, chosen_only=True) for layer in weights.layers)
    return layers + _bytes(row, weights.norm.weight, weights.head)


def _mtp_bytes(mtp: MtpWeights | None) -> int:
    if mtp is None:
        return 0
    norms = (mtp.norm_embedding.weight, mtp.norm_hidden.weight, mtp.norm.weight)
    return _bytes(mtp.fc, *norms) + _layer_bytes(mtp.layer, chosen_only=False)


def _layer_bytes(layer: Layer, *, chosen_only: bool) -> int:
    match layer.mixer:
        case AttentionMixer() as w:
            mixer = _bytes(w.norm.weight, w.inputs, w.heads.q.weight, w.heads.k.weight, w.out)
        case DeltaMixer() as w:
            d = w.delta
            small = (w.norm.weight, d.conv, d.decay, d.dt_bias, d.norm.weight)
            mixer = _bytes(w.inputs, w.out, *small)
    match layer.mlp:
        case DenseMlp() as dense:
            return mixer + _bytes(dense.norm.weight, dense.gate_up, dense.down)
        case MoeMlp() as moe:
            return mixer + _moe_bytes(moe, chosen_only=chosen_only)


def _moe_bytes(moe: MoeMlp, *, chosen_only: bool) -> int:
    experts = moe.experts
    chosen = moe.router.top_k if chosen_only else len(experts.gate_up)
    shared = (experts.shared_gate_up, experts.shared_down)
    always = (moe.router.norm.weight, moe.router.gate, *(t for t in shared if t is not None))
    return _bytes(experts.gate_up[:chosen], experts.down[:chosen], *always)


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
