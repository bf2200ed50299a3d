"""Law 5: nobody goes around the door. Models reach arithmetic through the ops alone."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import sametoken
from sametoken.ops import BACKENDS, OP_NAMES

PACKAGE = Path(sametoken.__file__).parent

# What the models may use torch for: to hold rows and to join them, never to compute.
HARMLESS = {"cat", "stack", "tensor", "split", "empty", "Tensor", "dtype", "device"}
# The modules between the checkpoint and the tokens that run in the forward pass.
MODELS = ("model.py", "mtp.py", "step.py", "drafters/mtp.py")


def _torch_names(source: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    }


def _imports(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def _arithmetic(source: str) -> list[ast.BinOp]:
    """Matrix products written as operators."""
    nodes = ast.walk(ast.parse(source))
    return [n for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult)]


@pytest.mark.parametrize("module", MODELS)
def test_models_compute_with_ops_only(module: str) -> None:
    source = (PACKAGE / module).read_text()
    assert _torch_names(source) <= HARMLESS
    assert not _arithmetic(source)
    assert "torch.nn" not in " ".join(_imports(source))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OP_NAMES)
def test_every_op_has_a_home_with_a_contract(op: str, backend: str) -> None:
    home = import_module(BACKENDS[backend].format(op=op))
    assert callable(getattr(home, op))
    contract = import_module(f"sametoken.ops.{op}").__doc__ or ""
    assert contract.startswith(f"{op}: ")
    assert "Shapes:" in contract


@pytest.mark.parametrize("op", OP_NAMES)
def test_references_need_no_gpu_compiler(op: str) -> None:
    source = (PACKAGE / "ops" / f"{op}.py").read_text()
    assert not {"triton", "numba"} & {name.split(".")[0] for name in _imports(source)}


def test_nothing_imports_transformers_or_pickle() -> None:
    for path in PACKAGE.rglob("*.py"):
        roots = {name.split(".")[0] for name in _imports(path.read_text())}
        assert not roots & {"transformers", "pickle", "subprocess"}, path
