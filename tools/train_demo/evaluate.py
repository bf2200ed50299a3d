"""Measure a trained model: held-out loss, samples, and how many drafted tokens are accepted.

Greedy verification changes no token, so the text of a draft-and-verify loop is the greedy text, and
what the head drafts after any prefix of it depends on that prefix alone. The text is therefore
generated once, the head is unrolled over all of it, and the rounds are then walked: a round starts
at a row, drafts, keeps the drafts that equal the text, adds the trunk's own token, and the next
round starts behind that. The counts are those of the loop itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import batches
from decode import Generator
from losses import trunk_loss
from model import Model
from tokenizers import Tokenizer
from torch import Tensor

DRAFTS = 3
REPEAT = 16
PROMPTS = Path(__file__).with_name("prompts.json")


@dataclass
class Acceptance:
    """Rounds, and of them those whose first 1, 2, … drafts were all accepted."""

    rounds: int
    accepted: list[int]

    def report(self) -> dict[str, Any]:
        """Return the unconditional rates by position and the tokens per round."""
        rates = [round(count / max(1, self.rounds), 4) for count in self.accepted]
        return {
            "rounds": self.rounds,
            "accepted_by_position": rates,
            "tokens_per_round": round(1 + sum(rates), 4),
        }


@torch.no_grad()
def held_out_loss(model: Model, stream: Tensor, limit: int) -> float:
    """Return the mean next-token loss over at most ``limit`` windows of 1024 tokens."""
    rows, length = 4, 1024
    total, count = 0.0, 0
    for batch in batches(stream, rows, length + 1, seed=0):
        hidden, _ = model.model(batch[:, :-1])
        loss, _ = trunk_loss(hidden, model.model.embed_tokens.weight, batch[:, 1:])
        total, count = total + loss.item(), count + 1
        if count * rows >= min(limit, len(stream) // (length + 1) - rows):
            return total / count
    raise AssertionError("batches never end")


@torch.no_grad()
def drafts(model: Model, tokens: Tensor, steps: int) -> Tensor:
    """Return [B, T - steps, steps]: what each chained step proposes after each row."""
    length = tokens.shape[1] - steps
    hidden, _ = model.model(tokens[:, :length])
    outputs, _ = model.mtp.unroll(model.model.embed_tokens(tokens), hidden, steps)
    return torch.stack([model.model.logits(out).argmax(-1) for out in outputs], dim=-1)


def walk(
    tokens: Tensor, proposed: Tensor, starts: list[int], stops: list[int], ends: set[int]
) -> Acceptance:
    """Walk the rounds of every row from its prompt's end up to its stop."""
    steps = proposed.shape[-1]
    windows = tokens.unfold(1, steps, 1)[:, 2 : 2 + proposed.shape[1]]
    right = (proposed[:, : windows.shape[1]] == windows).cumprod(-1).sum(-1).tolist()
    result = Acceptance(0, [0] * steps)
    for text, counts, start, stop in zip(tokens.tolist(), right, starts, stops, strict=True):
        # A round at row t knows token t + 1 (the trunk's) and drafts the ones behind it.
        row = start - 1
        while row < min(stop - 1, len(counts)) and text[row + 1] not in ends:
            accepted = counts[row]
            result.rounds += 1
            for position in range(accepted):
                result.accepted[position] += 1
            if ends.intersection(text[row + 2 : row + 2 + accepted]):
                break
            row += accepted + 1
    return result


def repeats_at(text: list[int], start: int) -> int:
    """Return where generated text first repeats sixteen of its own tokens, or its length.

    A small model's greedy text ends in loops, and a loop is easy to draft.
    """
    seen: set[tuple[int, ...]] = set()
    for index in range(start, len(text) - REPEAT + 1):
        window = tuple(text[index : index + REPEAT])
        if window in seen:
            return index
        seen.add(window)
    return len(text)


