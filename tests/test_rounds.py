"""Rounds that stay on the device bring what rounds driven by the host bring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sametoken.checkpoint import open_checkpoint
from sametoken.engine import Engine
from sametoken.loading import build
from sametoken.ops.board_triton import advance, begin, empty_board
from sametoken.ops.choose_triton import Wants
from sametoken.request import Options
from sametoken.sampling import Sampling
from tests.tiny import make_tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[5, 9, 200, 31, 7], [100, 3, 3]]
LAYERS = ["linear_attention", "full_attention"]
# The interpreter takes a second for a pass.
TOKENS = 40 if torch.cuda.is_available() else 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, "qwen3_5_moe_text", mtp=True, num_hidden_layers=2, layer_types=LAYERS)
    return build(
        open_checkpoint(folder),
        None,
        draft="mtp",
        draft_max=2,
        device=DEVICE,
        dtype=torch.float32,
        context=64,
        slots=2,
        backend="triton",
    )


def _driven_by_the_host(engine: Engine) -> Engine:
    """The same model without rounds on the device."""
    return Engine(engine.model, engine.cache, drafter=engine.drafter, draft_max=engine.draft_max)


def test_the_tokens_are_the_same(engine: Engine) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, presence_penalty=0.5, seed=3)
    options = Options(sampling=sampling, max_tokens=TOKENS, ignore_eos=True)
    on_device = engine.generate(PROMPTS, options)
    by_host = _driven_by_the_host(engine).generate(PROMPTS, options)
    assert [g.tokens for g in on_device] == [g.tokens for g in by_host]
    assert all(sum(g.stats.drafted) for g in on_device)


@pytest.mark.parametrize(
    ("picked", "left", "most", "end", "taken"),
    [
        ([7, 8, 9, 1], 50, 3, -1, 4),
        ([7, 8, 2, 1], 50, 3, -1, 3),
        ([5, 8, 9, 1], 50, 3, -1, 1),
        ([7, 8, 9, 1], 50, 1, -1, 2),
        ([7, 8, 9, 1], 2, 3, -1, 2),
        ([7, 8, 9, 1], 50, 3, 8, 2),
        ([7, 8, 2, 1], 50, 3, 1, 3),
        ([7, 8, 9, 1], 0, 3, -1, 0),
    ],
    ids=["all", "two agree", "none", "allowed", "room", "end", "end not reached", "ended"],
)
def test_what_a_round_takes(picked: list[int], left: int, most: int, end: int, taken: int) -> None:
    board = empty_board(
        2, 3, positions=32, pages=1, longest=32, ends=1, hidden=4, wants=Wants(),
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    # The first sequence is another one, that nothing here may touch.
    for to, value in (
        (board.ids[1], [3, 7, 8, 9]),
        (board.left[1:], [left]),
        (board.longest[1:], [most]),
        (board.ends[1], [end]),
        (board.rows.start[1:], [10]),
    ):
        to.copy_(torch.tensor(value))
    begin(board)
    advance(board, torch.tensor([0, 0, 0, 0, *picked], device=DEVICE))
    rows = board.rows
    assert board.report[1].tolist() == [7, 8, 9, *picked]
    assert rows.position[4:].tolist() == [10, 11, 12, 13]
    assert rows.start.tolist() == [0, 10 + taken]
    assert rows.replay.tolist() == [0, max(taken - 1, 0)]
    assert board.ids[:, 0].tolist() == [0, picked[taken - 1] if taken else 3]
    over = end in picked[:taken] or taken >= left
    assert board.left.tolist() == [0, 0 if over else left - taken]
