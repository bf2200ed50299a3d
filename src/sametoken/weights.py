"""Tensor names → the records the ops read. Every tensor of a checkpoint is used exactly once.

One table per part of the architecture, in the names of Hugging Face checkpoints. Everything that
loading changes happens here: projections that share an input are stacked, zero-centred norms get
their 1, split experts are fused, small vectors become fp32. The forward pass does no name surgery.
On the "meta" device nothing is read: the same tables then check names and shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sametoken.config import Mixer, ModelConfig
from sametoken.errors import CheckpointError
from sametoken.ops.delta import DeltaWeights
from sametoken.ops.experts import ExpertWeights
from sametoken.ops.norm import Norm
from sametoken.ops.qkv import HeadNorms
from sametoken.ops.router import RouterWeights


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """inputs [q (and gate) ; k ; v, H], out [H, Nq·D]."""

    norm: Norm
    inputs: Tensor
    heads: HeadNorms
    out: Tensor


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """inputs [u ; b ; a ; z, H], out [H, Hv·Dv]."""

    norm: Norm
    inputs: Tensor
    delta: DeltaWeights
    out: Tensor


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """gate_up [2I, H], down [H, I]."""

    norm: Norm
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """Router (with the norm before it) and experts."""

    router: RouterWeights
    experts: ExpertWeights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    mixer: AttentionMixer | DeltaMixer
    mlp: DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The multi-token-prediction head: fc [H, 2H] over [embedding ; hidden], one layer, a norm."""

    norm_embedding: Norm
    norm_hidden: Norm
    fc: Tensor
    layer: Layer
    norm: Norm


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. `mtp` is None without a usable head; `mtp_problem` then says why if the
    checkpoint led one to expect it.
    """

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: Tensor
    mtp: MtpWeights | None
    mtp_problem: str | None


class MissingTensor(CheckpointError):
    """A tensor the architecture needs is not in the checkpoint."""


class Tensors(Protocol):
    """What a checkpoint is to this module: a config and named tensors."""

    @property
    def folder(self) -> object: ...  # noqa: D102 - named in errors
    @property
    def config(self) -> ModelConfig: ...  # noqa: D102
    @property
    def names(self) -> frozenset[str]: ...  # noqa: D102
    def shape(self, name: str) -> tuple[int, ...]: ...  # noqa: D102
    def dtype(self, name: str) -> torch.dtype: ...  # noqa: D102
    def tensor(self, name: str) -> Tensor: ...  # noqa: D102


def read_weights(checkpoint: Tensors, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read a checkpoint into records, matrices in `dtype`.

    Raises `CheckpointError` for a missing, surplus or misshapen tensor. A missing or incomplete
    MTP head is not an error here: it is reported in `Weights.mtp_problem`.
    """
    take = _Take(checkpoint, dtype, device)
    config = checkpoint.config
    trunk = next((p for p in _TRUNK_PREFIXES if take.any_under(p)), _TRUNK_PREFIXES[-1])
    embed = take.matrix(f"{trunk}embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(take, f"{trunk}layers.{i}.", i) for i in range(config.layers))
    norm = take.norm(f"{trunk}norm.weight", config.hidden_size)
    if config.tied_head:
        head = embed
        take.skip("lm_head.")
    else:
        head = take.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    mtp, problem = _read_mtp(take)
    for prefix in _SKIPPED_PREFIXES:
        take.skip(prefix)
    take.finish()
    return Weights(embed, layers, norm, head, mtp, problem)


# The multimodal wrapper nests the text model; vision is not part of this engine.
_TRUNK_PREFIXES = ("model.language_model.", "model.")
_SKIPPED_PREFIXES = ("model.visual.", "visual.")
# Some re-exports keep the head under the model.
_MTP_PREFIXES = ("mtp.", "model.mtp.")


class _Take:
    """Hands each tensor out once, with its shape checked."""

    def __init__(self, checkpoint: Tensors, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.config = checkpoint.config
        self.left = set(checkpoint.names)

    def any_under(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.checkpoint.names)

    def skip(self, prefix: str) -> None:
        self.left = {name for name in self.left if not name.startswith(prefix)}

    def raw(self, name: str, *shape: int) -> Tensor:
        """One tensor, in the checkpoint's own dtype."""
        if name not in self.left:
            known = "used twice" if name in self.checkpoint.names else "missing"
            raise MissingTensor(
                f"{self.checkpoint.folder}: tensor {name} is {known}; re-download the model."
            )
        found = self.checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {name} has shape {list(found)} where config.json "
                f"asks for {list(shape)}; the two files do not belong together."
            )
        self.left.discard(name)
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.checkpoint.dtype(name), device=self.device)
        return self.checkpoint.tensor(name)

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self.raw(name, *shape).to(self.device, self.dtype)

    def stack(self, names: Iterable[str], rows: Iterable[int], columns: int) -> Tensor:
        """Projections of one input as one matrix."""
        parts = [self.raw(n, r, columns) for n, r in zip(names, rows, strict=True)]
        return torch.cat([part.to(self.device, self.dtype) for part in parts])

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.raw(name, *shape).to(self.device, torch.float32)

    def norm(self, name: str, size: int, *, zero_centred: bool | None = None) -> Norm:
        centred = self.config.zero_centred if zero_centred is None else zero_centred
        weight = self.vector(name, size)
        # Plain norms of Qwen3 and of DeltaNet round before the weight, zero-centred ones after.
        return Norm(weight + 1 if centred else weight, self.config.norm_eps, not centred)

    def finish(self) -> None:
        left = sorted(n for n in self.left if not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {len(left)} tensors have no place in a "
                f"{self.config.model_type} model, {left[0]} the first; check config.json."
            )


