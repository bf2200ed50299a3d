"""Measure the demo model through the public engine: is it exact, and what does drafting accept?

    python tools/measure_demo.py --out benchmarks/demo-cpu.json

Greedy continuations of the held-out prompts in `tools/train_demo/prompts.json`, plainly and with
MTP drafts, one prompt at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import sametoken
from sametoken.lab.machine import device_name, versions
from sametoken.request import Generation, Stats

PROMPTS = Path(__file__).parent / "train_demo" / "prompts.json"
COMMAND = "python tools/measure_demo.py --out benchmarks/demo-cpu.json"


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-max", type=int, default=3)
    arguments = parser.parse_args()
    engine = sametoken.load(draft="mtp", draft_max=arguments.draft_max)
    kinds: dict[str, list[str]] = {}
    for prompt in json.loads(PROMPTS.read_text())["prompts"]:
        kinds.setdefault(prompt["kind"], []).append(prompt["text"])
    report = {
        "what": f"demo model, {engine.model.ops.backend} backend, greedy, held-out prompts",
        "command": COMMAND,
        "device": device_name(engine.model.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "tokens": arguments.tokens,
        "draft_max": arguments.draft_max,
    }
    for kind, prompts in kinds.items():
        report[kind] = measure(engine, prompts, arguments.tokens)
        print(kind, json.dumps(report[kind]))
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(engine: sametoken.Engine, prompts: list[str], tokens: int) -> dict[str, object]:
    """Plain and drafted runs of each prompt, in turn, so that both meet the same machine."""
    total, seconds = Stats(), {"plain": 0.0, "mtp": 0.0}
    made, differing = 0, 0
    for prompt in prompts:
        plain, seconds["plain"] = _timed(engine, prompt, tokens, 0, seconds["plain"])
        drafted, seconds["mtp"] = _timed(engine, prompt, tokens, None, seconds["mtp"])
        differing += plain.tokens != drafted.tokens
        made += len(drafted.tokens)
        _add(total, drafted.stats)
    return {
        "prompts": len(prompts),
        "tokens": made,
        "prompts_that_differ": differing,
        "acceptance_by_position": [round(share, 4) for share in total.acceptance()],
        "tokens_per_round": round(made / total.rounds, 4),
        "tokens_per_second": {name: round(made / s, 2) for name, s in seconds.items()},
    }


def _timed(
    engine: sametoken.Engine, prompt: str, tokens: int, draft_max: int | None, before: float
) -> tuple[Generation, float]:
    options = sametoken.Options(max_tokens=tokens, draft_max=draft_max)
    start = time.perf_counter()
    (done,) = engine.generate(prompt, options)
    return done, before + time.perf_counter() - start


def _add(total: Stats, one: Stats) -> None:
    total.rounds += one.rounds
    longer = len(one.drafted) - len(total.drafted)
    total.drafted += [0] * longer
    total.accepted += [0] * longer
    for i, (drafted, accepted) in enumerate(zip(one.drafted, one.accepted, strict=True)):
        total.drafted[i] += drafted
        total.accepted[i] += accepted


if __name__ == "__main__":
    main()
