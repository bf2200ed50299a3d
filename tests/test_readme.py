"""Numbers in the README are those of the JSON files under `benchmarks/`."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_quotes_the_measurement() -> None:
    readme = (ROOT / "README.md").read_text()
    measured = json.loads((ROOT / "benchmarks" / "demo-cpu.json").read_text())
    for kind in ("code", "prose"):
        found = measured[kind]
        shares = " / ".join(f"{share:.2f}" for share in found["acceptance_by_position"])
        row = re.search(rf"^\| {kind}.*$", readme, re.MULTILINE)
        assert row is not None, f"the README has no row for {kind}"
        assert f"| {found['tokens']:,} | {found['prompts_that_differ']} |" in row[0]
        assert f"| {shares} | {found['tokens_per_round']:.2f} |" in row[0]
        speed = found["tokens_per_second"]
        assert f"| {speed['mtp'] / speed['plain']:.2f}× |" in row[0]
    assert measured["versions"]["torch"] in readme


def test_the_share_before_repetition_is_the_training_logs() -> None:
    readme = (ROOT / "README.md").read_text()
    log = json.loads((ROOT / "benchmarks" / "demo-training.json").read_text())
    found = log["acceptance"]["prompts_code"]["before_repetition"]["accepted_by_position"]
    assert "are " + " / ".join(f"{share:.2f}" for share in found) in readme


def test_every_folder_of_the_map_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    named = re.findall(r"^\| `((?:src|tests|tools|benchmarks)/[\w/.]*)", readme, re.MULTILINE)
    assert len(named) > 8
    for path in named:
        assert (ROOT / path).exists(), path
