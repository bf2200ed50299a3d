from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from sametoken.config import ModelConfig, read_config
from sametoken.errors import CheckpointError, RequestError, TemplateError
from sametoken.text import Tokenizer
from tests.messages import assert_one_sentence
from tests.tiny import END_OF_TEXT, TURN_END, make_tokenizer

CHAT = [{"role": "user", "content": "über <b>東京</b> & 🙂"}]
TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"


def config(vocab_size: int = 331) -> ModelConfig:
    raw = {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "rope_parameters": {"rope_theta": 1e4},
    }
    return read_config(raw, "config.json")


def read(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, config())


def with_template(folder: Path, template: str) -> Tokenizer:
    make_tokenizer(folder)
    (folder / TEMPLATE).write_text(template, encoding="utf-8")
    return read(folder)


@pytest.mark.parametrize("text", ["", "the cat", "  two  spaces\n\n", "über 東京 🙂", "\ufffd\0"])
def test_text_comes_back(text: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = read(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_parsed_hidden_and_nameable(tmp_path: Path) -> None:
    backend = make_tokenizer(tmp_path)
    tokenizer = read(tmp_path)
    end = backend.token_to_id(TURN_END)
    ids = tokenizer.encode(f"cat{TURN_END}sat")
    assert ids == [*tokenizer.encode("cat"), end, *tokenizer.encode("sat")]
    assert tokenizer.decode(ids) == "catsat"
    assert tokenizer.token_text(end) == TURN_END
    assert [tokenizer.is_special(i) for i in ids] == [i == end for i in ids]


def test_added_tokens_that_are_not_special_are_shown(tmp_path: Path) -> None:
    backend = make_tokenizer(tmp_path)
    backend.add_tokens(["<think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read(tmp_path)
    (token,) = tokenizer.encode("<think>")
    assert tokenizer.decode([token]) == "<think>"
    assert not tokenizer.is_special(token)


def test_no_token_is_added_to_a_text(tmp_path: Path) -> None:
    backend = make_tokenizer(tmp_path)
    plain = read(tmp_path).encode("cat")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, backend.token_to_id(END_OF_TEXT))],
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert read(tmp_path).encode("cat") == plain


def test_settings_of_training_do_not_cut_or_fill_a_text(tmp_path: Path) -> None:
    backend = make_tokenizer(tmp_path)
    plain = read(tmp_path).encode("the cat sat")
    assert len(plain) > 2
    for setting in (
        lambda: backend.enable_truncation(max_length=2),
        lambda: backend.enable_padding(length=64),
    ):
        setting()
        backend.save(str(tmp_path / "tokenizer.json"))
        assert read(tmp_path).encode("the cat sat") == plain


def test_size_counts_to_the_highest_id(tmp_path: Path) -> None:
    backend = make_tokenizer(tmp_path)
    tokenizer = read(tmp_path)
    assert tokenizer.size == backend.token_to_id(TURN_END) + 1
    assert tokenizer.decode([tokenizer.size, 330]) == ""
    assert tokenizer.token_text(330) == ""


def test_size_of_a_vocabulary_with_holes(tmp_path: Path) -> None:
    model = tokenizers.models.WordLevel({"a": 0, "b": 40}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert read(tmp_path).size == 41
    with pytest.raises(CheckpointError):
        Tokenizer.from_folder(tmp_path, config(40))


def test_more_ids_than_the_embedding_has_rows(tmp_path: Path) -> None:
    size = make_tokenizer(tmp_path).get_vocab_size()
    assert Tokenizer.from_folder(tmp_path, config(size)).size == size
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path, config(size - 1))
    assert_one_sentence(caught.value, "tokenizer.json", "vocab_size", str(size - 1))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert_one_sentence(caught.value, "tokenizer.json", "missing")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    ],
)
def test_a_damaged_tokenizer_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert_one_sentence(caught.value, "tokenizer.json", "cannot be read", "re-download")


