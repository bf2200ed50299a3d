"""The command line: parse, call, print. Answers on stdout, everything else on stderr."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict
from typing import Annotated

import torch
import typer

from sametoken.checkpoint import demo_path, open_checkpoint
from sametoken.conversation import Conversation
from sametoken.display import (
    err,
    generation_json,
    note,
    print_figure,
    print_inspection,
    print_json,
    print_summary,
    print_tuned,
    print_verdict,
    report,
    show,
)
from sametoken.engine import Engine
from sametoken.errors import LawError, RequestError, SametokenError
from sametoken.lab.bench import Plan, bench, bytes_needed, law_holds, read_bandwidth
from sametoken.lab.check import check
from sametoken.lab.inspection import inspect_checkpoint
from sametoken.lab.machine import device_name, versions
from sametoken.lab.synthetic import SHAPES, RandomCheckpoint, random_engine
from sametoken.loading import DRAFTERS, LONGEST_DRAFT, dtype_named, load
from sametoken.request import Options
from sametoken.sampling import Sampling

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Run a mixture-of-experts model with speculation that changes no bit of the output.",
)
ModelOption = Annotated[
    str | None,
    typer.Option("-m", "--model", help="Folder or hub name; default: the built-in demo model."),
]
TokensOption = Annotated[int, typer.Option("-n", "--max-tokens", help="Longest answer.")]
DraftOption = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(DRAFTERS)}; default: mtp if the model has a head."),
]
DraftMaxOption = Annotated[int, typer.Option(help="Longest draft; 0 is plain decoding.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopPOption = Annotated[float, typer.Option(help="Keep the likeliest tokens of this total.")]
MinPOption = Annotated[float, typer.Option(help="Keep tokens this likely against the likeliest.")]
RepetitionOption = Annotated[float, typer.Option("--repetition-penalty", help="1 is off.")]
PresenceOption = Annotated[float, typer.Option("--presence-penalty", help="0 is off.")]
FrequencyOption = Annotated[float, typer.Option("--frequency-penalty", help="0 is off.")]
SeedOption = Annotated[int, typer.Option(help="Keys the noise of sampling.")]
StopOption = Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
ThreadsOption = Annotated[int, typer.Option(help="CPU threads; more pay on large models only.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
ContextOption = Annotated[int | None, typer.Option(help="Positions a sequence may have.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def main() -> None:
    """Entry point: an error a user can act on is one line on stderr and exit code 2."""
    try:
        app()
    except SametokenError as error:
        err.print(f"sametoken: {error}", markup=False, soft_wrap=True)
        sys.exit(2)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads stdin.")],
    model: ModelOption = None,
    max_tokens: TokensOption = 256,
    draft: DraftOption = None,
    draft_max: DraftMaxOption = 3,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition: RepetitionOption = 1.0,
    presence: PresenceOption = 0.0,
    frequency: FrequencyOption = 0.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives to report, 0 to 20.")] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    threads: ThreadsOption = 1,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, as it is; the text streams to stdout, statistics go to stderr."""
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=seed,
        logprobs=logprobs,
    )
    options = Options(sampling, max_tokens, tuple(stop or ()))
    engine = _load(model, draft, draft_max, device, dtype, context, threads)
    text = sys.stdin.read() if prompt == "-" else prompt
    if as_json:
        print_json(generation_json(engine.generate(text, options)[0]))
    else:
        report(show(engine.stream(text, options)))


@app.command()
def chat(
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: TokensOption = 512,
    draft: DraftOption = None,
    draft_max: DraftMaxOption = 3,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition: RepetitionOption = 1.0,
    presence: PresenceOption = 0.0,
    frequency: FrequencyOption = 0.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    threads: ThreadsOption = 1,
    context: ContextOption = None,
) -> None:
    """Talk with the model; one line is one turn, an empty line or end of file leaves."""
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=seed,
    )
    engine = _load(model, draft, draft_max, device, dtype, context, threads)
    conversation = Conversation(engine, Options(sampling, max_tokens), system)
    while line := _next_turn():
        report(show(conversation.ask(line)))


