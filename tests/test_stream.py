from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sametoken.config import read_config
from sametoken.stream import TextStream
from sametoken.text import Tokenizer
from tests.tiny import END_OF_TEXT, TURN_END, make_tokenizer

VOCABULARY = 331


@cache
def byte_level() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        return read(folder)


@cache
def spaced() -> Tokenizer:
    """A tokenizer whose decoder drops the space before the first token of what it is given."""
    words = ["▁the", "▁cat", "▁", "s", "at", "é", "▁▁"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="s")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens([TURN_END])
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        return read(folder)


@cache
def byte_fallback() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    parts = tokenizers.decoders
    backend.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse()])
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        return read(folder)


def read(folder: str) -> Tokenizer:
    raw = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "rope_parameters": {"rope_theta": 1e4},
    }
    return Tokenizer.from_folder(Path(folder), read_config(raw, "config.json"))


def until(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, character by character: the first stop to be complete, the longest of a tie."""
    for end in range(1, len(text) + 1):
        hit = max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        if hit is not None:
            return text[: end - len(hit)], hit
    return text, None


def pieces(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stops)
    return [stream.push(i) for i in ids] + [stream.flush()], stream


TEXT = st.text("aethc n.\nüß東京🙂👨\u200d\u0301\ufffd\0", max_size=12) | st.sampled_from(
    ["the cat sat on the mat", "über 東京 🙂", "👩\u200d🚀", f"a{TURN_END}b", f"{END_OF_TEXT}the"]
)
# Any byte may follow any other: most of these are not UTF-8, some ids are padding without text.
NOISE = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)


@st.composite
def token_lists(draw: st.DrawFn) -> list[int]:
    parts = draw(st.lists(TEXT.map(byte_level().encode) | NOISE, max_size=4))
    return [i for part in parts for i in part]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Tokens, and stops many of which are in their text."""
    ids = draw(token_lists())
    text = byte_level().decode(ids)
    inside = [
        text[at : at + draw(st.integers(1, 5))]
        for at in draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=3))
    ]
    near = [stop[:-1] + "!" for stop in inside]
    stops = draw(st.permutations(inside + near + draw(st.lists(TEXT, max_size=1))))
    return ids, [stop for stop in stops if stop]


@settings(max_examples=600, deadline=None)
@given(cases())
@example(([], ["a"]))
def test_the_pieces_make_up_the_text_before_the_first_stop(
    case: tuple[list[int], list[str]],
) -> None:
    ids, stops = case
    given, stream = pieces(byte_level(), ids, stops)
    assert ("".join(given), stream.stopped) == until(byte_level().decode(ids), stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.sampled_from(["at", " ", "és"])))
def test_a_decoder_that_knows_the_first_token_is_given_one(
    ids: list[int], stops: list[str]
) -> None:
    given, stream = pieces(spaced(), ids, stops)
    assert ("".join(given), stream.stopped) == until(spaced().decode(ids), stops)


@settings(max_examples=200, deadline=None)
@given(st.text("a€🙂\ufffd", max_size=8))
def test_code_points_in_single_bytes(text: str) -> None:
    ids = list(text.replace("\ufffd", "").encode())
    assert "".join(pieces(byte_fallback(), ids, [])[0]) == byte_fallback().decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=12))
def test_no_bytes_make_it_raise(ids: list[int]) -> None:
    pieces(byte_fallback(), ids, ["a"])


@settings(max_examples=200, deadline=None)
@given(token_lists())
def test_only_an_unfinished_end_is_held_back(ids: list[int]) -> None:
    stream, text = TextStream(byte_level(), []), ""
    for n, token in enumerate(ids, 1):
        text += stream.push(token)
        assert text == byte_level().decode(ids[:n]).rstrip("\ufffd")


def test_a_split_code_point_waits_for_its_end() -> None:
    ids = byte_level().encode("京")
    assert len(ids) > 1
    assert pieces(byte_level(), ids, [])[0] == [""] * (len(ids) - 1) + ["京", ""]
    assert pieces(byte_level(), ids[:-1], [])[0][-1] == byte_level().decode(ids[:-1]) != ""


def test_the_beginning_of_a_stop_waits_for_its_end() -> None:
    ids = [byte_level().encode(letter)[0] for letter in "xabay"]
    assert pieces(byte_level(), ids, ["abac"])[0] == ["x", "", "", "", "abay", ""]
    assert pieces(byte_level(), ids[:-1], ["abac"])[0] == ["x", "", "", "", "aba"]


def test_a_stop_may_end_inside_a_token() -> None:
    (token,) = byte_level().encode("th")
    given, stream = pieces(byte_level(), [token, token], ["h"])
    assert (given, stream.stopped) == (["t", "", ""], "h")


def test_the_stop_that_ends_first_wins_inside_a_token() -> None:
    (token,) = byte_level().encode(" the")
    assert byte_level().token_text(token) == " the"
    given, stream = pieces(byte_level(), [token], [" the", "th"])
    assert (given, stream.stopped) == ([" ", ""], "th")


def test_nothing_comes_after_a_stop() -> None:
    stream = TextStream(byte_level(), ["a"])
    for letter in "xab":
        stream.push(byte_level().encode(letter)[0])
    assert stream.stopped == "a"
    assert stream.push(byte_level().encode("c")[0]) == ""
    assert stream.flush() == ""
    assert stream.stopped == "a"


@pytest.mark.parametrize(
    ("stops", "text", "stopped"),
    [
        (["cd", "bc"], "a", "bc"),
        (["abcd", "bc"], "a", "bc"),
        (["bc", "abc"], "", "abc"),
        (["c", "abx"], "ab", "c"),
    ],
)
def test_which_of_several_stops_wins(stops: list[str], text: str, stopped: str) -> None:
    for split in (["abcd"], list("abcd"), ["abc", "d"]):
        ids = [i for part in split for i in byte_level().encode(part)]
        for order in (stops, stops[::-1]):
            given, stream = pieces(byte_level(), ids, order)
            assert ("".join(given), stream.stopped) == (text, stopped)


def test_special_tokens_are_not_shown_and_do_not_part_a_code_point() -> None:
    end = byte_level().encode(TURN_END)
    first, *rest = byte_level().encode("é")
    assert "".join(pieces(byte_level(), [*end, first, *end, *rest, *end], [])[0]) == "é"
