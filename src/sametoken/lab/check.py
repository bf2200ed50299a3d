"""check: plain decoding against speculation, on a built-in prompt set, bit by bit.

Plain runs have each prompt alone with draft length 0. Speculative runs have all prompts at once,
so that company is tried together with drafting. Compared are the tokens, and the keys, values and
recurrent state that each sequence leaves behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from sametoken.drafters import Drafter
from sametoken.drafters.ngram import NgramDrafter
from sametoken.engine import Engine
from sametoken.request import Generation, Options, Stats
from sametoken.sampling import Sampling

# Short, of several kinds: what is drafted well, what repeats itself, what is neither.
PROMPTS = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "import json\nimport os\n\n\nclass Config:\n    def __init__(self, path):\n",
    "for i in range(10):\n    for j in range(10):\n        print(",
    "The following example shows how to read a file line by line and ",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "Zwölf Boxkämpfer jagen Viktor 越过大坝 quer über den Sylter Deich. ",
)
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(
        temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2, seed=7
    ),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One prompt under one setting and one drafter, against the same prompt decoded plainly.

    `first_difference` is the index of the first token that differs, None if all are equal;
    `same_state` tells the same of keys, values and recurrent state.
    """

    prompt: int
    setting: str
    drafter: str
    draft_max: int
    plain_digest: str
    digest: str
    first_difference: int | None
    same_state: bool
    stats: Stats

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return self.first_difference is None and self.same_state

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self) | {"exact": self.exact, "acceptance": self.stats.acceptance()}


def check(engine: Engine, draft_max: int, tokens: int) -> Iterator[Verdict]:
    """Yield a verdict for every prompt, setting and drafter, with drafts of up to `draft_max`.

    `tokens` is how many each sequence continues for; end tokens are ignored.
    """
    prompts = [_ids(engine, text) for text in PROMPTS]
    for setting, sampling in SETTINGS.items():
        base = Options(sampling, max_tokens=tokens, ignore_eos=True, keep=True)
        plain = [_run(engine, [ids], replace(base, draft_max=0))[0] for ids in prompts]
        for name, drafter in _drafters(engine).items():
            options = replace(base, drafter=drafter, draft_max=draft_max)
            drafted = _run(engine, prompts, options)
            for i, (old, new) in enumerate(zip(plain, drafted, strict=True)):
                yield _compare(i, setting, name, draft_max, old, new)


@dataclass(frozen=True, slots=True)
class _Outcome:
    generation: Generation
    state: list[Tensor]


def _ids(engine: Engine, text: str) -> list[int]:
    """The prompt's tokens; without a tokenizer its bytes, folded into the vocabulary."""
    if engine.tokenizer is not None:
        return list(engine.tokenizer.encode(text))
    return [byte % engine.model.config.vocab_size for byte in text.encode()]


def _drafters(engine: Engine) -> dict[str, Drafter]:
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
    if engine.drafter is not None and not isinstance(engine.drafter, NgramDrafter):
        drafters = {"mtp": engine.drafter, **drafters}
    return drafters


def _run(engine: Engine, prompts: list[list[int]], options: Options) -> list[_Outcome]:
    outcomes = []
    for generation in engine.generate(prompts, options):
        track = generation.kept
        assert track is not None, "check keeps every sequence"
        engine.settle(track)
        outcomes.append(_Outcome(generation, engine.cache.snapshot(track.lease, track.computed)))
        engine.release(track)
    return outcomes


def _compare(
    prompt: int, setting: str, drafter: str, length: int, plain: _Outcome, new: _Outcome
) -> Verdict:
    return Verdict(
        prompt=prompt,
        setting=setting,
        drafter=drafter,
        draft_max=length,
        plain_digest=digest(plain.generation.tokens),
        digest=digest(new.generation.tokens),
        first_difference=first_difference(plain.generation.tokens, new.generation.tokens),
        same_state=same_bits(plain.state, new.state),
        stats=new.generation.stats,
    )


def digest(tokens: Sequence[int]) -> str:
    """SHA-256 of the token ids, its first 12 hexadecimal digits."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs or that only one of them has."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether all tensors hold the same bits: NaN equals itself, 0.0 does not equal −0.0."""
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))
        for x, y in zip(a, b, strict=True)
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
