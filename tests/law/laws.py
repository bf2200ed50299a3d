"""The comparisons the law tests make, apart from the tests so that planted violations can face
them too. Each raises AssertionError on the first differing bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.lab.check import same_bits
from sametoken.ops import Ops
from tests.law.backends import ROWS
from tests.law.cases import Run


def assert_row_alone(run: Run, ops: Ops, widths: Sequence[int]) -> None:
    """A row's bits are those it has alone: at each width, index and in changing company."""
    alone = torch.cat([run(ops, [i]) for i in range(ROWS)])
    assert not torch.isnan(alone.double()).any(), "an output was never written"
    generator = torch.Generator().manual_seed(1)
    for width in widths:
        _assert_rows(run(ops, range(width)), alone[:width], f"the first {width} rows")
        company = torch.randperm(ROWS, generator=generator)[:width].tolist()
        _assert_rows(run(ops, company), alone[company], f"company {company}")


def _assert_rows(found: Tensor, wanted: Tensor, where: str) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert same_bits([a], [b]), f"row {i} differs in {where}"
