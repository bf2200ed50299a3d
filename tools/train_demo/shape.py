"""Sizes of the demo model and the ``config.json`` that states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Every size of the architecture; the defaults are the shipped model."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 8
    full_attention_interval: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 64
    gdn_value_dim: int = 64
    conv: int = 4
    experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 64
    shared_width: int = 128
    positions: int = 2048
    epsilon: float = 1e-6

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_dim * self.rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        """Mixer of each layer: the last of every interval is full attention."""
        every = self.full_attention_interval
        full = [(index + 1) % every == 0 for index in range(self.layers)]
        return ["full_attention" if is_full else "linear_attention" for is_full in full]


SMALL = Shape(layers=4, experts=4, experts_per_token=2)  # for a CPU


def config(shape: Shape, end_ids: list[int]) -> dict[str, Any]:
    """Return ``config.json`` for the shape."""
    # Text has one position axis; the three sections only have to sum to half the rotated dims.
    pairs = shape.rotary_dim // 2
    section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "layer_types": shape.layer_types,
        "full_attention_interval": shape.full_attention_interval,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
        "linear_key_head_dim": shape.gdn_key_dim,
        "linear_value_head_dim": shape.gdn_value_dim,
        "linear_conv_kernel_dim": shape.conv,
        "mamba_ssm_dtype": "float32",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.epsilon,
        "max_position_embeddings": shape.positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_factor,
            "mrope_section": section,
            "mrope_interleaved": True,
        },
        "partial_rotary_factor": shape.rotary_factor,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[0],
        "use_cache": True,
    }