def _layer(take: _Take, prefix: str, index: int) -> Layer:
    delta = take.config.mixers[index] is Mixer.DELTA
    mixer = _delta_mixer(take, prefix) if delta else _attention_mixer(take, prefix)
    return Layer(mixer, _mlp(take, prefix, sparse=take.config.sparse[index]))


def _attention_mixer(take: _Take, prefix: str) -> AttentionMixer:
    shape, hidden = take.config.attention, take.config.hidden_size
    at = f"{prefix}self_attn."
    width = shape.q_heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    rows = (width * (2 if shape.gated else 1), kv_width, kv_width)
    return AttentionMixer(
        norm=take.norm(f"{prefix}input_layernorm.weight", hidden),
        inputs=take.stack([f"{at}{x}_proj.weight" for x in "qkv"], rows, hidden),
        heads=HeadNorms(
            q=take.norm(f"{at}q_norm.weight", shape.head_dim),
            k=take.norm(f"{at}k_norm.weight", shape.head_dim),
        ),
        out=take.matrix(f"{at}o_proj.weight", hidden, width),
    )


def _delta_mixer(take: _Take, prefix: str) -> DeltaMixer:
    config, hidden = take.config, take.config.hidden_size
    shape = config.delta
    assert shape is not None, "a linear_attention layer without a DeltaNet shape"
    at = f"{prefix}linear_attn."
    channels, heads = shape.conv_channels, shape.value_heads
    width = heads * shape.value_dim
    names = [f"{at}in_proj_{part}.weight" for part in ("qkv", "b", "a", "z")]
    conv = take.vector(f"{at}conv1d.weight", channels, 1, shape.conv_kernel)
    return DeltaMixer(
        norm=take.norm(f"{prefix}input_layernorm.weight", hidden),
        inputs=take.stack(names, (channels, heads, heads, width), hidden),
        delta=DeltaWeights(
            shape=shape,
            conv=conv[:, 0].t().contiguous(),
            decay=-torch.exp(take.vector(f"{at}A_log", heads)),
            dt_bias=take.vector(f"{at}dt_bias", heads),
            norm=take.norm(f"{at}norm.weight", shape.value_dim, zero_centred=False),
        ),
        out=take.matrix(f"{at}out_proj.weight", hidden, width),
    )


def _mlp(take: _Take, prefix: str, *, sparse: bool) -> DenseMlp | MoeMlp:
    norm = take.norm(f"{prefix}post_attention_layernorm.weight", take.config.hidden_size)
    if sparse:
        return _moe(take, f"{prefix}mlp.", norm)
    gate_up, down = _gated_mlp(take, f"{prefix}mlp.", take.config.intermediate_size)
    return DenseMlp(norm, gate_up, down)


def _gated_mlp(take: _Take, prefix: str, size: int) -> tuple[Tensor, Tensor]:
    hidden = take.config.hidden_size
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return (
        take.stack(names, (size, size), hidden),
        take.matrix(f"{prefix}down_proj.weight", hidden, size),
    )


def _moe(take: _Take, prefix: str, norm: Norm) -> MoeMlp:
    config, hidden = take.config, take.config.hidden_size
    shape = config.moe
    assert shape is not None, "a sparse layer without a mixture-of-experts shape"
    gate = take.matrix(f"{prefix}gate.weight", shape.experts, hidden)
    gate_up, down = _experts(take, f"{prefix}experts.", shape.experts, shape.intermediate)
    shared_gate_up = shared_down = None
    if shape.shared_intermediate:
        shared_gate = take.matrix(f"{prefix}shared_expert_gate.weight", 1, hidden)
        gate = torch.cat((gate, shared_gate))
        shared_gate_up, shared_down = _gated_mlp(
            take, f"{prefix}shared_expert.", shape.shared_intermediate
        )
    return MoeMlp(
        router=RouterWeights(norm, gate, shape.experts, shape.top_k, shape.renormalise),
        experts=ExpertWeights(gate_up, down, shared_gate_up, shared_down),
    )


def _experts(take: _Take, prefix: str, count: int, size: int) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I], from the fused or the split form on disk."""
    hidden = take.config.hidden_size
    if f"{prefix}gate_up_proj" in take.left:
        return (
            take.matrix(f"{prefix}gate_up_proj", count, 2 * size, hidden),
            take.matrix(f"{prefix}down_proj", count, hidden, size),
        )
    pairs = [_gated_mlp(take, f"{prefix}{e}.", size) for e in range(count)]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def _read_mtp(take: _Take) -> tuple[MtpWeights | None, str | None]:
    """The head, or what is wrong with it; every tensor of it counts as used either way."""
    declared = take.config.mtp_layers
    prefix = next((p for p in _MTP_PREFIXES if take.any_under(p)), None)
    if prefix is None:
        if declared:
            return None, "config.json declares an MTP layer, but the checkpoint has no mtp.* tensor"
        return None, None
    try:
        if declared > 1:
            return None, f"config.json declares {declared} MTP layers, and only 1 is supported"
        return _mtp(take, prefix), None
    except MissingTensor as missing:
        return None, f"the MTP head is incomplete ({str(missing).rstrip('.')})"
    finally:
        take.skip(prefix)


def _mtp(take: _Take, prefix: str) -> MtpWeights:
    hidden, at = take.config.hidden_size, f"{prefix}layers.0."
    return MtpWeights(
        norm_embedding=take.norm(f"{prefix}pre_fc_norm_embedding.weight", hidden),
        norm_hidden=take.norm(f"{prefix}pre_fc_norm_hidden.weight", hidden),
        fc=take.matrix(f"{prefix}fc.weight", hidden, 2 * hidden),
        layer=Layer(_attention_mixer(take, at), _mlp(take, at, sparse=take.config.moe is not None)),
        norm=take.norm(f"{prefix}norm.weight", hidden),
    )
