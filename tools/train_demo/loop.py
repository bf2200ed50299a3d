"""The two phases of training.

First trunk and head together on the corpus. Then the trunk is frozen, rounded to the precision it
ships in, and the head alone learns to follow it: on the corpus and on text the trunk itself wrote,
because that is what a decoder will show it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from data import batches
from decode import Generator
from losses import head_loss, trunk_loss
from model import Model
from optimizer import Optimizer, rate_scale
from torch import Tensor
from trunk import Trunk

BALANCE_WEIGHT, JOINT_WEIGHT = 0.01, 0.2
STEP_WEIGHTS = (
    1.0,
    0.8,
    0.6,
    0.4,
)  # of the chained steps: a late draft counts only if all before do


@dataclass(frozen=True)
class Plan:
    """Sizes and times of a run."""

    trunk_minutes: float
    head_minutes: float
    rows: int = 64
    length: int = 2048
    joint_steps: int = 2
    head_rows: int = 128
    head_length: int = 1024
    head_steps: int = 4
    pool_rows: int = 4096
    pool_share: float = 0.25  # of the head's time, spent on writing text
    compile: bool = True
    seed: int = 0


class Run:
    """What both phases share: device, precision, compiled functions, log."""

    def __init__(self, plan: Plan, device: torch.device, log: Path) -> None:
        self.plan = plan
        self.device = device
        self.log_path = log
        self.started = time.monotonic()
        wrap: Callable = torch.compile(dynamic=False) if plan.compile else lambda function: function
        self.trunk_loss = wrap(trunk_loss)
        self.head_loss = wrap(head_loss)

    def autocast(self) -> torch.autocast:
        """Products in bf16 on a GPU, in fp32 on a CPU."""
        on_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu)

    def compiled(self, model: Model | Trunk) -> None:
        """Compile layer by layer: equal layers share one compilation."""
        if not self.plan.compile:
            return
        torch._dynamo.config.recompile_limit = 64
        trunk = model.model if isinstance(model, Model) else model
        for layer in trunk.layers:
            layer.compile(dynamic=False)
        if isinstance(model, Model):
            model.mtp.compile(dynamic=False)

    def log(self, **entry: Any) -> None:
        """Append one line to the log and print it."""
        entry = {k: round(v, 4) if isinstance(v, float) else v for k, v in entry.items()}
        line = json.dumps(entry | {"seconds": round(time.monotonic() - self.started)})
        print(line, flush=True)
        with self.log_path.open("a") as file:
            file.write(line + "\n")


class Clock:
    """Progress by wall time; it starts at the first reading, after compilation."""

    def __init__(self, minutes: float) -> None:
        self.seconds = minutes * 60
        self.start: float | None = None

    def progress(self) -> float:
        """Return the fraction of the time that has passed."""
        now = time.monotonic()
        if self.start is None:
            self.start = now
        return (now - self.start) / self.seconds


def train_trunk(run: Run, model: Model, stream: Tensor) -> dict[str, Any]:
    """Train everything on the corpus until the clock is up."""
    plan = run.plan
    optimizer = Optimizer(model)
    clock = Clock(plan.trunk_minutes)
    progress, step = 0.0, 0
    for batch in batches(stream, plan.rows, plan.length + 1 + plan.joint_steps, plan.seed):
        loss, numbers = joint_loss(run, model, batch)
        loss.backward()
        optimizer.step(rate_scale(progress))
        if step % 50 == 0:
            values = {name: value.item() for name, value in numbers.items()}
            run.log(phase="trunk", step=step, progress=progress, **values)
        progress, step = clock.progress(), step + 1
        if progress >= 1:
            break
    values = {name: value.item() for name, value in numbers.items()}
    return {"steps": step, "tokens": step * plan.rows * plan.length, **values}


def joint_loss(run: Run, model: Model, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one batch of the first phase, and what to log."""
    length = run.plan.length
    weight = model.model.embed_tokens.weight
    with run.autocast():
        hidden, balance = model.model(batch[:, :length])
        loss, logits = run.trunk_loss(hidden, weight, batch[:, 1 : length + 1])
        numbers = {"loss": loss.detach(), "balance": balance.detach()}
        embedded = model.model.embed_tokens(batch)
        outputs, more = model.mtp.unroll(embedded, hidden, run.plan.joint_steps)
        loss = loss + BALANCE_WEIGHT * (balance + more)
        for index, output in enumerate(outputs, start=1):
            extra, agreement = run.head_loss(output, weight, logits, index)
            loss = loss + JOINT_WEIGHT / len(outputs) * extra
            numbers[f"agree{index}"] = agreement
    return loss, numbers


