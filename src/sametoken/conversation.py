"""A chat with a model: turns in, streamed answers out, state kept between turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sametoken.engine import Engine
from sametoken.errors import RequestError
from sametoken.request import Chunk, Generation, Options


class Conversation:
    """One dialogue on one engine.

    A turn goes on from the state the last one left when the rendered dialogue begins with exactly
    those tokens, and starts afresh otherwise; by the law both give the same answer.
    """

    def __init__(self, engine: Engine, options: Options, system: str | None = None) -> None:
        if engine.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this model has none; see `generate`.")
        self._engine, self._tokenizer, self._options = engine, engine.tokenizer, options
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._last: Generation | None = None

    def ask(self, text: str) -> Iterator[Chunk]:
        """Add the user's turn and stream the model's."""
        self.messages.append({"role": "user", "content": text})
        ids = self._tokenizer.chat(self.messages)
        after = self._last.kept if self._last else None
        self._last = None
        options = replace(self._options, keep=True, after=after)
        for chunk in self._engine.stream(ids, options):
            if chunk.generation is not None:
                self._last = chunk.generation
                answer = {"role": "assistant", "content": chunk.generation.text}
                self.messages.append(answer)
            yield chunk
