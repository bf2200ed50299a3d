"""The comparisons the law tests make, apart from the tests so that planted violations can face
them too. Each raises AssertionError on the first differing bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.lab.check import same_bits
from sametoken.ops import Ops
from tests.law.cases import ROWS, Run


def assert_row_alone(run: Run, ops: Ops) -> None:
    """A row's bits are those it has alone: at every width, index and in every company."""
    alone = torch.cat([run(ops, [i]) for i in range(ROWS)])
    assert not torch.isnan(alone.double()).any(), "an output was never written"
    for width in range(1, ROWS + 1):
        _assert_rows(run(ops, range(width)), alone[:width], f"width {width}")
        last = list(range(ROWS - width, ROWS))
        _assert_rows(run(ops, last), alone[last], f"the last {width} rows")
    generator = torch.Generator().manual_seed(1)
    for trial in range(8):
        width = 2 + trial * 2
        company = torch.randperm(ROWS, generator=generator)[:width].tolist()
        _assert_rows(run(ops, company), alone[company], f"company {company}")


def _assert_rows(found: Tensor, wanted: Tensor, where: str) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert same_bits([a], [b]), f"row {i} differs in {where}"
