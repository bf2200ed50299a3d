"""What a model is, read from a Hugging Face `config.json` and checked once.

Everything below this module sees only the frozen records here, never a raw dictionary. An
unsupported checkpoint fails in `read_config`, with the offending key named.
Source of keys and defaults: the `Qwen3_5MoeTextConfig`, `Qwen3_5TextConfig`, `Qwen3MoeConfig` and
`Qwen3Config` classes of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sametoken.errors import CheckpointError

Json = Mapping[str, Any]


class Mixer(StrEnum):
    """How a layer mixes positions."""

    ATTENTION = "full_attention"
    DELTA = "linear_attention"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Full attention: `q_heads` query heads share `kv_heads` key-value heads of `head_dim`.

    The first `rotary_dim` dimensions of a head are rotated. `gated` attention projects a gate
    beside every query and multiplies the result by its sigmoid.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated: bool


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Gated DeltaNet: value head `j` reads key head `j // (value_heads // key_heads)`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        """Channels the causal convolution runs over: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class MoeShape:
    """`top_k` of `experts` per token, plus a gated shared expert unless its size is 0."""

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    renormalise: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer as this engine runs it.

    `mixers[i]` and `sparse[i]` describe layer `i`. `mtp_layers` is what the file declares; whether
    the tensors are there is the checkpoint's to say. `zero_centred` norms multiply by `1 + w`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    mixers: tuple[Mixer, ...]
    sparse: tuple[bool, ...]
    intermediate_size: int
    attention: AttentionShape
    delta: DeltaShape | None
    moe: MoeShape | None
    norm_eps: float
    zero_centred: bool
    max_positions: int
    tied_head: bool
    mtp_layers: int
    eos_ids: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Trunk layers; the MTP layer is not counted."""
        return len(self.mixers)


# The outer model type, and the name of the text model inside it.
_QWEN3_5 = {"qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text"}
_QWEN3 = {"qwen3_moe", "qwen3"}
KNOWN_MODEL_TYPES = tuple(sorted(_QWEN3_5 | _QWEN3))


def read_config(raw: Json, source: str) -> ModelConfig:
    """Turn the dictionary of a `config.json` into a checked `ModelConfig`.

    `source` names the file in errors. Raises `CheckpointError` for an unknown `model_type`, a
    missing or contradictory key, or a feature the engine does not have.
    """
    return _Reader(raw, source).read()


class _Reader:
    """Typed access to one config dictionary; every complaint names the file and the key."""

    def __init__(self, raw: Json, source: str) -> None:
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{source} must hold a JSON object; re-download the model.")
        nested = raw.get("text_config")
        self.outer = raw
        self.text: Json = nested if isinstance(nested, Mapping) else raw
        self.source = source
        model_type = raw.get("model_type", self.text.get("model_type"))
        if model_type not in KNOWN_MODEL_TYPES:
            raise CheckpointError(
                f"{source} says model_type {model_type!r}, which sametoken does not know; "
                f"it knows {', '.join(KNOWN_MODEL_TYPES)}."
            )
        self.model_type = str(model_type)

    def read(self) -> ModelConfig:
        hybrid = self.model_type in _QWEN3_5
        self._refuse_unsupported()
        layers = self.integer("num_hidden_layers")
        moe = self._moe(hybrid) if "moe" in self.model_type else None
        mixers = self._mixers(layers) if hybrid else (Mixer.ATTENTION,) * layers
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            mixers=mixers,
            sparse=self._sparse(layers, moe),
            intermediate_size=0 if moe and hybrid else self.integer("intermediate_size"),
            attention=self._attention(gated=hybrid),
            delta=self._delta() if Mixer.DELTA in mixers else None,
            moe=moe,
            norm_eps=self.number("rms_norm_eps", 1e-6),
            zero_centred=hybrid,
            max_positions=self.integer("max_position_embeddings", 32768),
            tied_head=self._flag_anywhere("tie_word_embeddings", False),
            mtp_layers=self.integer("mtp_num_hidden_layers", 0, least=0) if hybrid else 0,
            eos_ids=self._eos_ids(),
        )

    def value(self, key: str, default: Any = None) -> Any:
        found = self.text.get(key)
        if found is None:
            found = default
        if found is None:
            raise CheckpointError(f"{self.source} lacks {key!r}; re-download the model.")
        return found

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise self._bad(key, found, f"an integer of at least {least}")
        return found

    def number(self, key: str, default: float) -> float:
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
            raise self._bad(key, found, "a positive number")
        return float(found)

    def _bad(self, key: str, found: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.source} has {key} = {found!r} where {wanted} is needed.")

    def _flag_anywhere(self, key: str, default: bool) -> bool:
        # Multimodal wrappers carry the flag at either level; the text level is the model's own.
        return bool(self.text.get(key, self.outer.get(key, default)))

    def _refuse_unsupported(self) -> None:
        for key in ("attention_bias", "use_sliding_window", "mtp_use_dedicated_embeddings"):
            if self.text.get(key):
                raise CheckpointError(
                    f"{self.source} sets {key}, which sametoken does not support."
                )
        if self.text.get("hidden_act", "silu") != "silu":
            raise self._bad("hidden_act", self.text["hidden_act"], "'silu'")
        quantised = self.text.get("quantization_config") or self.outer.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            raise CheckpointError(
                f"{self.source} declares {method!r} quantised weights, which sametoken does not "
                "read; use the bf16 release of the model."
            )

    def _rope(self) -> tuple[float, float]:
        """`(theta, rotated fraction of a head)`."""
        rope = self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise self._bad("rope_parameters", rope, "an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise self._bad("rope_type", kind, "'default'")
        theta = rope.get("rope_theta", self.text.get("rope_theta"))
        if not isinstance(theta, int | float) or theta <= 0:
            raise self._bad("rope_theta", theta, "a positive number")
        # 0.25 is the class default of the hybrid family; plain Qwen3 rotates the whole head.
        default = 0.25 if self.model_type in _QWEN3_5 else 1.0
        partial = rope.get("partial_rotary_factor", self.text.get("partial_rotary_factor", default))
        if not isinstance(partial, int | float) or not 0 < partial <= 1:
            raise self._bad("partial_rotary_factor", partial, "a fraction in (0, 1]")
        return float(theta), float(partial)

    def _attention(self, *, gated: bool) -> AttentionShape:
        q_heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", q_heads)
        if q_heads % kv_heads:
            raise self._bad("num_key_value_heads", kv_heads, f"a divisor of {q_heads}")
        head_dim = self.integer("head_dim", self.integer("hidden_size") // q_heads)
        theta, partial = self._rope()
        rotary_dim = int(head_dim * partial)
        if rotary_dim % 2:
            raise self._bad("partial_rotary_factor", partial, "an even rotary size")
        return AttentionShape(q_heads, kv_heads, head_dim, rotary_dim, theta, gated)

    def _delta(self) -> DeltaShape:
        key_heads = self.integer("linear_num_key_heads", 16)
        value_heads = self.integer("linear_num_value_heads", 32)
        if value_heads % key_heads:
            raise self._bad("linear_num_value_heads", value_heads, f"a multiple of {key_heads}")
        return DeltaShape(
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=self.integer("linear_key_head_dim", 128),
            value_dim=self.integer("linear_value_head_dim", 128),
            conv_kernel=self.integer("linear_conv_kernel_dim", 4, least=2),
        )

    def _moe(self, hybrid: bool) -> MoeShape:
        # transformers 5 saves Qwen3's count under the second name.
        default = self.text.get("num_local_experts", 256 if hybrid else 128)
        experts = self.integer("num_experts", default)
        top_k = self.integer("num_experts_per_tok", 8)
        if top_k > experts:
            raise self._bad("num_experts_per_tok", top_k, f"at most num_experts = {experts}")
        return MoeShape(
            experts=experts,
            top_k=top_k,
            intermediate=self.integer("moe_intermediate_size"),
            shared_intermediate=self.integer("shared_expert_intermediate_size") if hybrid else 0,
            renormalise=True if hybrid else bool(self.text.get("norm_topk_prob", False)),
        )

    def _mixers(self, layers: int) -> tuple[Mixer, ...]:
        named = self.text.get("layer_types")
        if named is None:
            interval = self.integer("full_attention_interval", 4)
            named = [Mixer.DELTA if (i + 1) % interval else Mixer.ATTENTION for i in range(layers)]
        known = {mixer.value for mixer in Mixer}
        if not isinstance(named, list) or len(named) != layers or not set(named) <= known:
            raise self._bad("layer_types", named, f"a list of {layers} of {sorted(known)}")
        return tuple(Mixer(name) for name in named)

    def _sparse(self, layers: int, moe: MoeShape | None) -> tuple[bool, ...]:
        if moe is None:
            return (False,) * layers
        dense = self.text.get("mlp_only_layers") or []
        step = self.integer("decoder_sparse_step", 1)
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))

    def _eos_ids(self) -> tuple[int, ...]:
        found = self.text.get("eos_token_id", self.outer.get("eos_token_id"))
        ids = [] if found is None else found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self._bad("eos_token_id", found, "an id or a list of ids")
        return tuple(ids)
