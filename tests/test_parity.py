"""Parity with transformers: logits within named tolerances, greedy text equal, every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sametoken.drafters import Wish
from sametoken.engine import Engine
from sametoken.mtp import mtp_hidden
from sametoken.request import Options
from sametoken.rows import Rows
from sametoken.sampling import Sampling
from sametoken.track import Track
from tests.engines import CPU_BACKENDS, engine_of
from tests.tiny import MODEL_TYPES, MtpOracle, load_reference, make_tiny, mtp_oracle

# Relative error of a logits row, ‖ours − theirs‖ / ‖theirs‖. fp32: both sum some tens of products
# per output in other orders through four layers; transformers' own two forms of the recurrence
# differ by about as much. Its sums follow the processor it runs on: 2.1e-5 is the most seen.
FP32_LOGITS = 4e-5
# bf16: how far our median row may be from fp32, in units of transformers' own distance. Both round
# by 2^-9 at some dozen points a layer; single rows scatter widely where a router tie flips.
BF16_RATIO = 1.5

PROMPT = 21
# Other shapes of the same families: one value head per key head, three to one, single heads.
SHAPES = {
    "default": {},
    "one value head per key head": {"linear_num_value_heads": 2, "linear_value_head_dim": 8},
    "multi-query": {"num_key_value_heads": 1, "num_experts_per_tok": 1, "head_dim": 20},
    "wide taps": {"linear_conv_kernel_dim": 2, "hidden_size": 68, "linear_key_head_dim": 24},
}


def _errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative error of each row."""
    return (found - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float(_errors(found, wanted).max())


def _ids(vocabulary: int, count: int = PROMPT) -> list[int]:
    generator = torch.Generator().manual_seed(17)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


@torch.inference_mode()
def _hidden(engine: Engine, track: Track) -> Tensor:
    rows = Rows((track.span(len(track.ids)),))
    return engine.model.hidden(torch.tensor(track.ids), rows, engine.cache)


def _logits(engine: Engine, hidden: Tensor) -> Tensor:
    return hidden.float() @ engine.model.weights.head.float().t()


def _track(engine: Engine, ids: list[int]) -> Track:
    lease = engine.cache.lease(len(ids) + 8)
    assert lease is not None
    return Track(ids, lease, None)


def _assert_parity(folder: Path, backend: str | None = None) -> None:
    engine, reference = engine_of(folder, backend=backend), load_reference(folder)
    ids = _ids(engine.model.config.vocab_size)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
        text = reference.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(ids) :].tolist()
    assert _error(_logits(engine, _hidden(engine, _track(engine, ids))), wanted) < FP32_LOGITS
    options = Options(max_tokens=24, ignore_eos=True)
    assert list(engine.generate(ids, options)[0].tokens) == text


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_every_family(tmp_path: Path, backend: str, model_type: str, tied: bool) -> None:
    make_tiny(tmp_path, model_type, tied=tied, mtp="qwen3_5" in model_type)
    _assert_parity(tmp_path, backend)


@pytest.mark.parametrize("shape", list(SHAPES)[1:])
def test_other_shapes(tmp_path: Path, shape: str) -> None:
    _assert_parity(make_tiny(tmp_path, "qwen3_5_moe_text", seed=2, **SHAPES[shape]))


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe"])
def test_expert_layouts_and_shards(tmp_path: Path, model_type: str, fused: bool) -> None:
    _assert_parity(make_tiny(tmp_path, model_type, fused_experts=fused, shards=3))


