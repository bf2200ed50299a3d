"""Law 1: every op, on every backend, gives a row the bits it has alone."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops import BACKENDS, OP_NAMES, load_ops
from tests.law.cases import CASES, world
from tests.law.laws import assert_row_alone


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(OP_NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OP_NAMES)
def test_row_alone(op: str, dtype: torch.dtype, backend: str) -> None:
    assert_row_alone(CASES[op](world(0, dtype)), load_ops(backend))
