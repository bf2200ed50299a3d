"""Choose the held-out prompts: ``python tools/train_demo/prompts.py --corpus DIR``.

Writes ``prompts.json``: beginnings of held-out files, cut at a line's end, and requests made from
held-out functions. Acceptance is measured on what the model writes after them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from evaluate import PROMPTS
from fetch import read_sources

COUNTS = {"code": 24, "prose": 8, "chat": 8}


def choose(corpus: Path) -> list[dict[str, str]]:
    """Return the prompts with their origin."""
    lines = (corpus / "heldout.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    versions = {s.name: (s.version, s.licence) for s in read_sources()}
    rng = random.Random(0)
    prompts = []
    for kind, count in COUNTS.items():
        eligible = [
            d for d in documents if d["kind"] == kind and len(d["text"]) > 2000 * (kind != "chat")
        ]
        for document in rng.sample(eligible, count):
            version, licence = versions[document["source"]]
            origin = f"{document['source']} {version}, {document['path']} ({licence})"
            text = opening(document["text"], kind)
            prompts.append({"kind": kind, "origin": origin, "text": text})
    return prompts


def opening(text: str, kind: str) -> str:
    """Cut a document's beginning: some lines, or everything up to the assistant's turn."""
    if kind == "chat":
        turn = "<|im_start|>assistant\n"
        return text[: text.index(turn) + len(turn)]
    return text[: text.index("\n", 600) + 1]


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by corpus.py")
    prompts = choose(parser.parse_args().corpus)
    PROMPTS.write_text(json.dumps({"prompts": prompts}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
