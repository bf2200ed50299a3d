"""Train the demo model: ``python tools/train_demo/train.py --corpus DIR --out DIR``.

DIR is what ``corpus.py`` wrote. The schedule follows the wall clock, so a faster device sees more
text. ``--small`` is a run for a CPU, with fewer layers, for checking that everything works.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from data import load_stream
from evaluate import evaluate
from export import export, load, load_weights, save_weights
from loop import Plan, Run, train_head, train_trunk
from model import Model
from shape import SMALL, Shape
from tokenizers import Tokenizer

HEAD_SHARE = 0.2


def train(options: argparse.Namespace) -> None:
    """Run both phases, export, and measure what was exported."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    run = Run(make_plan(options), device, out / "log.jsonl")
    stream = load_stream(options.corpus / "train.u16.xz", device)
    model = Model(SMALL if options.small else Shape()).to(device)
    run.compiled(model)
    metrics = describe(options, run.plan, model, stream)
    if options.phase != "head":
        metrics["trunk"] = train_trunk(run, model, stream)
        save_weights(model, out / "joint.safetensors")
        write(out / "metrics.json", metrics)
    else:
        load_weights(model, out / "joint.safetensors")
        metrics["trunk"] = json.loads((out / "metrics.json").read_text())["trunk"]
    if options.phase != "trunk":
        metrics["head"] = train_head(run, model, stream)
        tokenizer = Tokenizer.from_file(str(options.corpus / "tokenizer.json"))
        export(model, tokenizer, out / "model")
        write(out / "metrics.json", metrics | measure(options, tokenizer, device))


def measure(
    options: argparse.Namespace, tokenizer: Tokenizer, device: torch.device
) -> dict[str, Any]:
    """Evaluate what was exported, in the precision it ships in."""
    shipped = load(options.out / "model").to(device)
    shipped = shipped.bfloat16() if device.type == "cuda" else shipped
    rows, generated = (8, 32) if options.small else (512, 256)
    return evaluate(shipped, tokenizer, held_out(options.corpus, device), rows, generated)


def make_plan(options: argparse.Namespace) -> Plan:
    """Divide the minutes between the phases."""
    head = HEAD_SHARE * options.minutes
    compile_ = not (options.no_compile or options.small)
    plan = Plan(options.minutes - head, head, compile=compile_, seed=options.seed)
    if options.small:
        return replace(plan, rows=4, length=256, head_rows=4, head_length=128, pool_rows=4)
    return plan


def held_out(corpus: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Read the held-out streams."""
    kinds = ("code", "prose", "chat")
    return {k: load_stream(corpus / f"heldout_{k}.u16.xz", device) for k in kinds}


def describe(
    options: argparse.Namespace, plan: Plan, model: Model, stream: torch.Tensor
) -> dict[str, Any]:
    """Return what a reader needs to place the numbers."""
    on_gpu = options.device.startswith("cuda")
    return {
        "command": "python tools/train_demo/train.py --corpus DIR --out DIR"
        f" --device {options.device} --minutes {options.minutes:g}"
        + (" --small" if options.small else ""),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus_tokens": len(stream),
        "plan": asdict(plan),
    }


def write(path: Path, metrics: dict[str, Any]) -> None:
    """Write the metrics so far."""
    path.write_text(json.dumps(metrics, indent=1) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for model, log and metrics")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=18.5, help="training time after compiling")
    parser.add_argument("--small", action="store_true", help="a smaller model, for a CPU")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    parser.add_argument("--phase", choices=("both", "trunk", "head"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
