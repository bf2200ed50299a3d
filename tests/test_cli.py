"""The command line as a person meets it: the real entry point on real models."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from sametoken.cli import main
from tests.tiny import make_tiny


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def _run(*arguments: str, stdin: str = "") -> Done:
    """`sametoken ARGUMENTS` in this process, which spares the start of another."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["sametoken", *arguments])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "sametoken", "generate", "x", "-n", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 tokens in" in done.stderr


def test_generate_streams_text_and_reports_on_stderr() -> None:
    done = _run("generate", "def main():\n", "-n", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "12 tokens in" in done.stderr
    assert "accepted by position" in done.stderr


def test_generate_as_json_is_the_same_text_whatever_drafts() -> None:
    runs = [
        json.loads(_run("generate", "-", "--json", "-n", "16", *more, stdin="import os\n").stdout)
        for more in (["--draft", "none"], ["--draft", "mtp"], ["--draft", "ngram"])
    ]
    assert runs[0]["text"] == runs[1]["text"] == runs[2]["text"]
    assert runs[0]["usage"]["completion_tokens"] == len(runs[0]["tokens"])
    assert runs[0]["stats"]["drafted"] == []
    assert len(runs[1]["stats"]["acceptance"]) == 3


def test_chat_keeps_its_state_between_turns() -> None:
    done = _run("chat", "-n", "8", stdin="Write a function.\nAnd another.\n")
    assert done.returncode == 0, done.stderr
    reports = [line for line in done.stderr.splitlines() if "tokens in" in line]
    assert len(reports) == 2


def test_check_says_that_not_one_bit_differs() -> None:
    done = _run("check", "-n", "6", "--draft-max", "2")
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip().endswith("not one bit differs")


def test_check_on_a_checkpoint_without_tokenizer(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_moe_text", mtp=True)
    done = _run("check", "-m", str(tmp_path), "-n", "8", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["exact"] is True
    assert {v["drafter"] for v in report["verdicts"]} == {"mtp", "ngram"}


def test_inspect_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_moe_text", mtp=True)
    done = _run("inspect", str(tmp_path), "--json")
    found = json.loads(done.stdout)
    assert found["model_type"] == "qwen3_5_moe_text"
    assert found["mtp"] == "present"
    assert found["active_bytes"] < found["file_bytes"]
    assert "4 (2 DeltaNet, 2 attention)" in _run("inspect", str(tmp_path)).stdout


def test_a_head_that_is_declared_but_missing(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_moe_text", mtp_num_hidden_layers=1)
    inspected = _run("inspect", str(tmp_path))
    assert "declares an MTP layer, but the checkpoint has no mtp.* tensor" in inspected.stdout
    went_on = _run("check", "-m", str(tmp_path), "-n", "3")
    assert went_on.returncode == 0
    assert "note: drafting without MTP" in went_on.stderr
    asked = _run("check", "-m", str(tmp_path), "-n", "3", "--draft", "mtp")
    assert asked.returncode == 2
    assert "--draft mtp cannot be had" in asked.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0; it must be"),
        (["generate", "x", "--top-p", "0"], "top_p is 0.0; it must be in (0, 1]"),
        (["generate", "x", "--draft", "magic"], "--draft is 'magic'"),
        (["generate", "x", "--threads", "0"], "--threads is 0"),
        (["generate", "x", "--draft-max", "99"], "--draft-max is 99"),
        (["generate", "x", "--device", "cuda:7"], "--device cuda:7 cannot be used here"),
        (["generate", "one two three four", "--context", "4"], "do not fit a context of 4"),
        (["generate", "x", "-m", "./nowhere"], "./nowhere"),
        (["inspect", "./nowhere"], "./nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert "Traceback" not in done.stderr


def test_tune_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = _run("tune")
    assert done.returncode == 2
    assert "tune needs a GPU, and PyTorch finds none" in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_bench_ends_with_one_json_line() -> None:
    done = _run("bench", "--shape", "small", "-n", "6", "--repeats", "2", "--contexts", "7")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().splitlines()
    report = json.loads(line)
    assert report["law"] == "green"
    assert "plain" in done.stderr
    assert {"device", "versions", "read_bandwidth", "bytes_needed"} <= set(report)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--widths", "1,x"), ("--contexts", "0"), ("--acceptance", "0.5,0.9"), ("--acceptance", "a")],
)
def test_bench_names_a_bad_list(flag: str, value: str) -> None:
    done = _run("bench", "--shape", "small", flag, value)
    assert done.returncode == 2
    assert f"{flag} is {value!r}" in done.stderr
