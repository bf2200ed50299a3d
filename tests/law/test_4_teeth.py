"""Law 4: the tests have teeth. Planted violations, each of a kind some engine ships, are caught."""

from __future__ import annotations

import pytest
import torch

from tests.law.backends import ALL_WIDTHS
from tests.law.cases import CASES, world
from tests.law.laws import assert_row_alone
from tests.law.planted import PLANTED


@pytest.mark.parametrize("violation", PLANTED)
def test_a_row_that_is_not_alone_is_caught(violation: str) -> None:
    op, ops = PLANTED[violation]
    with pytest.raises(AssertionError, match="differs in"):
        assert_row_alone(CASES[op](world(0, torch.float32)), ops, ALL_WIDTHS)
