"""How each contract is run: block, step, warps and pipeline depth, by kernel and weight shape.

A schedule never changes a bit: that is tested for every schedule of the table (tests/law). What
was tuned for a device ships in `schedules/<device name>.json`; what `sametoken tune` found on this
machine lies in the user's cache and goes before it. Any other device takes the first schedule,
which is always right.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_SHIPPED = Path(__file__).with_name("schedules")


class Schedule(NamedTuple):
    """block: outputs of a program; step: of the sum; warps; stages: loads in flight."""

    block: int
    step: int
    warps: int
    stages: int


# By kernel and rows in a tile; the wide tiles are for prompts.
FIRST: dict[str, dict[int, Schedule]] = {
    "linear": {
        16: Schedule(64, 128, 4, 4),
        64: Schedule(64, 64, 4, 4),
        128: Schedule(128, 64, 8, 3),
    },
    "glu": {
        16: Schedule(16, 128, 4, 4),
        64: Schedule(64, 64, 4, 3),
        128: Schedule(64, 64, 8, 3),
    },
    "experts": {
        16: Schedule(32, 128, 2, 3),
        64: Schedule(64, 64, 4, 3),
        128: Schedule(64, 64, 8, 3),
    },
    "combine": {
        16: Schedule(16, 512, 2, 4),
        64: Schedule(64, 64, 4, 3),
        128: Schedule(128, 64, 8, 3),
    },
    "router": {16: Schedule(16, 128, 4, 3)},
}


def key(kernel: str, outs: int, size: int, tile: int) -> str:
    """How the table names a kernel on a weight [outs, size] with a tile of rows."""
    return f"{kernel} {outs}x{size} {tile}"


def schedule(kernel: str, outs: int, size: int, tile: int, device: torch.device) -> Schedule:
    """The schedule of a kernel for a weight [outs, size] and a tile of rows on a device."""
    tuned = table(device.type, device.index or 0).get(key(kernel, outs, size, tile))
    return FIRST[kernel][tile] if tuned is None else tuned


@cache
def table(kind: str, index: int) -> dict[str, Schedule]:
    """What was tuned for a device; `sametoken tune` tries schedules by writing to it."""
    if kind != "cuda":
        return {}
    name = torch.cuda.get_device_name(index)
    return _stored(_SHIPPED / f"{name}.json") | _stored(own_path(name))


def own_path(device_name: str) -> Path:
    """Where the table lies that this machine tuned for a device."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sametoken" / "schedules" / f"{device_name}.json"


def _stored(found: Path) -> dict[str, Schedule]:
    if not found.is_file():
        return {}
    stored: dict[str, list[int]] = json.loads(found.read_text())["schedules"]
    return {name: Schedule(*values) for name, values in stored.items()}
