"""A model's files: a Hugging Face folder or hub name → its config and memory-mapped tensors.

A checkpoint is hostile until checked. Nothing in it is executed, no pickle is opened, every file
is named by this module or checked to lie in the folder, and whatever is missing, damaged or
contradictory raises one `CheckpointError` here rather than a traceback later.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sametoken.config import Json, ModelConfig, read_config
from sametoken.errors import CheckpointError

# What is fetched from the hub: never a pickle, never code.
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LFS_POINTER = b"version https://git-lfs"


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a folder, or download a hub name such as `org/name` unless it is in the cache.

    Raises `CheckpointError` when there is no such model, or its files cannot be used.
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Checkpoint(Path(path))
    if os.path.isfile(path):
        raise _not_a_folder(path)
    if isinstance(model, Path) or os.path.isabs(path) or model.startswith((".", "~")):
        raise CheckpointError(f"{path} is no folder; check the path of the model.")
    return Checkpoint(_download(model))


def demo_path() -> Path:
    """The folder of the demo model that ships with the package."""
    return Path(__file__).parent / "demo"


def read_json(path: Path) -> Json:
    """The object a JSON file holds; raises `CheckpointError` if it is missing or holds none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; re-download the model.") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); check the file."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON; re-download the model.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object; re-download the model.")
    return found


def reason_of(error: Exception) -> str:
    """The first sentence of another library's complaint, to be put inside one of ours."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0].rstrip(".")


class Checkpoint:
    """The config and the named tensors of one folder. Tensors are views of the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards = _open_shards(folder)
        self.names = frozenset(self._shards)
        self.config = _read_config(folder)

    def tensor(self, name: str) -> Tensor:
        """One tensor, memory-mapped: nothing is read until it is used."""
        try:
            found: Tensor = self._shards[name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is in a format that is not supported "
                f"({reason_of(error)}); use the bf16 release of the model."
            ) from error
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return tuple(self.tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one tensor as it is stored."""
        return self.tensor(name).dtype

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensor(name).nbytes for name in self.names)

    @cached_property
    def main_dtype(self) -> torch.dtype:
        """The floating dtype that most bytes of the tensors have."""
        held: Counter[torch.dtype] = Counter()
        for name in sorted(self.names):
            tensor = self.tensor(name)
            if tensor.is_floating_point():
                held[tensor.dtype] += tensor.nbytes
        if not held:
            raise CheckpointError(f"{self.folder} holds no floating-point tensor.")
        return held.most_common(1)[0][0]

    def digest(self) -> str:
        """SHA-256 over the names, dtypes, shapes and bytes of all tensors; reads every byte."""
        total = hashlib.sha256()
        for name in sorted(self.names):
            tensor = self.tensor(name)
            total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()


def _open_shards(folder: Path) -> dict[str, Any]:
    """Tensor name → the open file that holds it."""
    index = folder / "model.safetensors.index.json"
    # A folder with both is read as transformers reads it.
    if index.exists() and not (folder / "model.safetensors").exists():
        return _open_indexed(index)
    shard = _open_shard(_only_file(folder))
    return dict.fromkeys(shard.keys(), shard)


def _open_indexed(index: Path) -> dict[str, Any]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{index} lacks a 'weight_map' object; re-download the model.")
    for name, file in where.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(
                f"{index} places tensor {name} in {file!r}, which is no safetensors file of the "
                "folder itself; get the model from a source you trust."
            )
    shards = {file: _open_shard(index.parent / file) for file in sorted(set(where.values()))}
    held = {file: frozenset(shard.keys()) for file, shard in shards.items()}
    for name, file in where.items():
        if name not in held[file]:
            raise CheckpointError(
                f"{index} places tensor {name} in {file}, which does not hold it; "
                "re-download the model."
            )
    return {name: shards[file] for name, file in where.items()}


def _is_plain_name(file: str) -> bool:
    return file.endswith(".safetensors") and not set(file) & set("/\\:\0")


def _only_file(folder: Path) -> Path:
    """The one safetensors file of a folder without an index."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = [path for path in files if path.suffix == ".safetensors"]
    named = [path for path in found if path.name == "model.safetensors"]
    if len(found) == 1 or named:
        return (named or found)[0]
    if found:
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files but no model.safetensors.index.json "
            "to say which tensor is where; re-download the model."
        )
    for path in files:
        if path.suffix == ".gguf":
            raise _not_a_folder(str(path))
    for path in files:
        if path.suffix in _PICKLES:
            raise CheckpointError(
                f"{folder} holds its weights as a pickle ({path.name}), and pickles are never "
                "loaded because they can run code; use a safetensors release of the model."
            )
    raise CheckpointError(f"{folder} holds no safetensors file; give the folder of a model.")


def _not_a_folder(file: str) -> CheckpointError:
    if file.endswith(".gguf"):
        return CheckpointError(
            f"{file} is a GGUF file, which this version does not read yet; "
            "use the folder of a safetensors release."
        )
    return CheckpointError(f"{file} is a file; give the folder that holds the model.")


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; re-download the model.") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason_of(error)}); check the file."
        ) from error
    except SafetensorError as error:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer and not the weights; run git lfs pull."
                ) from error
        raise CheckpointError(
            f"{path} is truncated or damaged ({reason_of(error)}); re-download the model."
        ) from error


def _read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    config = read_config(read_json(path), str(path))
    generation = folder / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.exists() else None
    if found is None:
        return config
    ids = found if isinstance(found, list) else [found]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(
            f"{generation} has eos_token_id = {found!r} where an id or a list of ids is needed."
        )
    return replace(config, eos_ids=tuple(ids))


def _download(name: str) -> Path:
    # Half a second to import, and only hub names need it.
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
    except errors.HFValidationError as error:
        reason = "is neither a folder here nor a hub name of the form org/name; check the name"
        raise CheckpointError(f"{name!r} {reason}.") from error
    except errors.GatedRepoError as error:
        reason = "is gated; accept its terms on the hub and log in with hf auth login"
        raise CheckpointError(f"{name} {reason}.") from error
    except errors.RepositoryNotFoundError as error:
        reason = "is neither a folder here nor a public model on the hub; check the name"
        raise CheckpointError(f"{name} {reason}, or log in with hf auth login.") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "is no folder here, is not in the cache, and the hub cannot be reached"
        raise CheckpointError(f"{name} {reason}; go online or give a folder.") from error
    except Exception as error:  # whatever the transport or the disk may raise on the way
        raise CheckpointError(
            f"{name} could not be downloaded ({reason_of(error)}); try again."
        ) from error
