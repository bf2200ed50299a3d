"""Build the corpus: ``python tools/train_demo/corpus.py --out DIR``.

Writes to DIR the tokenizer, the training stream and the held-out streams (16-bit token ids,
xz-compressed), and a manifest of what came from where. Held-out sources give no training text.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from chat import conversations
from documents import Document, Seen, clean_code, clean_prose
from fetch import Source, files, read_sources
from tokenizer import END_OF_TEXT, train_tokenizer
from tokenizers import Tokenizer

CHAT_SHARE = 0.10
TOKENIZER_SAMPLE = 30_000_000  # characters; merges no longer change much beyond this


def build(out: Path) -> None:
    """Fetch, clean, split, tokenise and write everything."""
    train, held_out = collect(read_sources(), out / "downloads")
    rng = random.Random(0)
    rng.shuffle(train)
    train = with_chat(train, rng)
    held_out = with_chat(held_out, rng)
    tokenizer = train_tokenizer(sample(train))
    tokenizer.save(str(out / "tokenizer.json"))
    write_stream(out / "train.u16.xz", train, tokenizer)
    for kind in ("code", "prose", "chat"):
        chosen = [document for document in held_out if document.kind == kind]
        write_stream(out / f"heldout_{kind}.u16.xz", chosen, tokenizer)
    with (out / "heldout.jsonl").open("w") as file:
        file.writelines(json.dumps(asdict(document)) + "\n" for document in held_out)
    write_manifest(out / "manifest.json", train, held_out)


def collect(sources: list[Source], downloads: Path) -> tuple[list[Document], list[Document]]:
    """Return the cleaned documents of the training and of the held-out sources."""
    seen = Seen()
    train: list[Document] = []
    held_out: list[Document] = []
    # Held-out sources first: a file that both sides have then counts as held out.
    for source in sorted(sources, key=lambda source: not source.held_out):
        documents = [d for d in read_source(source, downloads) if seen.is_new(d.text)]
        (held_out if source.held_out else train).extend(documents)
        print(source.name, len(documents), sum(len(d.text) for d in documents), flush=True)
    return train, held_out


def read_source(source: Source, downloads: Path) -> Iterator[Document]:
    """Yield the documents of one source."""
    for path, data in files(source, downloads):
        if (text := clean_code(path, data)) is not None:
            yield Document(source.name, path, "code", text)
        elif (text := clean_prose(path, data)) is not None:
            yield Document(source.name, path, "prose", text)


def with_chat(documents: list[Document], rng: random.Random) -> list[Document]:
    """Add conversations made from the code until they hold their share of the characters."""
    made = [
        Document(document.source, document.path, "chat", text)
        for document in documents
        if document.kind == "code"
        for text in conversations(document.text, rng)
    ]
    rng.shuffle(made)
    budget = CHAT_SHARE / (1 - CHAT_SHARE) * sum(len(document.text) for document in documents)
    kept = []
    for document in made:
        budget -= len(document.text)
        if budget < 0:
            break
        kept.append(document)
    mixed = documents + kept
    rng.shuffle(mixed)
    return mixed


def sample(documents: list[Document]) -> Iterator[str]:
    """Yield texts up to the size the tokenizer is trained on."""
    used = 0
    for document in documents:
        if document.kind != "chat":
            yield document.text
            used += len(document.text)
        if used > TOKENIZER_SAMPLE:
            return


def write_stream(path: Path, documents: Iterable[Document], tokenizer: Tokenizer) -> None:
    """Write the documents as one stream of ids, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    texts = [document.text for document in documents]
    ids: list[np.ndarray] = []
    for start in range(0, len(texts), 512):
        batch = tokenizer.encode_batch_fast(texts[start : start + 512], add_special_tokens=False)
        ids.extend(np.array([*encoding.ids, end], dtype="<u2") for encoding in batch)
    stream = np.concatenate(ids)
    print(path.name, len(stream), "tokens", flush=True)
    # Ids are two bytes wide: pb=1 and lp=1 tell the coder about that period.
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27, "pb": 1, "lp": 1, "lc": 3}
    path.write_bytes(lzma.compress(stream.tobytes(), filters=[lzma2]))


def write_manifest(path: Path, train: list[Document], held_out: list[Document]) -> None:
    """Record name, version, licence and cleaned size of every source."""
    files_, sizes = Counter[str](), Counter[str]()
    for document in train + held_out:
        files_[f"{document.source}/{document.kind}"] += 1
        sizes[f"{document.source}/{document.kind}"] += len(document.text.encode())
    entries = [
        asdict(source)
        | {
            f"{kind}_{what}": counter[f"{source.name}/{kind}"]
            for kind in ("code", "prose", "chat")
            for what, counter in (("files", files_), ("bytes", sizes))
        }
        for source in read_sources()
    ]
    total = {kind: sum(e[f"{kind}_bytes"] for e in entries) for kind in ("code", "prose", "chat")}
    path.write_text(json.dumps({"total_bytes": total, "sources": entries}, indent=1) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    build(out)


if __name__ == "__main__":
    main()
