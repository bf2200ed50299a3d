"""How results look: answers on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from sametoken.lab.bench import Measured
from sametoken.lab.check import Verdict
from sametoken.lab.inspection import Inspection
from sametoken.request import Chunk, Generation, Stats

err = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Something the user should know, on stderr."""
    err.print(f"note: {text}", markup=False, soft_wrap=True, style="yellow")


def show(chunks: Iterator[Chunk]) -> Generation:
    """Stream text to stdout as it is made; returns the finished sequence."""
    done = None
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        done = chunk.generation
    print(flush=True)
    assert done is not None, "a stream ends with the whole"
    return done


def report(done: Generation) -> None:
    """Statistics of one sequence, one line on stderr."""
    stats = done.stats
    parts = [f"{len(done.tokens)} tokens in {stats.rounds} rounds"]
    if stats.decode_seconds > 0:
        parts.append(f"{(len(done.tokens) - 1) / stats.decode_seconds:.1f} tokens/s")
    prompt = f"prompt {stats.prompt_tokens} tokens"
    if stats.cached_tokens:
        prompt += f" ({stats.cached_tokens} of them kept)"
    parts.append(f"{prompt} in {stats.prompt_seconds:.2f} s")
    if stats.drafted:
        parts.append(f"accepted by position {_shares(stats)}")
    err.print("; ".join(parts), markup=False, soft_wrap=True, style="dim")


def _shares(stats: Stats) -> str:
    return " ".join(f"{share:.2f}" for share in stats.acceptance())


def generation_json(done: Generation) -> dict[str, Any]:
    """A finished sequence for `--json`."""
    stats = done.stats
    fields: dict[str, Any] = {
        "text": done.text,
        "tokens": list(done.tokens),
        "finish_reason": done.finish_reason,
        "usage": {"prompt_tokens": stats.prompt_tokens, "completion_tokens": len(done.tokens)},
        "stats": asdict(stats) | {"acceptance": stats.acceptance()},
    }
    if done.picked and done.picked[0].logprob is not None:
        fields["logprobs"] = [
            {"token": p.token, "logprob": p.logprob, "top": [list(pair) for pair in p.top]}
            for p in done.picked
        ]
    return fields


def print_json(value: object) -> None:
    """One JSON value on one line."""
    print(json.dumps(value, ensure_ascii=False))


def print_verdict(v: Verdict) -> None:
    """One comparison, one line."""
    same = "same" if v.exact else _difference(v)
    shares = _shares(v.stats) if v.stats.drafted else "nothing drafted"
    print(
        f"prompt {v.prompt + 1}  {v.setting:<8} {v.drafter:<5} k={v.draft_max}  "
        f"plain {v.plain_digest}  speculative {v.digest}  {same:<6} accepted {shares}"
    )


def _difference(v: Verdict) -> str:
    if v.first_difference is not None:
        return f"DIFFERS at token {v.first_difference}"
    return "DIFFERS in the state left behind"


def print_summary(verdicts: list[Verdict]) -> None:
    """How many comparisons differ."""
    wrong = sum(not v.exact for v in verdicts)
    tally = f"{len(verdicts)} comparisons"
    print(f"{tally}, {wrong} differ" if wrong else f"{tally}, not one bit differs")


def print_inspection(found: Inspection) -> None:
    """A checkpoint, one property a line."""
    for name, text in _inspection_rows(found):
        print(f"{name:<13} {text}")


def _inspection_rows(x: Inspection) -> Iterator[tuple[str, str]]:
    yield "architecture", x.model_type
    yield "layers", f"{x.layers} ({x.delta_layers} DeltaNet, {x.attention_layers} attention)"
    yield "sizes", f"hidden {x.hidden_size}, vocabulary {x.vocab_size}, context {x.context}"
    if x.experts:
        yield "experts", f"{x.experts_per_token} of {x.experts} per token"
    yield "parameters", f"{x.parameters:,}"
    yield "weights", f"{_megabytes(x.file_bytes)} on disk"
    yield "formats", ", ".join(f"{name} × {count}" for name, count in x.formats.items())
    yield "active", f"{_megabytes(x.active_bytes)} read per token"
    head = f"{x.mtp}, {_megabytes(x.mtp_bytes)}" if x.mtp == "present" else x.mtp
    yield "MTP head", head


def print_figure(f: Measured) -> None:
    """One measured figure, one line on stderr."""
    speed = "" if f.tokens_per_second is None else f"{f.tokens_per_second:10.1f} tokens/s"
    share = "" if f.floor_share is None else f"  {f.floor_share:.0%} of the read floor"
    kept = "" if not f.acceptance else "  accepted " + " ".join(f"{a:.2f}" for a in f.acceptance)
    times = f"{f.median * 1e3:9.2f} ms  ({f.least * 1e3:.2f} to {f.most * 1e3:.2f})"
    line = f"{f.context:>6}  {f.what:<14} {times}{speed}{share}{kept}"
    err.print(line, markup=False, soft_wrap=True)


def print_tuned(
    key: str, tried: int, admitted: int, first: Sequence[float], best: Sequence[float]
) -> None:
    """One entry of a table of schedules: seconds by width with the first and with the best."""
    times = ", ".join(f"{a * 1e6:.1f} to {b * 1e6:.1f}" for a, b in zip(first, best, strict=True))
    print(f"{key:<28} {admitted} of {tried} schedules exact  {times} µs")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
