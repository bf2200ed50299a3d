"""Random weights at a real model's shape. Speed needs no trained weights; only text does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from zlib import crc32

import torch
from torch import Tensor

from sametoken.config import AttentionShape, DeltaShape, Mixer, ModelConfig, MoeShape
from sametoken.engine import Engine
from sametoken.errors import RequestError
from sametoken.loading import LONGEST_DRAFT, build, device_named, dtype_named, use_threads

_ATTENTION_EVERY = 4


def _hybrid(layers: int, context: int, **sizes: object) -> ModelConfig:
    mixers = tuple(
        Mixer.DELTA if (i + 1) % _ATTENTION_EVERY else Mixer.ATTENTION for i in range(layers)
    )
    fixed: dict[str, object] = {
        "model_type": "qwen3_5_moe_text",
        "mixers": mixers,
        "sparse": (True,) * layers,
        "intermediate_size": 0,
        "norm_eps": 1e-6,
        "zero_centred": True,
        "max_positions": context,
        "tied_head": False,
        "mtp_layers": 1,
        "eos_ids": (),
    }
    return ModelConfig(**(fixed | sizes))  # type: ignore[arg-type]


# Sizes of the released checkpoint's config.json, and a small one of the same kind for a CPU.
SHAPES = {
    "qwen3.6-35b-a3b": _hybrid(
        layers=40,
        context=262144,
        vocab_size=248320,
        hidden_size=2048,
        attention=AttentionShape(16, 2, 256, 64, 1e7, gated=True),
        delta=DeltaShape(16, 32, 128, 128, 4),
        moe=MoeShape(256, 8, 512, 512, renormalise=True),
    ),
    "small": _hybrid(
        layers=8,
        context=8192,
        vocab_size=4096,
        hidden_size=256,
        attention=AttentionShape(4, 2, 64, 32, 1e4, gated=True),
        delta=DeltaShape(2, 4, 64, 64, 4),
        moe=MoeShape(16, 4, 64, 128, renormalise=True),
    ),
}


class RandomCheckpoint:
    """Tensors of a shape in `SHAPES`, made when asked for, the same at every asking."""

    def __init__(self, shape: str, dtype: torch.dtype, device: torch.device) -> None:
        if shape not in SHAPES:
            raise RequestError(f"--shape is {shape!r}; it must be one of {', '.join(SHAPES)}.")
        self.folder, self.config = f"random {shape}", SHAPES[shape]
        self.main_dtype, self._device = dtype, device

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(_tensors(self.config))

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """One dtype for all."""
        return self.main_dtype

    def tensor(self, name: str) -> Tensor:
        """Normal values, scaled so that rows keep their size from layer to layer."""
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        shape = self._shapes[name]
        values = torch.empty(shape, dtype=self.main_dtype, device=self._device)
        values.normal_(generator=generator)
        return values.mul_(0.1 if len(shape) == 1 else shape[-1] ** -0.5)


def random_engine(
    shape: str, *, device: str, dtype: str | None, context: int, threads: int
) -> Engine:
    """An engine on random weights, drafting with its random head; it speaks token ids."""
    use_threads(threads)
    where = device_named(device)
    kind = dtype_named(dtype, device, torch.bfloat16)
    return build(
        RandomCheckpoint(shape, kind, where),
        None,
        draft="mtp",
        draft_max=LONGEST_DRAFT,
        device=where,
        dtype=kind,
        context=context,
    )


def _tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a hybrid MoE checkpoint with its MTP head."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)
    for i, mixer in enumerate(config.mixers):
        yield from _layer(config, f"model.layers.{i}.", mixer)
    yield from _layer(config, "mtp.layers.0.", Mixer.ATTENTION)
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (hidden,)


def _layer(config: ModelConfig, at: str, mixer: Mixer) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, moe = config.hidden_size, config.moe
    assert moe is not None, "the shapes here are mixtures of experts"
    yield f"{at}input_layernorm.weight", (hidden,)
    yield f"{at}post_attention_layernorm.weight", (hidden,)
    yield from _delta(config, at) if mixer is Mixer.DELTA else _attention(config, at)
    yield f"{at}mlp.gate.weight", (moe.experts, hidden)
    yield f"{at}mlp.experts.gate_up_proj", (moe.experts, 2 * moe.intermediate, hidden)
    yield f"{at}mlp.experts.down_proj", (moe.experts, hidden, moe.intermediate)
    yield f"{at}mlp.shared_expert_gate.weight", (1, hidden)
    yield f"{at}mlp.shared_expert.gate_proj.weight", (moe.shared_intermediate, hidden)
    yield f"{at}mlp.shared_expert.up_proj.weight", (moe.shared_intermediate, hidden)
    yield f"{at}mlp.shared_expert.down_proj.weight", (hidden, moe.shared_intermediate)


def _attention(config: ModelConfig, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape, hidden = config.attention, config.hidden_size
    width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield f"{at}self_attn.q_proj.weight", (2 * width, hidden)
    yield f"{at}self_attn.k_proj.weight", (kv_width, hidden)
    yield f"{at}self_attn.v_proj.weight", (kv_width, hidden)
    yield f"{at}self_attn.o_proj.weight", (hidden, width)
    yield f"{at}self_attn.q_norm.weight", (shape.head_dim,)
    yield f"{at}self_attn.k_norm.weight", (shape.head_dim,)


def _delta(config: ModelConfig, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape, hidden = config.delta, config.hidden_size
    assert shape is not None, "a hybrid has a DeltaNet shape"
    heads, width = shape.value_heads, shape.value_heads * shape.value_dim
    yield f"{at}linear_attn.in_proj_qkv.weight", (shape.conv_channels, hidden)
    yield f"{at}linear_attn.in_proj_z.weight", (width, hidden)
    yield f"{at}linear_attn.in_proj_b.weight", (heads, hidden)
    yield f"{at}linear_attn.in_proj_a.weight", (heads, hidden)
    yield f"{at}linear_attn.conv1d.weight", (shape.conv_channels, 1, shape.conv_kernel)
    yield f"{at}linear_attn.A_log", (heads,)
    yield f"{at}linear_attn.dt_bias", (heads,)
    yield f"{at}linear_attn.norm.weight", (shape.value_dim,)
    yield f"{at}linear_attn.out_proj.weight", (hidden, width)
