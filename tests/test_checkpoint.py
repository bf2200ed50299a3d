from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from sametoken.checkpoint import Checkpoint, demo_path, open_checkpoint
from sametoken.errors import CheckpointError
from tests.messages import assert_one_sentence

INDEX = "model.safetensors.index.json"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 6,
    "intermediate_size": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "eos_token_id": 3,
}
TENSORS = {
    "model.embed_tokens.weight": torch.arange(31 * 8).reshape(31, 8).bfloat16(),
    "model.norm.weight": torch.linspace(0, 1, 8),
    "scale": torch.tensor(0.5),
    "steps": torch.tensor(7),
}


def one_file(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    where = {}
    for i, (name, tensor) in enumerate(reversed(TENSORS.items())):
        where[name] = f"part-{i}.safetensors"
        save_file({name: tensor}, folder / where[name])
    write_index(folder, where)
    return folder


def write_index(folder: Path, where: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def move_tensor(folder: Path, name: str, file: Any) -> None:
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, where | {name: file})


def header(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


@pytest.mark.parametrize("make", [one_file, sharded])
def test_tensors_are_what_was_saved_and_are_not_copied(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(make(tmp_path))
    assert checkpoint.folder == tmp_path
    assert checkpoint.names == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert checkpoint.dtype(name) == tensor.dtype
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.tensor(name).data_ptr() == checkpoint.tensor(name).data_ptr()
    assert checkpoint.nbytes == 31 * 8 * 2 + 8 * 4 + 4 + 8
    assert checkpoint.main_dtype == torch.bfloat16


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    norm = open_checkpoint(one_file(tmp_path)).tensor("model.norm.weight")
    assert torch.equal(norm, TENSORS["model.norm.weight"])


def test_a_whole_file_is_read_rather_than_an_index(tmp_path: Path) -> None:
    one_file(sharded(tmp_path))
    (tmp_path / INDEX).write_text("left behind")
    assert open_checkpoint(tmp_path).names == TENSORS.keys()


def test_a_name_may_be_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_file(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("model").folder == Path("model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/model").folder == tmp_path / "model"


def test_the_digest_is_of_the_tensors_and_not_of_the_files(tmp_path: Path) -> None:
    digest = open_checkpoint(one_file(tmp_path / "a")).digest()
    assert open_checkpoint(sharded(tmp_path / "b")).digest() == digest


@pytest.mark.parametrize(
    "changed",
    [
        TENSORS | {"steps": torch.tensor(8)},
        TENSORS | {"steps": torch.tensor([7])},
        TENSORS | {"steps": torch.tensor(7, dtype=torch.uint64)},
        {("step" if name == "steps" else name): t for name, t in TENSORS.items()},
    ],
    ids=["byte", "shape", "dtype", "name"],
)
def test_the_digest_sees_every_change(changed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    digest = open_checkpoint(one_file(tmp_path)).digest()
    save_file(changed, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).digest() != digest


@pytest.mark.parametrize(
    ("generation", "ids"),
    [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 5}, (5,)), ({}, (3,))],
)
def test_end_tokens_of_the_generation_config_win(
    generation: dict[str, Any], ids: tuple[int, ...], tmp_path: Path
) -> None:
    one_file(tmp_path)
    assert open_checkpoint(tmp_path).config.eos_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(tmp_path).config.eos_ids == ids


def test_the_demo_model_lies_in_the_package() -> None:
    assert demo_path().name == "demo"
    assert (demo_path().parent / "checkpoint.py").exists()


FLOAT = '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
BAD_SHARDS = {
    "empty": b"",
    "text": b"I am no checkpoint at all, and this is my text.",
    "no data": header(FLOAT),
    "half the data": header(FLOAT, bytes(4)),
    "surplus data": header(FLOAT, bytes(12)),
    "header cut": header(FLOAT)[:-3],
    "header longer than the file": struct.pack("<Q", 2**40) + FLOAT.encode(),
    "header of another shape": header(FLOAT.replace("[2]", "[3]"), bytes(8)),
    "negative axis": header(FLOAT.replace("[2]", "[-2]"), bytes(8)),
    "unknown dtype": header(FLOAT.replace("F32", "Q99"), bytes(8)),
}


@pytest.mark.parametrize("content", BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (one_file(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert_one_sentence(caught.value, "model.safetensors", "damaged", "re-download")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = one_file(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for size in range(0, len(whole), 23):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data) and None


def place(file: Any) -> Callable[[Path], None]:
    return lambda folder: move_tensor(folder, "steps", file)


TRUST = ("steps", INDEX, "trust")
BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing shard": (remove("part-1.safetensors"), ("part-1.safetensors", "missing")),
    "tensor in another shard": (
        place("part-1.safetensors"),
        ("steps", "part-1.safetensors", INDEX),
    ),
    "parent folder": (place("../part-2.safetensors"), TRUST),
    "absolute path": (place("/etc/passwd.safetensors"), TRUST),
    "below": (place("x/part-2.safetensors"), TRUST),
    "backslash": (place("..\\part-2.safetensors"), TRUST),
    "zero byte": (place("part-2\0.safetensors"), TRUST),
    "pickle in the index": (place("pytorch_model.bin"), TRUST),
    "number in the index": (place(2), TRUST),
    "index cut": (write(INDEX, '{"weight_map": {'), (INDEX, "JSON")),
    "index of bytes": (write(INDEX, b"\xff\xfe\x00"), (INDEX, "JSON")),
    "index too deep": (write(INDEX, "[" * 200_000), (INDEX, "JSON")),
    "index is a list": (write(INDEX, "[]"), (INDEX, "object")),
    "index without map": (write(INDEX, "{}"), (INDEX, "weight_map")),
    "empty index": (write(INDEX, '{"weight_map": {}}'), (INDEX, "weight_map")),
    "map is a list": (write(INDEX, '{"weight_map": ["steps"]}'), (INDEX, "weight_map")),
    "no index": (remove(INDEX), ("4 safetensors files", INDEX)),
    "no config": (remove("config.json"), ("config.json", "missing")),
    "config cut": (write("config.json", '{"model_type":'), ("config.json", "JSON")),
    "config is a list": (write("config.json", "[]"), ("config.json", "object")),
    "unknown model": (write("config.json", '{"model_type": "llama"}'), ("config.json", "llama")),
    "bad end token": (
        write("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        ("generation_config.json", "eos_token_id"),
    ),
    "generation config cut": (write("generation_config.json", "{"), ("generation_config.json",)),
    "LFS pointer": (
        write("part-0.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ("part-0.safetensors", "git lfs pull"),
    ),
}


@pytest.mark.parametrize(("damage", "names"), BAD_FOLDERS.values(), ids=BAD_FOLDERS.keys())
def test_a_bad_folder_is_refused_in_one_sentence(
    damage: Callable[[Path], None], names: tuple[str, ...], tmp_path: Path
) -> None:
    open_checkpoint(sharded(tmp_path))
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert_one_sentence(caught.value, *names)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_never_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert_one_sentence(caught.value, name, "never loaded", "safetensors release")


def test_gguf_is_not_read_yet(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    for given in (path, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(given)
        assert_one_sentence(caught.value, "model.gguf", "not read yet", "safetensors")


def test_a_format_torch_lacks_is_named_when_it_is_used(tmp_path: Path) -> None:
    text = '{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (one_file(tmp_path) / "model.safetensors").write_bytes(header(text, bytes(3)))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path).tensor("x")
    assert_one_sentence(caught.value, "tensor x", "F6_E2M3")


def test_a_checkpoint_of_integers_has_no_main_dtype(tmp_path: Path) -> None:
    save_file({"steps": torch.tensor(7)}, one_file(tmp_path) / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(tmp_path).main_dtype
    assert_one_sentence(caught.value, str(tmp_path), "floating-point")


def test_an_empty_folder_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert_one_sentence(caught.value, str(tmp_path), "no safetensors file")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = one_file(tmp_path) / "model.safetensors"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file)
    assert_one_sentence(caught.value, str(file), "folder")


@pytest.mark.parametrize(
    "name", ["/no/model", "./no/model", "../no", "~/no/model", "~no-one/model", Path("no/model")]
)
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name: str | Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name)
    assert_one_sentence(caught.value, "no folder", "check the path")


@pytest.mark.parametrize("name", ["", "a/b/c", "bad name/model", "model\0"])
def test_what_is_no_name_at_all_is_said_so(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name)
    assert_one_sentence(caught.value, repr(name), "org/name")


class Hub(BaseHTTPRequestHandler):
    """Speaks enough of the hub's protocol to serve the folder of its server."""

    server: HubServer
    commit = "c" * 40

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models")
        files = {file.name: file.read_bytes() for file in self.server.folder.iterdir()}
        if path.startswith("/org/name/resolve"):
            file = path.rpartition("/")[2]
            self.server.asked.add(file)
            self.reply(200, files[file], {"ETag": f'"{file}"', "X-Repo-Commit": self.commit})
        elif path.startswith("/org/name/tree"):
            tree = [
                {"type": "file", "oid": "0" * 40, "size": len(data), "path": name}
                for name, data in files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif path.startswith("/org/name"):
            siblings = [{"rfilename": name} for name in files]
            model = {"id": "org/name", "sha": self.commit, "siblings": siblings}
            self.reply(200, json.dumps(model).encode())
        else:
            code = "GatedRepo" if path.startswith("/org/gated") else "RepoNotFound"
            self.reply(401, b"{}", {"X-Error-Code": code})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.folder, self.asked = folder, set[str]()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer(sharded(tmp_path / "remote"))
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_name_is_downloaded_without_pickles_and_code(hub: HubServer) -> None:
    for name in ("pytorch_model.bin", "modeling.py", "chat_template.jinja"):
        (hub.folder / name).write_bytes(b"x")
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.digest() == Checkpoint(hub.folder).digest()
    parts = {f"part-{i}.safetensors" for i in range(4)}
    assert hub.asked == parts | {"config.json", INDEX, "chat_template.jinja"}


@pytest.mark.parametrize(
    ("name", "words"), [("org/gated", "accept its terms"), ("org/other", "check the name")]
)
def test_a_model_the_hub_refuses(name: str, words: str, hub: HubServer) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name)
    assert_one_sentence(caught.value, name, words, "hf auth login")


def test_a_hub_name_works_offline_once_it_is_in_the_cache(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoint("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("org/name").names == TENSORS.keys()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("org/other")
    assert_one_sentence(caught.value, "org/other", "cannot be reached", "give a folder")
