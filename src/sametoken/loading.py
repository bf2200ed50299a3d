"""From a model's name to an engine that runs it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numba
import torch

from sametoken.cache import Cache
from sametoken.checkpoint import demo_path, open_checkpoint
from sametoken.config import ModelConfig
from sametoken.drafters import Drafter
from sametoken.drafters.mtp import MtpDrafter
from sametoken.drafters.ngram import NgramDrafter
from sametoken.engine import Engine
from sametoken.errors import CheckpointError, RequestError
from sametoken.model import Model
from sametoken.ops import load_ops
from sametoken.ops.qkv import rope_table
from sametoken.text import Tokenizer
from sametoken.weights import Tensors, read_weights

DRAFTERS = ("mtp", "ngram", "none")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Bounds the log of draft rows that recurrent state is rewound with, for every sequence.
LONGEST_DRAFT = 16
# Beyond this a context is asked for by name: state is reserved for every sequence up front.
DEFAULT_CONTEXT = 8192


def load(
    model: str | Path | None = None,
    *,
    draft: str | None = None,
    draft_max: int = 3,
    device: str = "cpu",
    dtype: str | None = None,
    context: int | None = None,
    slots: int = 8,
    threads: int = 1,
) -> Engine:
    """Load a Hugging Face folder or hub name; None is the demo model that ships with the package.

    draft: "mtp", "ngram" or "none"; None takes mtp if the checkpoint has a usable head. dtype: of
    matrices and activations; None keeps the checkpoint's on a GPU and takes float32 on a CPU.
    slots: sequences that can run at once, each of up to `context` positions. threads: of this
    process's CPU arithmetic, which change no bit; a small model gives several little to share, and
    on a busy machine they wait for each other, so more than one pays on large models only.
    Raises `CheckpointError` or `RequestError`; warns when a declared MTP head cannot be used.
    """
    if draft is not None and draft not in DRAFTERS:
        raise RequestError(f"--draft is {draft!r}; it must be one of {', '.join(DRAFTERS)}.")
    use_threads(threads)
    if not 0 <= draft_max <= LONGEST_DRAFT:
        raise RequestError(f"--draft-max is {draft_max}; it must be in [0, {LONGEST_DRAFT}].")
    checkpoint = open_checkpoint(demo_path() if model is None else model)
    folder = checkpoint.folder
    # A checkpoint without a tokenizer still runs on token ids, as `check` does.
    has_text = (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_folder(folder, checkpoint.config) if has_text else None
    return build(
        checkpoint,
        tokenizer,
        draft=draft,
        draft_max=draft_max,
        device=device_named(device),
        dtype=dtype_named(dtype, device, checkpoint.main_dtype),
        context=context,
        slots=slots,
    )


def build(
    checkpoint: Tensors,
    tokenizer: Tokenizer | None,
    *,
    draft: str | None,
    draft_max: int,
    device: torch.device,
    dtype: torch.dtype,
    context: int | None = None,
    slots: int = 8,
    backend: str | None = None,
    graphs: bool = True,
) -> Engine:
    """`load` for a checkpoint that is already open; without a tokenizer it speaks token ids.

    graphs: whether rounds on a GPU are captured once and replayed, which changes no bit.
    """
    config = checkpoint.config
    positions = _context(context, config)
    backend = backend or default_backend(device, dtype)
    weights = read_weights(checkpoint, _weight_dtype(checkpoint, backend, dtype), device)
    if weights.mtp_problem and draft == "mtp":
        raise CheckpointError(f"--draft mtp cannot be had: {weights.mtp_problem}.")
    if weights.mtp_problem and draft is None:
        warnings.warn(f"drafting without MTP: {weights.mtp_problem}", stacklevel=2)
    if tokenizer is not None:
        # Rows above the tokenizer's ids are padding: they have logits, but stand for nothing.
        weights = replace(weights, head=weights.head[: tokenizer.size])
    # A round on the device may place drafts beyond the last position that will be kept.
    rope = rope_table(config.attention, positions + LONGEST_DRAFT + 1, device)
    model = Model(config, weights, load_ops(backend), rope, dtype, device)
    cache = Cache(
        config,
        slots=slots,
        context=positions,
        longest_draft=LONGEST_DRAFT,
        with_mtp=weights.mtp is not None,
        dtype=dtype,
        device=device,
    )
    drafter = _drafter(draft, model, cache)
    rounds = None
    if backend == "triton":
        from sametoken.rounds import Rounds

        rounds = Rounds(model, cache, graphs=graphs)
    return Engine(
        model, cache, tokenizer=tokenizer, drafter=drafter, draft_max=draft_max, rounds=rounds
    )


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Triton's kernels on a GPU; compiled ones on a CPU, which keep rows in float32."""
    if device.type == "cuda":
        return "triton"
    return "cpu" if device.type == "cpu" and dtype == torch.float32 else "reference"


def _weight_dtype(checkpoint: Tensors, backend: str, dtype: torch.dtype) -> torch.dtype:
    """The CPU kernels read bf16 as it is stored, which is exact and half the bytes."""
    stored = {checkpoint.dtype(name) for name in checkpoint.names}
    return torch.bfloat16 if backend == "cpu" and stored == {torch.bfloat16} else dtype


def _drafter(name: str | None, model: Model, cache: Cache) -> Drafter | None:
    head = model.weights.mtp
    if name == "ngram":
        return NgramDrafter()
    if name == "none" or (name is None and head is None):
        return None
    if head is None:
        raise CheckpointError(
            "--draft mtp needs a checkpoint with an MTP head, and this one has none; "
            "use --draft ngram or --draft none."
        )
    if model.ops.backend == "triton":
        from sametoken.drafters.mtp_device import DeviceMtpDrafter

        return DeviceMtpDrafter(model, head, cache)
    return MtpDrafter(model, head, cache)


def use_threads(threads: int) -> None:
    """Set the threads of this process's CPU arithmetic; raises `RequestError` out of range."""
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    if not 1 <= threads <= most:
        raise RequestError(f"--threads is {threads}; this machine has 1 to {most}.")
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)


def device_named(name: str) -> torch.device:
    """A device that works here; raises `RequestError` for one that does not."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"--device {name} cannot be used here; use --device cpu.") from error
    return device


def dtype_named(name: str | None, device: str, stored: torch.dtype) -> torch.dtype:
    """A dtype by name; None is float32 on a CPU and the `stored` one elsewhere."""
    if name is None:
        return torch.float32 if device == "cpu" else stored
    if name not in DTYPES:
        raise RequestError(f"--dtype is {name!r}; it must be one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _context(wanted: int | None, config: ModelConfig) -> int:
    if wanted is None:
        return min(config.max_positions, DEFAULT_CONTEXT)
    if not 1 <= wanted <= config.max_positions:
        raise RequestError(
            f"--context is {wanted}; this model can hold 1 to {config.max_positions} positions."
        )
    return wanted
