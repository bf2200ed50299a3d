"""Tiny random checkpoints of every family, and transformers as their numeric oracle.

No two axes of a model are equal, so that a swapped pair cannot pass, and no weight keeps its
initial value: zeros and ones hide a forgotten bias or a norm's missing 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, logging
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

logging.disable_progress_bar()

MODEL_TYPES = (
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_moe",
    "qwen3",
)
MULTIMODAL = ("qwen3_5_moe", "qwen3_5")

END_OF_TEXT, TURN_END = "<|endoftext|>", "<|im_end|>"

_COMMON = {
    "vocab_size": 331,
    "hidden_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 28,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE = {"num_experts": 13, "num_experts_per_tok": 7, "moe_intermediate_size": 36}
_DENSE = {"intermediate_size": 56}
_HYBRID = {
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 2, 2],
        "mrope_interleaved": True,
    },
}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 9,
    "out_hidden_size": _COMMON["hidden_size"],
}


def make_tiny(
    folder: Path,
    model_type: str,
    *,
    mtp: bool = False,
    tied: bool = False,
    shards: int = 1,
    fused_experts: bool | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a checkpoint into `folder` and return it. `overrides` are keys of the text config.

    fused_experts: experts as `gate_up_proj` and `down_proj` or one by one; None is the form that
    the family is released in.
    """
    text = _text_config(model_type) | {"tie_word_embeddings": tied} | overrides
    if tokenizer:
        text["eos_token_id"] = make_tokenizer(folder).token_to_id(TURN_END)
    multimodal = model_type in MULTIMODAL
    config = AutoConfig.for_model(
        model_type,
        **(
            {"text_config": text, "vision_config": _VISION, "tie_word_embeddings": tied}
            if multimodal
            else text
        ),
    )
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)

    generator = torch.Generator().manual_seed(seed)
    shapes = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    if mtp:
        shapes |= dict(_mtp_shapes(shapes, text["hidden_size"]))
    tensors = {n: _random(n, shapes[n], model_type, generator) for n in sorted(shapes)}
    fused = model_type.startswith("qwen3_5") if fused_experts is None else fused_experts
    tensors = _fuse_experts(tensors) if fused else _split_experts(tensors)
    _save({n: t.to(dtype) for n, t in tensors.items()}, folder, shards)
    _edit_config(folder, mtp, dtype)
    return folder


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write a byte-level BPE of 256 bytes, a few merges and two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(
        ["the cat then sat on that mat, and the rat ran; über 東京 🙂"], trainer
    )
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_END])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": TURN_END, "pad_token": END_OF_TEXT, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return tokenizer


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The text model of a checkpoint as transformers runs it, on token ids."""
    config = AutoConfig.from_pretrained(folder)
    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config.get_text_config(),
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not loaded["missing_keys"], loaded
    assert not loaded["mismatched_keys"], loaded
    return model.eval()


class MtpOracle:
    """A checkpoint's MTP head as transformers' generic `MtpModel` runs it, with its own cache."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = load_reference(folder, dtype)
        # The family's config class does not know its own head, so it is told here.
        self.model.config.num_mtp_layers = 1
        self.model.config.mtp_layer_types = ["full_attention"]
        self.head = MtpModel(self.model, 1).to(dtype).eval()
        self._load(folder)
        self.reset()

    def reset(self) -> None:
        """Forget every row."""
        self.cache = MtpCache(config=self.model.config.get_mtp_config())

    @torch.no_grad()
    def forward(self, hidden: Tensor, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of (hidden of the position before, token, position) → hidden [T, H], logits [T, V].

        The rows come after those of earlier calls. Chain by giving the hidden back with the
        drafted token and the next position.
        """
        embeds = self.head.embed_tokens(ids[None])
        # Rotary wants one row of positions for each of time, height and width.
        rotary = self.head.rotary_emb(embeds, positions[None, None].expand(3, 1, -1))
        masks = self.head.create_masks_for_mtp_layer(0, embeds, self.cache, positions[None])
        out = self.head.layers[0](
            embeds,
            hidden[None],
            position_embeddings=rotary,
            position_ids=positions[None],
            cache=self.cache,
            **masks,
        )
        return out[0], self.head.shared_head(out)[0]

    def _load(self, folder: Path) -> None:
        tensors = {n: t for n, t in _all_tensors(folder).items() if n.startswith("mtp.")}
        state = {_mtp_model_name(n): t for n, t in _fuse_experts(tensors).items()}
        loaded = self.head.load_state_dict(state, strict=False)
        shared = ("embed_tokens.", "shared_head.")
        missing = [name for name in loaded.missing_keys if not name.startswith(shared)]
        assert not missing, missing
        assert not loaded.unexpected_keys, loaded.unexpected_keys


def mtp_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> MtpOracle:
    """The oracle of the head in `folder`."""
    return MtpOracle(folder, dtype)


def _text_config(model_type: str) -> dict[str, Any]:
    hybrid, moe = model_type.startswith("qwen3_5"), "moe" in model_type
    config = _COMMON | (_HYBRID if hybrid else _PLAIN) | (_MOE if moe else _DENSE)
    if moe and hybrid:
        return config | {"shared_expert_intermediate_size": 44}
    if moe:
        return config | _DENSE | {"norm_topk_prob": True, "mlp_only_layers": [1]}
    return config


def _random(
    name: str, shape: tuple[int, ...], model_type: str, generator: torch.Generator
) -> Tensor:
    """A weight of the size training leaves, in a place where it changes the result."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(0.05, 2, generator=generator).log()
    if name.endswith("dt_bias"):
        return noise * 0.5
    if len(shape) == 1:
        plain = not model_type.startswith("qwen3_5") or "linear_attn.norm" in name
        # Without a recurrent state only sharp attention keeps greedy text from looping at once.
        sharp = 2 if re.search(r"[qk]_norm", name) else 1
        return noise * 0.2 + float(plain) * sharp
    if "embed_tokens" in name or "lm_head" in name:
        # Logits of spread 3: greedy text wanders, and a near tie is rare.
        return noise * 3 / math.sqrt(shape[-1])
    # What a layer adds outweighs the embedding, or a tied head would repeat the last token.
    gain = 2 if re.search(r"(o_proj|out_proj|down_proj)", name) else 1
    return noise * gain / math.sqrt(shape[-1])


def _mtp_shapes(
    shapes: dict[str, tuple[int, ...]], hidden: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a head: a layer like the trunk's last, a projection, three norms."""
    last = max(int(i) for n in shapes for i in re.findall(r"^model\.(?:\w+\.)?layers\.(\d+)\.", n))
    for name, shape in shapes.items():
        found = re.search(rf"^model\.(?:language_model\.)?layers\.{last}\.(.*)", name)
        if found:
            yield f"mtp.layers.0.{found[1]}", shape
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (hidden,)


def _mtp_model_name(name: str) -> str:
    name = name.removeprefix("mtp.")
    if name.startswith("layers.0."):
        return name.replace("layers.0.", "layers.0.mtp_block.")
    theirs = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    stem = name.removesuffix(".weight")
    return f"layers.0.{theirs.get(stem, 'post_norm')}.weight"


_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.gate_proj\.weight")


def _fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {n: t for n, t in tensors.items() if not re.search(r"\.experts\.\d+\.", n)}
    found = [m for m in map(_ONE_EXPERT.fullmatch, tensors) if m]
    for at in {m[1] for m in found}:
        count = sum(m[1] == at for m in found)
        gate, up, down = (
            torch.stack([tensors[f"{at}.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        )
        out[f"{at}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        out[f"{at}.down_proj"] = down
    return out


def _split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        at, _, part = name.rpartition(".")
        if part not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for own, piece in zip(names, expert.chunk(len(names)), strict=True):
                out[f"{at}.{e}.{own}.weight"] = piece
    return out


def _save(tensors: dict[str, Tensor], folder: Path, shards: int) -> None:
    (folder / "model.safetensors").unlink()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def _edit_config(folder: Path, mtp: bool, dtype: torch.dtype) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    name = str(dtype).removeprefix("torch.")
    levels = [config] + [config[k] for k in ("text_config", "vision_config") if k in config]
    for level in levels:
        level["dtype"] = name
    if mtp:
        config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(config, indent=1))
