"""Every backend computes what the reference means, within named tolerances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sametoken.ops import OP_NAMES, load_ops
from tests.law.backends import BACKENDS
from tests.law.cases import CASES, world

# Relative error over all rows, ‖ours − reference‖ / ‖reference‖.
TOLERANCE = {
    # Sums of some hundred fp32 products in another order.
    torch.float32: 2e-6,
    # Values that fall on the other side of a rounding by 2^-9 (2^-8 in the interpreter, which cuts
    # bf16 instead of rounding it), at two or three points of an op.
    torch.bfloat16: 2e-2,
}
SOME_ROWS = (3, 0, 16, 8, 5, 12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_near_the_reference(backend: str, op: str, dtype: torch.dtype) -> None:
    ours = world(0, dtype, backend)
    theirs = replace(world(0, dtype), rows_dtype=ours.rows_dtype)
    wanted = CASES[op](theirs)(load_ops("reference"), SOME_ROWS).double()
    found = CASES[op](ours)(load_ops(backend), SOME_ROWS)
    error = (found.cpu().double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[dtype]
