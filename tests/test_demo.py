"""The demo model: what ships is whole, drafts, and survives transformers' own classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sametoken
from sametoken.checkpoint import demo_path, open_checkpoint
from sametoken.request import Options
from tests.engines import demo

PROMPT = "def count_words(text):\n"
# The wheel must stay small enough to be a dependency nobody thinks about.
MOST_BYTES = 24_000_000


def test_it_is_small_and_whole() -> None:
    folder = demo_path()
    assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES * 1.05
    assert open_checkpoint(folder).nbytes <= MOST_BYTES
    assert (folder / "README.md").read_text().strip()


def test_it_drafts_with_its_own_head() -> None:
    (done,) = demo().generate(PROMPT, Options(max_tokens=60))
    assert done.stats.acceptance()[0] > 0.4


def test_it_answers_in_a_chat_and_ends() -> None:
    engine = demo()
    assert engine.tokenizer is not None
    ask = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    (done,) = engine.generate(engine.tokenizer.chat(ask), Options(max_tokens=300))
    assert "def " in done.text
    assert "<|im_" not in done.text


def test_its_tokenizer_is_the_one_transformers_reads() -> None:
    own = demo().tokenizer
    assert own is not None
    theirs = AutoTokenizer.from_pretrained(demo_path())
    text = "class Äpfel(dict):\n    '''3.14 ≈ π'''\n\treturn {'键': 42}  # 🙂\n<|im_end|>"
    assert own.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert own.render_chat(messages) == rendered


def test_saved_by_transformers_it_says_the_same(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_path() / name, tmp_path)
    # transformers drops the MTP head but keeps its declaration.
    assert json.loads((tmp_path / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    with pytest.warns(UserWarning, match="declares an MTP layer, but the checkpoint has no"):
        saved = sametoken.load(tmp_path)
    options = Options(max_tokens=40, ignore_eos=True)
    assert saved.generate(PROMPT, options)[0].tokens == demo().generate(PROMPT, options)[0].tokens


def test_greedy_text_is_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    assert demo().tokenizer is not None
    ids = demo().tokenizer.encode(PROMPT)
    with torch.no_grad():
        theirs = model.generate(
            torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None
        )
    (ours,) = demo().generate(ids, Options(max_tokens=40, ignore_eos=True))
    assert list(ours.tokens) == theirs[0, len(ids) :].tolist()