def acceptance(
    model: Model,
    generator: Generator,
    tokens: Tensor,
    prompt: Tensor,
    ends: set[int],
    temperature: float = 0.0,
) -> tuple[dict[str, Any], Tensor]:
    """Generate after the prompts and count; also return the text."""
    heat = torch.full((len(tokens),), temperature, device=tokens.device)
    text = generator.generate(tokens, prompt, heat)
    proposed, starts = drafts(model, text, DRAFTS), prompt.tolist()
    stops = [repeats_at(row, start) for row, start in zip(text.tolist(), starts, strict=True)]
    report = walk(text, proposed, starts, [text.shape[1]] * len(starts), ends).report()
    report["before_repetition"] = walk(text, proposed, starts, stops, ends).report()
    return report, text


def evaluate(
    model: Model, tokenizer: Tokenizer, streams: dict[str, Tensor], rows: int, generated: int
) -> dict[str, Any]:
    """Return every number and some samples; ``model`` is in the precision it ships in."""
    report: dict[str, Any] = {"held_out_loss": {}, "acceptance": {}}
    for name, stream in streams.items():
        report["held_out_loss"][name] = round(held_out_loss(model, stream, rows // 2), 4)
        report["acceptance"][f"held_out_{name}"] = stream_acceptance(model, stream, rows, generated)
    report["acceptance"] |= (found := prompt_acceptance(model, tokenizer, generated))["acceptance"]
    report["samples"] = found["samples"]
    return report


def stream_acceptance(model: Model, stream: Tensor, rows: int, generated: int) -> dict[str, Any]:
    """Measure on windows of a held-out stream: 128 tokens of prompt, then generated ones."""
    prompt, total = 128, 128 + generated
    rows = min(rows, len(stream) // total)
    tokens = next(batches(stream, rows, total, seed=1))
    lengths = torch.full((rows,), prompt, device=stream.device)
    generator = Generator(model.model, rows, total)
    greedy, _ = acceptance(model, generator, tokens, lengths, {0})
    sampled, _ = acceptance(model, generator, tokens, lengths, {0}, temperature=0.8)
    followed = [round(rate, 4) for rate in agreement(model, tokens)]
    return greedy | {"sampled_at_0.8": sampled, "agreement_on_held_out_text": followed}


@torch.no_grad()
def agreement(model: Model, tokens: Tensor) -> list[float]:
    """Return how often each chained step picks the trunk's choice, on text nobody generated."""
    proposed = drafts(model, tokens, DRAFTS)
    hidden, _ = model.model(tokens)
    choices = model.model.logits(hidden).argmax(-1)
    length = proposed.shape[1]
    same = [proposed[..., k] == choices[:, k + 1 : k + 1 + length] for k in range(DRAFTS)]
    return [equal.float().mean().item() for equal in same]


def prompt_acceptance(model: Model, tokenizer: Tokenizer, generated: int) -> dict[str, Any]:
    """Measure on the committed prompts and keep the first texts as samples."""
    device = model.model.embed_tokens.weight.device
    report: dict[str, Any] = {"acceptance": {}, "samples": []}
    entries = json.loads(PROMPTS.read_text())["prompts"]
    for kind in sorted({entry["kind"] for entry in entries}):
        texts = [entry["text"] for entry in entries if entry["kind"] == kind]
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        lengths = torch.tensor([len(row) for row in ids], device=device)
        tokens = torch.zeros(
            len(ids), int(lengths.max()) + generated, dtype=torch.long, device=device
        )
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
        generator = Generator(model.model, *tokens.shape)
        counts, text = acceptance(model, generator, tokens, lengths, {0, 2})
        report["acceptance"][f"prompts_{kind}"] = counts
        for row in range(min(4, len(ids))):
            continued = text[row, len(ids[row]) : len(ids[row]) + 200].tolist()
            stop = next((i for i, token in enumerate(continued) if token in (0, 2)), 200)
            sample = {
                "kind": kind,
                "prompt": texts[row],
                "text": tokenizer.decode(continued[:stop]),
            }
            report["samples"].append(sample)
    return report