def test_experts_that_are_not_renormalised(tmp_path: Path) -> None:
    _assert_parity(make_tiny(tmp_path, "qwen3_moe", norm_topk_prob=False))


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3"])
def test_bf16(tmp_path: Path, model_type: str) -> None:
    # transformers' grouped product in bf16 wants rows of a multiple of 16 bytes.
    sizes = {"hidden_size": 64} | ({"moe_intermediate_size": 48} if "moe" in model_type else {})
    make_tiny(tmp_path, model_type, dtype=torch.bfloat16, **sizes)
    engine = engine_of(tmp_path, dtype=torch.bfloat16)
    ids = _ids(engine.model.config.vocab_size)
    with torch.no_grad():
        exact = load_reference(tmp_path)(torch.tensor([ids])).logits[0]
        theirs = load_reference(tmp_path, torch.bfloat16)(torch.tensor([ids])).logits[0]
    ours = _logits(engine, _hidden(engine, _track(engine, ids)))
    assert _errors(ours, exact).median() < BF16_RATIO * _errors(theirs, exact).median()


@pytest.mark.parametrize("model_type", [t for t in MODEL_TYPES if "qwen3_5" in t])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_mtp_head(tmp_path: Path, backend: str, model_type: str) -> None:
    """Prompt fill, then three chained steps, against transformers' generic MTP model."""
    make_tiny(tmp_path, model_type, mtp=True)
    engine = engine_of(tmp_path, draft="mtp", backend=backend)
    oracle = mtp_oracle(tmp_path)
    weights = engine.model.weights.mtp
    assert weights is not None
    ids = _ids(engine.model.config.vocab_size)
    track = _track(engine, ids)
    hidden = _hidden(engine, track)[:-1]
    # The oracle counts positions from the token's, ours from the hidden's: a constant apart.
    theirs, logits = oracle.forward(hidden, torch.tensor(ids[1:]), torch.arange(1, PROMPT))
    span = track.rows_at(0, PROMPT - 1)
    with torch.inference_mode():
        ours = mtp_hidden(
            engine.model, weights, torch.tensor(ids[1:]), hidden, Rows((span,)), engine.cache
        )
    assert _error(_logits(engine, ours), logits) < FP32_LOGITS
    for step in range(3):
        token = logits[-1].argmax()[None]
        position = PROMPT - 1 + step
        theirs, logits = oracle.forward(theirs[-1:], token, torch.tensor([position + 1]))
        with torch.inference_mode():
            rows = Rows((track.rows_at(position, 1),))
            ours = mtp_hidden(engine.model, weights, token, ours[-1:], rows, engine.cache)
        assert _error(_logits(engine, ours), logits) < FP32_LOGITS


@pytest.mark.parametrize("model_type", [t for t in MODEL_TYPES if "qwen3_5" in t])
def test_drafts_are_the_oracles(tmp_path: Path, model_type: str) -> None:
    """The engine's MTP drafts, after rewinds and rewrites, are those of a head run afresh."""
    make_tiny(tmp_path, model_type, mtp=True)
    engine, oracle = engine_of(tmp_path, draft="mtp"), mtp_oracle(tmp_path)
    ids = _ids(engine.model.config.vocab_size)
    (done,) = engine.generate(ids, Options(max_tokens=12, ignore_eos=True, keep=True))
    track = done.kept
    assert track is not None
    assert engine.drafter is not None
    with torch.inference_mode():
        (draft,) = engine.drafter.propose([Wish(track, Sampling(), len(ids), 3)])
    assert draft == _afresh(oracle, track.ids)


@torch.no_grad()
def _afresh(oracle: MtpOracle, ids: list[int]) -> list[int]:
    """Three greedy drafts after `ids`, from a trunk and head that have seen no speculation."""
    out = oracle.model(torch.tensor([ids]), output_hidden_states=True)
    hidden = out.hidden_states[-1][0, :-1]
    state, logits = oracle.forward(hidden, torch.tensor(ids[1:]), torch.arange(1, len(ids)))
    draft = [int(logits[-1].argmax())]
    for step in range(2):
        position = torch.tensor([len(ids) + step])
        state, logits = oracle.forward(state[-1:], torch.tensor([draft[-1]]), position)
        draft.append(int(logits[-1].argmax()))
    return draft
