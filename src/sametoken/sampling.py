"""How a request wants its tokens picked. Pure settings, checked on construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sametoken.errors import RequestError

# OpenAI's API refuses more than 20 alternatives; so does every server that follows it.
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the pick op. The default is greedy.

    temperature: 0 is greedy. top_k: 0 keeps all. top_p in (0, 1], min_p in [0, 1].
    repetition_penalty (> 0, 1 is off) divides positive and multiplies negative logits of tokens in
    the prompt or the output; presence_penalty and frequency_penalty are subtracted for tokens in
    the output, once or per occurrence. logit_bias adds to a token's logit. seed keys the noise.
    logprobs: how many alternatives to report beside the picked token, or None for no report.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "≥ 0")
        _require(self.top_k >= 0, "top_k", self.top_k, "≥ 0 (0 keeps every token)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _require(0 < penalty < float("inf"), "repetition_penalty", penalty, "> 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(abs(getattr(self, name)) < float("inf"), name, getattr(self, name), "finite")
        for token, bias in self.logit_bias.items():
            _require(token >= 0 and bias == bias, "logit_bias", {token: bias}, "id → number")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "in [0, 2^64)")
        if self.logprobs is not None:
            within = 0 <= self.logprobs <= MAX_LOGPROBS
            _require(within, "logprobs", self.logprobs, f"in [0, {MAX_LOGPROBS}]")

    @property
    def penalises(self) -> bool:
        """Whether the pick depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _require(holds: bool, name: str, found: object, wanted: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {found}; it must be {wanted}.")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one row is asked for: the token at position `len(past)`.

    `past` holds every token of the row's own sequence up to and including the row, drafts before
    it among them and nothing after; the first `prompt` of them are the prompt.
    """

    sampling: Sampling
    past: Sequence[int]
    prompt: int


@dataclass(frozen=True, slots=True)
class Picked:
    """A picked token; `logprob` and `top` (id, logprob) are of the model's own distribution,
    before penalties, bias, temperature and filters, and present when the request asks for them.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
