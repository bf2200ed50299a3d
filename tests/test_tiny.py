from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sametoken.checkpoint import open_checkpoint
from tests.tiny import MODEL_TYPES, load_reference, make_tiny, mtp_oracle


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_layout_on_disk_is_the_same_model(model_type: str, tmp_path: Path) -> None:
    # Weights are compared, not logits: transformers' own sums may differ from call to call.
    first = None
    for fused, shards in ((True, 1), (False, 3)):
        folder = make_tiny(tmp_path / str(fused), model_type, fused_experts=fused, shards=shards)
        reference = load_reference(folder)
        weights = reference.state_dict()
        first = weights if first is None else first
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[name], first[name]) for name in weights)
        assert reference(torch.arange(9)[None]).logits.std() > 1


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_two_axes_of_a_model_are_equal(model_type: str, tmp_path: Path) -> None:
    config = open_checkpoint(make_tiny(tmp_path, model_type)).config
    a, d, m = config.attention, config.delta, config.moe
    # Stacked projections count: q with its gate, k or v, the convolution's channels.
    axes = [config.vocab_size, config.hidden_size, a.q_heads, a.kv_heads, a.head_dim]
    axes += [a.q_heads * a.head_dim, 2 * a.q_heads * a.head_dim, a.kv_heads * a.head_dim]
    axes += [config.intermediate_size] if config.intermediate_size else []
    if d:
        axes += [d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.conv_kernel]
        axes += [d.conv_channels, d.key_heads * d.key_dim, d.value_heads * d.value_dim]
    if m:
        axes += [m.experts, m.top_k, m.intermediate, 2 * m.intermediate]
        axes += [m.shared_intermediate] if m.shared_intermediate else []
    assert len(set(axes)) == len(axes), sorted(axes)


@pytest.mark.parametrize("model_type", [t for t in MODEL_TYPES if t.startswith("qwen3_5")])
def test_the_oracle_of_the_head_goes_on_from_its_cache(model_type: str, tmp_path: Path) -> None:
    oracle = mtp_oracle(make_tiny(tmp_path, model_type, mtp=True, shards=2))
    hidden, ids = torch.randn(9, 52), torch.arange(9)
    positions = torch.arange(1, 10)
    whole, logits = oracle.forward(hidden, ids, positions)
    assert logits.shape == (9, 331)
    oracle.reset()
    parts = [oracle.forward(hidden[s], ids[s], positions[s])[0] for s in (slice(4), slice(4, 9))]
    torch.testing.assert_close(torch.cat(parts), whole)
    drafted, _ = oracle.forward(whole[-1:], logits[-1:].argmax(-1), positions[-1:] + 1)
    assert drafted.shape == (1, 52)
