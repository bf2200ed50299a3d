"""Tokens → text as it becomes certain, up to a stop string.

Text is certain when no later token can change it: a code point may be split over tokens, and a
suffix may be the beginning of a stop string. What is released, put together, is what decoding all
tokens at once gives, however the text is split.
"""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.text import Tokenizer

# How the tokenizer shows bytes that are no code point, or not yet.
_REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one sequence. `stopped` is the stop string that was hit.

    The stop string that is complete first wins, the longest of those that end together; the text
    ends just before it, and nothing after it is ever returned.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._pieces, self._stops = _Pieces(tokenizer), tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Take one token; returns the text that is now certain."""
        if self.stopped is not None:
            return ""
        return self._release(self._pieces.push(token), last=False)

    def flush(self) -> str:
        """What was held back; for the end of the sequence."""
        if self.stopped is not None:
            return ""
        return self._release(self._pieces.flush(), last=True)

    def _release(self, new: str, *, last: bool) -> str:
        text = self._held + new
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, end, self.stopped = min(found)
            return text[:end]
        end = len(text) - (0 if last else self._possible_stop(text))
        self._held = text[end:]
        return text[:end]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest suffix that a stop string could begin with."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._stops)), 0)


class _Pieces:
    """Text of each token in its context.

    The library's `DecodeStream` would do for byte-level tokenizers, but it raises on some
    sequences of byte-fallback ones, and cannot be flushed. This is the same window: tokens back to
    the last place where the text was whole, so that a decoder that treats a first token
    differently still sees one token before the new ones.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._whole = 0  # tokens of the window whose text has been given
        self._given = 0  # characters of the window's text that have been given

    def push(self, token: int) -> str:
        # They have no text, and a long run of them must not lengthen the window.
        if self._tokenizer.is_special(token):
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if new and certain == text:
            del self._window[: self._whole]
            self._whole = len(self._window)
            self._given = len(self._tokenizer.decode(self._window))
        return new

    def flush(self) -> str:
        text = self._tokenizer.decode(self._window)
        new, self._given = text[self._given :], len(text)
        return new
