"""Write a model folder in the layout of released checkpoints, and read one back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from model import Model
from safetensors.torch import load_file, save_file
from shape import Shape, config
from tokenizer import END_OF_TEXT, SPECIALS, TURN_END
from tokenizers import Tokenizer

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def export(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights in bf16, configuration, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder / "model.safetensors")
    ends = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)]
    _write_json(folder / "config.json", config(model.shape, ends))
    generation = {"eos_token_id": ends, "pad_token_id": ends[0], "do_sample": False}
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.shape))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def save_weights(model: Model, path: Path) -> None:
    """Write every parameter in bf16 under its released name."""
    tensors = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in model.state_dict().items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # it is written private


def load(folder: Path) -> Model:
    """Read a folder written by ``export`` into a training model, in fp32."""
    model = Model(read_shape(folder))
    load_weights(model, folder / "model.safetensors")
    return model


def load_weights(model: Model, path: Path) -> None:
    """Fill a model from a file written by ``save_weights``."""
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})


def read_shape(folder: Path) -> Shape:
    """Return the shape a folder's configuration states; only the sizes that vary are read."""
    stated = json.loads((folder / "config.json").read_text())
    return replace(
        Shape(),
        layers=stated["num_hidden_layers"],
        experts=stated["num_experts"],
        experts_per_token=stated["num_experts_per_tok"],
    )


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": list(SPECIALS[1:]),
        "model_max_length": shape.positions,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
