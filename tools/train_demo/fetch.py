"""Fetch the sources named in ``sources.json`` and read their files without running any of them.

Three kinds: ``stdlib`` is the library of the running interpreter, ``wheel`` comes through pip,
``debian`` through apt (documentation packages ship the ``.rst`` texts their pages were made from).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SOURCES = Path(__file__).with_name("sources.json")


@dataclass(frozen=True)
class Source:
    """One package, pinned, with the licence its authors state."""

    name: str
    kind: Literal["stdlib", "wheel", "debian"]
    version: str
    licence: str
    held_out: bool = False


def read_sources() -> list[Source]:
    """Return the pinned list of sources."""
    return [Source(**entry) for entry in json.loads(SOURCES.read_text())]


def files(source: Source, downloads: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of every file of a source, fetching it first if need be."""
    if source.kind == "stdlib":
        yield from _folder(Path(sysconfig.get_paths()["stdlib"]))
    elif source.kind == "wheel":
        yield from _wheel(_fetch_wheel(source, downloads))
    else:
        yield from _debian(_fetch_debian(source, downloads))


def _fetch_wheel(source: Source, downloads: Path) -> Path:
    folder = downloads / f"{source.name}-{source.version}"
    if not any(folder.glob("*.whl")):
        pin = f"{source.name}=={source.version}"
        options = ["-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, pin], check=True)
    return next(folder.glob("*.whl"))


def _fetch_debian(source: Source, downloads: Path) -> Path:
    downloads.mkdir(parents=True, exist_ok=True)
    if not any(downloads.glob(f"{source.name}_*.deb")):
        pin = f"{source.name}={source.version}"
        subprocess.run(["apt-get", "-q", "download", pin], check=True, cwd=downloads)
    return next(downloads.glob(f"{source.name}_*.deb"))


def _folder(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), path.read_bytes()


def _wheel(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith((".py", ".rst", ".txt", ".md")) and ".dist-info/" not in name:
                yield name, archive.read(name)
            elif name.endswith(".dist-info/METADATA"):
                _, _, description = archive.read(name).partition(b"\n\n")
                yield name + ".md", description


def _debian(path: Path) -> Iterator[tuple[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", str(path), folder], check=True)
        for file in sorted(Path(folder).rglob("*")):
            name = file.relative_to(folder).as_posix().removesuffix(".gz")
            if not name.endswith((".rst", ".rst.txt", ".txt")) or not file.is_file():
                continue
            data = file.read_bytes()
            yield name, gzip.decompress(data) if file.suffix == ".gz" else data