@torch.no_grad()
def shipped_trunk(run: Run, model: Model) -> Trunk:
    """Round the model to the precision it ships in; return the trunk as it will run, frozen."""
    for parameter in model.model.parameters():
        parameter.copy_(parameter.bfloat16())
    trunk = Trunk(model.shape).to(run.device)
    trunk.load_state_dict(model.model.state_dict())
    trunk.requires_grad_(False)
    return trunk.bfloat16() if run.device.type == "cuda" else trunk


def train_head(run: Run, model: Model, stream: Tensor) -> dict[str, Any]:
    """Train the head alone behind the frozen trunk."""
    plan = run.plan
    trunk = shipped_trunk(run, model)
    written = write_text(run, trunk, stream)
    # At rows of 1024 the compiler keeps a whole row of scores in one block, and Triton 3.6 fails.
    torch._inductor.config.triton.persistent_reductions = False
    run.compiled(trunk)
    optimizer = Optimizer(model.mtp)
    length, half = plan.head_length + plan.head_steps, plan.head_rows // 2
    rows = torch.Generator().manual_seed(plan.seed)
    clock = Clock(plan.head_minutes * (1 - plan.pool_share))
    progress, step = 0.0, 0
    for corpus in batches(stream, plan.head_rows - half, length, plan.seed + 1):
        chosen = torch.randint(len(written), (half,), generator=rows).to(run.device)
        batch = torch.cat([corpus, written[chosen].long()])
        loss, numbers = follow_loss(run, model, trunk, batch)
        loss.backward()
        optimizer.step(0.5 * rate_scale(progress, warm_up=0.02, constant=0.1))
        if step % 50 == 0:
            values = {name: value.item() for name, value in numbers.items()}
            run.log(phase="head", step=step, progress=progress, **values)
        progress, step = clock.progress(), step + 1
        if progress >= 1:
            break
    values = {name: value.item() for name, value in numbers.items()}
    own = {"own_tokens": written.numel(), "own_rows": len(written)}
    return {"steps": step, "tokens": step * plan.head_rows * plan.head_length, **own, **values}


def follow_loss(
    run: Run, model: Model, trunk: Trunk, batch: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one batch of the second phase, and what to log."""
    with torch.no_grad():
        hidden, _ = trunk(batch[:, : run.plan.head_length])
        logits = trunk.logits(hidden)
        embedded = trunk.embed_tokens(batch)
    numbers: dict[str, Tensor] = {}
    with run.autocast():
        outputs, balance = model.mtp.unroll(embedded, hidden, run.plan.head_steps)
        loss = BALANCE_WEIGHT * balance
        for index, output in enumerate(outputs, start=1):
            extra, agreement = run.head_loss(output, trunk.embed_tokens.weight, logits, index)
            loss = loss + STEP_WEIGHTS[index - 1] / sum(STEP_WEIGHTS) * extra
            numbers[f"agree{index}"] = agreement
    return loss, numbers | {"loss": loss.detach()}


def write_text(run: Run, trunk: Trunk, stream: Tensor) -> Tensor:
    """Let the trunk continue openings from the corpus, more than half of them greedily."""
    plan = run.plan
    length = plan.head_length + plan.head_steps
    random = torch.Generator(device=run.device).manual_seed(plan.seed)
    generator = Generator(trunk, plan.pool_rows, length)
    clock = Clock(plan.head_minutes * plan.pool_share)
    clock.progress()
    pools: list[Tensor] = []
    for openings in batches(stream, plan.pool_rows, length, plan.seed + 2):
        draw = torch.rand(2, plan.pool_rows, generator=random, device=run.device)
        prompt = 16 + (draw[0] * length / 2).long()
        temperature = (draw[1] - 0.6).clamp_min(0) / 0.4
        pools.append(generator.generate(openings, prompt, temperature).short())
        progress = clock.progress()
        run.log(phase="write", progress=progress, tokens=plan.pool_rows * length * len(pools))
        if progress * (len(pools) + 1) / len(pools) >= 1:
            return torch.cat(pools)
    raise AssertionError("batches never end")