@app.command(name="check")
def check_command(
    model: ModelOption = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Length of every text.")] = 48,
    draft: DraftOption = None,
    draft_max: DraftMaxOption = 3,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    threads: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Compare plain and speculative decoding bit by bit; exit code 1 if anything differs."""
    engine = _load(model, draft, draft_max, device, dtype, None, threads)
    where = f"{engine.model.ops.backend} backend, {engine.model.device}, {engine.model.dtype}"
    err.print(f"{where}; plain and alone against drafted and together", style="dim")
    verdicts = []
    for verdict in check(engine, draft_max, tokens):
        verdicts.append(verdict)
        if not as_json:
            print_verdict(verdict)
    exact = all(verdict.exact for verdict in verdicts)
    if as_json:
        print_json(
            {
                "exact": exact,
                "backend": engine.model.ops.backend,
                "verdicts": [v.as_json() for v in verdicts],
            }
        )
    else:
        print_summary(verdicts)
    raise typer.Exit(0 if exact else 1)


@app.command(name="bench")
def bench_command(
    model: ModelOption = None,
    shape: Annotated[
        str | None,
        typer.Option(help=f"Random weights instead of a model: {', '.join(SHAPES)}."),
    ] = None,
    contexts: Annotated[str, typer.Option("--contexts", help="Prompt lengths.")] = "64",
    widths: Annotated[str, typer.Option(help="Rows of a pass.")] = "1,2,4,8",
    draft_lengths: Annotated[str, typer.Option(help="Drafted tokens a round.")] = "1,3",
    acceptance: Annotated[
        str, typer.Option(help="Scripted acceptance by position, unconditional.")
    ] = "0.88,0.78,0.66",
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Length of every text.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed repeats of a pass.")] = 5,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    threads: ThreadsOption = 1,
) -> None:
    """Measure speed beside a law check; a table on stderr, one JSON line on stdout."""
    plan = Plan(
        contexts=_integers("--contexts", contexts),
        widths=_integers("--widths", widths),
        draft_lengths=_integers("--draft-lengths", draft_lengths),
        shares=_shares_of(acceptance),
        tokens=tokens,
        repeats=repeats,
    )
    # The law check's own prompts need some room too.
    room = max(256, max(plan.contexts) + tokens + max(plan.widths))
    if shape is None:
        engine = _load(model, None, LONGEST_DRAFT, device, dtype, room, threads)
    else:
        engine = random_engine(shape, device=device, dtype=dtype, context=room, threads=threads)
    if not law_holds(engine, plan):
        raise LawError("plain and drafted text differ here, so no speed is reported; run check.")
    bandwidth = read_bandwidth(engine.model.device, repeats)
    figures = []
    for figure in bench(engine, plan, bandwidth):
        figures.append(figure)
        print_figure(figure)
    print_json(
        {
            "model": shape or model or "demo",
            "law": "green",
            "backend": engine.model.ops.backend,
            "device": device_name(engine.model.device),
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "versions": versions(),
            "read_bandwidth": bandwidth,
            "bytes_needed": {c: bytes_needed(engine, c) for c in plan.contexts},
            "scripted_acceptance": plan.shares,
            "figures": [figure.as_json() for figure in figures],
        }
    )


@app.command(name="tune")
def tune_command(
    model: ModelOption = None,
    shape: Annotated[
        str | None, typer.Option(help=f"A known shape instead of a model: {', '.join(SHAPES)}.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    jobs: Annotated[int, typer.Option(help="Processes that compile.")] = 4,
) -> None:
    """Find the fastest schedules on this GPU for a model's sizes; keep those that are exact."""
    if not torch.cuda.is_available():
        raise RequestError("tune needs a GPU, and PyTorch finds none; a CPU has nothing to tune.")
    device, kind = torch.device("cuda"), dtype_named(dtype, "cuda", torch.bfloat16)
    if shape is None:
        config = open_checkpoint(demo_path() if model is None else model).config
    else:
        config = RandomCheckpoint(shape, kind, device).config
    from sametoken.lab.tune import compile_all, save, tune

    note("compiling every schedule; this takes minutes")
    compile_all(config, kind, jobs)
    found = []
    for one in tune(config, device, kind):
        found.append(one)
        print_tuned(one.key, one.tried, one.admitted, one.first.seconds, one.best.seconds)
    note(f"kept in {save(found, device)}")


@app.command(name="inspect")
def inspect_command(
    path: Annotated[str, typer.Argument(help="Folder or hub name of a model.")],
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint is: architecture, sizes, formats, MTP head, bytes a token reads."""
    found = inspect_checkpoint(open_checkpoint(path))
    if as_json:
        print_json(asdict(found))
    else:
        print_inspection(found)


def _load(
    model: str | None,
    draft: str | None,
    draft_max: int,
    device: str,
    dtype: str | None,
    context: int | None,
    threads: int,
) -> Engine:
    """`load`, its warnings shown as notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = load(
            model,
            draft=draft,
            draft_max=draft_max,
            device=device,
            dtype=dtype,
            context=context,
            threads=threads,
        )
    for warning in caught:
        note(str(warning.message))
    return engine


def _next_turn() -> str:
    """One line from stdin, with a prompt where a person types it."""
    if sys.stdin.isatty():
        err.print("> ", end="")
    return sys.stdin.readline().strip()


def _integers(flag: str, text: str) -> tuple[int, ...]:
    """Positive integers separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise RequestError(f"{flag} is {text!r}; give positive integers such as 1,2,4.")
    return tuple(int(part) for part in parts)


def _shares_of(text: str) -> tuple[float, ...]:
    """Shares between 0 and 1 that do not increase, separated by commas."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (2.0,)
    if not all(0 <= share <= 1 for share in shares) or list(shares) != sorted(shares)[::-1]:
        raise RequestError(
            f"--acceptance is {text!r}; give shares that do not increase, such as 0.9,0.7."
        )
    return shares