def test_a_prompt_that_is_no_text(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    # What Python makes of an argument or of standard input that is not UTF-8.
    broken = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(RequestError) as caught:
        read(tmp_path).encode(broken)
    assert_one_sentence(caught.value, "prompt", "character 3", "UTF-8")


def test_the_dialogue_is_rendered_and_encoded(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path,
        "{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m.role }}:{{ m.content }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}\n"
        "assistant:\n"
        "    {% endif %}\n",
    )
    skipped = [*CHAT, {"role": "skip", "content": "x"}]
    # Blocks leave neither their line nor their indentation behind.
    said = f"user:über <b>東京</b> & 🙂{TURN_END}\n"
    assert tokenizer.render_chat(skipped) == said + "assistant:\n"
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == said
    assert tokenizer.chat(CHAT) == tokenizer.encode(tokenizer.render_chat(CHAT))
    assert tokenizer.encode(TURN_END)[0] in tokenizer.chat(CHAT)


@pytest.mark.parametrize(
    ("template", "variables", "text"),
    [
        ("{{ messages | tojson }}", {}, json.dumps(CHAT, ensure_ascii=False)),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", {}, '{\n "b": 1,\n "a": 2\n}'),
        ("{{ tools is none }} {{ documents is none }}", {}, "True True"),
        ("{{ tools[0] }} {{ thinking }}", {"tools": ["t"], "thinking": False}, "t False"),
        ("{{ bos_token is defined }} {{ pad_token }}", {}, f"False {END_OF_TEXT}"),
        ("{% generation %}x{% endgeneration %}y", {}, "xy"),
        ("{{ strftime_now('%Y') }}", {}, str(datetime.now().year)),
        ("{% for i in range(9) %}{{ i }}{% break %}{% endfor %}", {}, "0"),
    ],
)
def test_what_templates_are_written_for(
    template: str, variables: dict[str, Any], text: str, tmp_path: Path
) -> None:
    assert with_template(tmp_path, template).render_chat(CHAT, **variables) == text


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    names = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for value, text in (("c", "c"), (names, "d")):
        (tmp_path / CONFIG).write_text(json.dumps({"chat_template": value}))
        assert read(tmp_path).render_chat(CHAT) == text
    (tmp_path / TEMPLATE).write_text("j")
    assert read(tmp_path).render_chat(CHAT) == "j"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    roles = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    chat = {"chat_template": "{{ bos_token }}{{ eos_token is defined }}"}
    (tmp_path / CONFIG).write_text(json.dumps(roles | chat))
    assert read(tmp_path).render_chat(CHAT) == "<s>False"


def test_a_folder_without_a_template_can_still_generate(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    for remove in (False, True):
        if remove:
            (tmp_path / CONFIG).unlink()
        tokenizer = read(tmp_path)
        assert tokenizer.encode("cat")
        with pytest.raises(TemplateError) as caught:
            tokenizer.chat(CHAT)
        assert_one_sentence(caught.value, str(tmp_path), "no chat template", "generate")


@pytest.mark.parametrize(
    "template",
    [b"{% for m in", b"{{ 1 +", b"{% nonsense %}", b"\xff\xfe\xfd", b"{{" + b"(" * 100_000],
    ids=["block", "expression", "tag", "bytes", "deep"],
)
def test_a_template_that_cannot_be_read_leaves_generation_alone(
    template: bytes, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / TEMPLATE).write_bytes(template)
    tokenizer = read(tmp_path)
    assert tokenizer.encode("cat")
    with pytest.raises(TemplateError) as caught:
        tokenizer.chat(CHAT)
    assert_one_sentence(caught.value, TEMPLATE, "cannot be read", "generate")


@pytest.mark.parametrize("value", [3, {}, [], [{"name": "tool_use", "template": "x"}], ["x"]])
def test_a_template_of_another_type(value: Any, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TemplateError) as caught:
        read(tmp_path).chat(CHAT)
    assert_one_sentence(caught.value, CONFIG, "cannot be read", "generate")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('No system turn. Use another model.') }}", "No system turn"),
        ("{{ missing.name }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages + 1 }}", "list"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_a_template_that_fails(template: str, reason: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(TemplateError) as caught:
        tokenizer.chat(CHAT)
    assert_one_sentence(caught.value, TEMPLATE, reason, "generate")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include 'tokenizer.json' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(TemplateError) as caught:
        tokenizer.chat(CHAT)
    assert_one_sentence(caught.value, TEMPLATE)


def test_a_damaged_tokenizer_config_is_named(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    tokenizer = read(tmp_path)
    assert tokenizer.encode("cat")
    with pytest.raises(CheckpointError) as caught:
        tokenizer.chat(CHAT)
    assert_one_sentence(caught.value, CONFIG, "JSON")
