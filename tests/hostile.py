"""Drafters that try to change the output. None of them may."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sametoken.drafters import Drafter, Seen, Wish
from sametoken.track import Track


class Blind:
    """Base of drafters that need no hidden rows."""

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        return [self.draft(wish) for wish in wishes]

    def draft(self, wish: Wish) -> list[int]:
        raise NotImplementedError

    def observe(self, seen: Sequence[Seen]) -> None:
        pass

    def forget(self, track: Track) -> None:
        pass


class RandomTokens(Blind):
    """Tokens drawn from the whole vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.random = vocabulary, random.Random(0)

    def draft(self, wish: Wish) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(wish.length)]


class EndToken(Blind):
    """The end token, every time."""

    def __init__(self, token: int) -> None:
        self.token = token

    def draft(self, wish: Wish) -> list[int]:
        return [self.token] * wish.length


class Scripted(Blind):
    """Knows what plain decoding says after each prompt, and bends it."""

    def __init__(self, plain: dict[tuple[int, ...], Sequence[int]], vocabulary: int) -> None:
        self.plain, self.vocabulary = plain, vocabulary

    def draft(self, wish: Wish) -> list[int]:
        prompt = tuple(wish.track.ids[: wish.prompt])
        said = len(wish.track.ids) - wish.prompt
        return self.bend(self.plain[prompt], said, wish.length)

    def bend(self, plain: Sequence[int], said: int, length: int) -> list[int]:
        raise NotImplementedError


class Shifted(Scripted):
    """Right tokens, one position early."""

    def bend(self, plain: Sequence[int], said: int, length: int) -> list[int]:
        return list(plain[said + 1 : said + 1 + length])


class AlwaysWrong(Scripted):
    """The right token's neighbour."""

    def bend(self, plain: Sequence[int], said: int, length: int) -> list[int]:
        return [(token + 1) % self.vocabulary for token in plain[said : said + length]]


class CorrectUntilLast(Scripted):
    """Right but for the last token of every draft."""

    def bend(self, plain: Sequence[int], said: int, length: int) -> list[int]:
        draft = list(plain[said : said + length])
        if draft:
            draft[-1] = (draft[-1] + 1) % self.vocabulary
        return draft


class ChangingLength:
    """Another drafter whose drafts are cut to another length every round, 0 among them."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.random = inner, random.Random(0)

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        drafts = self.inner.propose(wishes)
        return [draft[: self.random.randint(0, len(draft))] for draft in drafts]

    def observe(self, seen: Sequence[Seen]) -> None:
        self.inner.observe(seen)

    def forget(self, track: Track) -> None:
        self.inner.forget(track)
