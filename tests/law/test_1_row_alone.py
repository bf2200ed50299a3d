"""Law 1: every op, on every backend, gives a row the bits it has alone."""

from __future__ import annotations

import numba
import pytest
import torch

from sametoken.lab.check import same_bits
from sametoken.ops import OP_NAMES, load_ops
from tests.law.backends import BACKENDS, ROWS, widths_of
from tests.law.cases import CASES, world
from tests.law.laws import assert_row_alone


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(OP_NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_row_alone(backend: str, op: str, dtype: torch.dtype) -> None:
    run = CASES[op](world(0, dtype, backend))
    assert_row_alone(run, load_ops(backend), widths_of(backend))


@pytest.mark.parametrize("op", OP_NAMES)
def test_threads_change_no_bit(op: str) -> None:
    run, ops = CASES[op](world(0, torch.bfloat16, "cpu")), load_ops("cpu")
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        serial = run(ops, range(ROWS))
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
        assert same_bits([run(ops, range(ROWS))], [serial])
    finally:
        numba.set_num_threads(before)
