"""What every test shares: unwritten memory is poison, and one thread is enough."""

from __future__ import annotations

import os

import pytest
import torch

from sametoken.loading import use_threads
from tests.interpreter import add_in_order

# Read when a kernel is first imported: without a GPU, Triton's kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    add_in_order()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-setting",
        action="store_true",
        help="streams of the law for every drafter, draft length, sampling setting and backend, "
        "instead of a choice of them (320 streams instead of 48)",
    )


@pytest.fixture(autouse=True, scope="session")
def _poison_unwritten_memory() -> None:
    # In this mode torch fills what `empty` returns with NaN, so an op that leaves a hole, or
    # reads a position nobody wrote, cannot pass unnoticed.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    use_threads(1)
