"""Compare an exported folder with transformers: ``python tools/train_demo/check.py FOLDER``.

The trunk's logits are compared with ``Qwen3_5MoeForCausalLM``, the head's with the generic
``MtpModel``, its first step and one chained step, all in fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from decode import Generator
from export import load
from model import Model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

TOLERANCE = 2e-4


@torch.no_grad()
def compare(folder: Path, length: int = 150) -> dict[str, float]:
    """Return the largest logit differences."""
    ours = load(folder).eval()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(3, ours.shape.vocabulary, (2, length), generator=_seeded())
    hidden, _ = ours.model(tokens)
    found = theirs(tokens, output_hidden_states=True)
    differences = {"trunk": _largest(ours.model.logits(hidden), found.logits)}
    differences["stepwise"] = _largest(_stepwise(ours, tokens), found.logits)
    head = _oracle(theirs, folder)
    return differences | _compare_head(ours, head, tokens, found.hidden_states[-1])


def _oracle(trunk: PreTrainedModel, folder: Path) -> MtpModel:
    """Fill the generic head by name: not every version of its loader knows these names."""
    trunk.config.num_mtp_layers = 1
    trunk.config.mtp_layer_types = ["full_attention"]
    head = MtpModel(trunk, 1)
    renamed = {
        "fc.": "eh_proj.",
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "norm.": "post_norm.",
        "layers.0.": "mtp_block.",
    }
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = name.removeprefix("mtp.")
        for ours, theirs in renamed.items():
            if name != short and short.startswith(ours):
                tensors[f"layers.0.{theirs}{short.removeprefix(ours)}"] = tensor.float()
    head.layers.load_state_dict({k.removeprefix("layers."): v for k, v in tensors.items()})
    return head.eval()


def _compare_head(ours: Model, head: MtpModel, tokens: Tensor, hidden: Tensor) -> dict[str, float]:
    """Run the oracle over true rows, then chain one row on their cache, as a decoder does."""
    rows = tokens.shape[1] - 2
    embedded = ours.model.embed_tokens(tokens)
    first, second = ours.mtp.unroll(embedded, ours.model(tokens[:, :rows])[0], 2)[0]
    cache = MtpCache(config=head.config)
    found = _run(head, tokens[:, 1 : rows + 1], hidden[:, :rows], 1, cache)
    chained = _run(head, tokens[:, rows + 1 :], found[:, -1:], rows + 1, cache)
    logits = ours.model.logits
    return {
        "head": _largest(logits(first), logits(found)),
        "head_chained": _largest(logits(second[:, -1:]), logits(chained)),
    }


def _run(head: MtpModel, tokens: Tensor, hidden: Tensor, start: int, cache: MtpCache) -> Tensor:
    embedded = head.embed_tokens(tokens)
    positions = torch.arange(start, start + tokens.shape[1])[None].expand(len(tokens), -1)
    masks = head.create_masks_for_mtp_layer(0, embedded, cache, positions)
    angles = head.rotary_emb(embedded, position_ids=positions.expand(3, -1, -1))
    return head.layers[0](
        embedded,
        hidden,
        position_embeddings=angles,
        position_ids=positions,
        past_key_values=cache,
        **masks,
    )


def _stepwise(ours: Model, tokens: Tensor) -> Tensor:
    generator = Generator(ours.model, *tokens.shape)
    positions = torch.arange(tokens.shape[1])
    steps = [
        ours.model.step(tokens[:, t], positions[t : t + 1], generator.cache)
        for t in range(tokens.shape[1])
    ]
    return torch.stack(steps, dim=1)


def _largest(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def main() -> None:
    """Print the differences and fail above the tolerance."""
    differences = compare(Path(sys.argv[1]))
    for name, value in differences.items():
        print(f"{name:14} {value:.2e}")
    sys.exit(max(differences.values()) > TOLERANCE)


if __name__ == "__main__":
    main()
