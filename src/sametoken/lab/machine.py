"""What a measurement was made on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    from sametoken import __version__

    return {
        "sametoken": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
