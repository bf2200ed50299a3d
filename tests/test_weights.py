"""Every tensor of a checkpoint is used exactly once, and what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sametoken.checkpoint import open_checkpoint
from sametoken.errors import CheckpointError
from sametoken.weights import Weights, read_weights
from tests.messages import assert_one_sentence
from tests.tiny import MODEL_TYPES, make_tiny


def _read(folder: Path, device: str = "cpu") -> Weights:
    return read_weights(open_checkpoint(folder), torch.float32, torch.device(device))


def _change(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors on disk."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {k: v for k, v in changes.items() if v is not None}
    for name in [k for k, v in changes.items() if v is None]:
        del tensors[name]
    save_file(tensors, path, {"format": "pt"})


def _refused(folder: Path, *named: str) -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(CheckpointError) as refused:
            _read(folder, device)
        assert_one_sentence(refused.value, *named)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_whole_checkpoint_leaves_nothing_over(tmp_path: Path, model_type: str) -> None:
    make_tiny(tmp_path, model_type, mtp="qwen3_5" in model_type)
    weights = _read(tmp_path)
    assert weights.mtp_problem is None
    assert (weights.mtp is not None) == ("qwen3_5" in model_type)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_moe_text")
    _change(tmp_path, **{"model.layers.1.linear_attn.A_log": None})
    _refused(tmp_path, "model.layers.1.linear_attn.A_log", "missing")


def test_a_surplus_tensor_is_named(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    _change(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(3)})
    _refused(tmp_path, "model.layers.0.self_attn.q_proj.bias", "no place")


def test_a_shape_that_does_not_fit_is_named_with_both_shapes(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_moe_text")
    _change(tmp_path, **{"model.norm.weight": torch.zeros(7)})
    _refused(tmp_path, "model.norm.weight", "[7]", "[52]")


def test_an_incomplete_head_is_left_out_and_named(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_moe_text", mtp=True)
    _change(tmp_path, **{"mtp.layers.0.self_attn.k_norm.weight": None})
    weights = _read(tmp_path)
    assert weights.mtp is None
    assert "incomplete" in (weights.mtp_problem or "")
    assert "mtp.layers.0.self_attn.k_norm.weight" in (weights.mtp_problem or "")


def test_a_head_with_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_moe_text", mtp=True)
    _change(tmp_path, **{"mtp.fc.weight": torch.zeros(5, 5)})
    _refused(tmp_path, "mtp.fc.weight", "[5, 5]")


def test_a_head_under_the_models_prefix_is_found(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_text", mtp=True)
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {
        n.replace("mtp.", "model.mtp.") if n.startswith("mtp.") else n: t
        for n, t in tensors.items()
    }
    save_file(moved, tmp_path / "model.safetensors", {"format": "pt"})
    assert _read(tmp_path).mtp is not None


def test_a_tied_head_is_the_embedding_even_where_a_copy_is_stored(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", tied=True)
    _change(tmp_path, **{"lm_head.weight": torch.ones(331, 52)})
    weights = _read(tmp_path)
    assert weights.head is weights.embed
    assert not torch.equal(weights.head, torch.ones(331, 52))
