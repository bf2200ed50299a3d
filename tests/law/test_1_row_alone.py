"""Law 1: every op, on every backend, gives a row the bits it has alone."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops import OP_NAMES, load_ops
from tests.law.backends import BACKENDS, device_of, widths_of
from tests.law.cases import CASES, world
from tests.law.laws import assert_row_alone


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(OP_NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_row_alone(backend: str, op: str, dtype: torch.dtype) -> None:
    run = CASES[op](world(0, dtype, device_of(backend)))
    assert_row_alone(run, load_ops(backend), widths_of(backend))
