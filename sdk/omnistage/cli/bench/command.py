"""`omnistage bench`: its options. The other modules here do the work; they are imported when it runs."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from omnistage.cli import interrupt
from omnistage.cli.make.ask import TextOnly
from omnistage.cli.options import DEFAULT_TIMEOUT_S, MAX_SEED, ApiKey, Json, Timeout, Verbose, with_fields
from omnistage.cli.report import errors_reported
from omnistage.cli.show.commands import Running

if TYPE_CHECKING:
    from omnistage.cli.bench.level import Closed, Open
    from omnistage.cli.bench.run import BenchRun
    from omnistage.client.request import Options

MAX_REQUESTS, MAX_TOKENS, MAX_WORDS = 1_000_000, 32768, 100_000
MAX_LEVELS, MAX_CONCURRENCY, MAX_RATE = 32, 4096, 10_000.0
CONCURRENCY, REQUESTS_EACH, SECONDS, MAX_OPEN = "1,4", 10, 30.0, 256
"""Defaults: the levels; in a closed loop the requests of each who asks; in an open one the seconds of a level, and the open requests."""

Pipeline = Annotated[str, typer.Option(*("--pipeline", "--model"), metavar="NAME", help="See `omnistage pipelines`; default: its own.")]
Concurrency = Annotated[
    str | None,
    typer.Option("--concurrency", "-c", metavar="N,..", help="So many ask at once, each again when it has its answer; default: 1,4."),
]
Rate = Annotated[
    str | None, typer.Option("--rate", "-r", metavar="R,..", help="Instead: so many requests come in a second, whatever runs by then.")
]
Arrivals = Annotated[
    Literal["poisson", "constant", "burst"] | None, typer.Option(help="How they come with --rate; default: poisson, random and repeatable.")
]
BurstSize = Annotated[int | None, typer.Option(min=2, max=MAX_CONCURRENCY, metavar="N", help="So many at once, with --arrivals burst.")]
MaxOpen = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_CONCURRENCY, metavar="N", help="With --rate: while so many are open, more are only counted; default: 256."),
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", "-n", min=1, max=MAX_REQUESTS, metavar="N", help="Of each level; default: 10 for each that asks at once."),
]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", min=0.001, metavar="S", help="Start requests for so long at each level; default with --rate: 30."),
]
WarmUp = Annotated[int, typer.Option(min=0, max=10_000, metavar="N", help="Requests before each level that no figure counts.")]
PromptFile = Annotated[Path | None, typer.Option("--prompts", metavar="F", help="A prompt a line. Default: some built in.")]
InputWords = Annotated[str | None, typer.Option(metavar="N[-M]", help="Prompts of so many random short words instead, about a token each.")]
OutputTokens = Annotated[
    str | None, typer.Option(metavar="N[-M]", help="Make each answer so long, random between the two, whatever else would end it.")
]
Say = Annotated[bool, typer.Option("--say", help="Have the prompts spoken instead of answered.")]
Draw = Annotated[bool, typer.Option("--draw", help="Have them drawn.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, metavar="N", help="Of the first request; each one after it has the next.")]
Slo = Annotated[
    str | None,
    typer.Option(metavar="NAME=LIMIT,..", help="Goodput counts answers within all of these, such as ttft=0.5,ttfa=1,rtf=0.5."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="F.json", help="Write all of it, each request too, to this file.")]


ANSWERED, DRAWN = ("voice", "profile", "max_tokens"), ("steps", "width", "height")
"""Fields of answers and of pictures that can be set."""


@with_fields(*ANSWERED, *DRAWN)
def bench(
    address: Running = None,
    api_key: ApiKey = None,
    pipeline: Pipeline = "",
    concurrency: Concurrency = None,
    rate: Rate = None,
    arrivals: Arrivals = None,
    burst_size: BurstSize = None,
    max_open: MaxOpen = None,
    requests: Requests = None,
    seconds: Seconds = None,
    warmup: WarmUp = 2,
    prompts: PromptFile = None,
    input_words: InputWords = None,
    output_tokens: OutputTokens = None,
    text_only: TextOnly = False,
    say: Say = False,
    draw: Draw = False,
    seed: Seed = 0,
    slo: Slo = None,
    out: Out = None,
    json: Json = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    verbose: Verbose = False,
    **fields: object,
) -> None:
    """Measure a running router under load.

    First text, first sound, speed, gaps, errors: docs/bench.md says what each figure is. Ctrl-C ends early and tells what was measured by
    then, a second one ends now. Starts nothing.
    """
    if say + draw + text_only > 1:
        raise typer.BadParameter("--say, --draw and --text-only exclude each other; give one of them")
    if (fields["voice"] or fields["profile"]) and (text_only or draw):
        raise typer.BadParameter("--voice and --profile are those of sound; leave --text-only and --draw out")
    if any(fields[name] for name in DRAWN) and not draw:
        raise typer.BadParameter("--steps, --width and --height are of pictures; add --draw")
    if (fields["max_tokens"] or output_tokens) and (say or draw):
        raise typer.BadParameter("--max-tokens and --output-tokens are of answers; leave --say and --draw out")
    if fields["max_tokens"] and output_tokens:
        raise typer.BadParameter("--output-tokens says how long each answer is; leave --max-tokens out")
    if prompts and input_words:
        raise typer.BadParameter("--prompts and --input-words both say what is asked; give one of them")
    loads = _loads(concurrency, rate, arrivals, burst_size, max_open, requests, seconds)

    from omnistage.cli.bench.prompts import QUESTIONS, NumberRange, Questions, read_prompts
    from omnistage.cli.bench.results import read_limits
    from omnistage.cli.bench.run import BenchRun

    # A drawing names no output, because it may also be a film.
    outputs = ["text"] if text_only else [] if draw else None
    values = {"pipeline": pipeline or None, "outputs": outputs, **fields, "timeout_s": timeout}
    options = cast("Options", {name: value for name, value in values.items() if value is not None})
    options["max_retries"] = 0  # A refusal is a result, and is not tried again.
    words = NumberRange.parse("--input-words", input_words, MAX_WORDS)
    tokens = NumberRange.parse("--output-tokens", output_tokens, MAX_TOKENS)
    limits = None if slo is None else read_limits(slo)
    with errors_reported(verbose):
        from omnistage.cli.targets import must_run

        texts, source = (QUESTIONS, "built-in prompts") if prompts is None else (read_prompts(prompts), f"prompts of {prompts.name}")
        questions = Questions("say" if say else "draw" if draw else "ask", options, seed, texts, words, tokens, source)
        _run(BenchRun(must_run(address, api_key), questions, loads, warmup, timeout, limits, is_quiet=json), out, verbose)


def _loads(
    concurrency: str | None,
    rate: str | None,
    arrivals: Arrivals,
    burst: BurstSize,
    max_open: int | None,
    requests: int | None,
    seconds: float | None,
) -> list[Closed | Open]:
    """The loads of the levels, by the typed options: a closed loop for each --concurrency, or an open loop for each --rate."""
    from omnistage.cli.bench.level import Closed, Open

    is_endless = requests is None and seconds is None
    if rate is None:
        for option, value in (("--arrivals", arrivals), ("--burst-size", burst), ("--max-open", max_open)):
            if value is not None:
                raise typer.BadParameter(f"{option} is for requests that come by themselves; say how many in a second with --rate")
        counts = _numbers("--concurrency", CONCURRENCY if concurrency is None else concurrency, MAX_CONCURRENCY, "1,4,16")
        if any(count != int(count) for count in counts):
            raise typer.BadParameter(f"--concurrency {concurrency}: give whole numbers, such as 1,4,16")
        return [Closed(int(count), requests=REQUESTS_EACH * int(count) if is_endless else requests, seconds=seconds) for count in counts]
    if concurrency is not None:
        raise typer.BadParameter("--concurrency and --rate are two kinds of load; give one of them")
    if (arrivals == "burst") != (burst is not None):
        raise typer.BadParameter("--arrivals burst and --burst-size N go together; give both or none")
    rates = _numbers("--rate", rate, MAX_RATE, "0.5,1,2")
    length_s = SECONDS if is_endless else seconds
    return [Open(one, arrivals or "poisson", max_open or MAX_OPEN, burst or 1, requests=requests, seconds=length_s) for one in rates]


def _numbers(option: str, text: str, maximum: float, example: str) -> list[float]:
    """The numbers in a text such as 1,4,16, each above 0 and at most `maximum`. example: for errors."""
    try:
        values = [float(one) for one in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: give numbers with commas between, such as {example}") from None
    if not all(0 < value <= maximum for value in values):
        raise typer.BadParameter(f"{option} {text}: give numbers above 0, at most {maximum:g}, such as {example}")
    if len(values) > MAX_LEVELS:
        raise typer.BadParameter(f"{option}: {len(values)} levels; give {MAX_LEVELS} at most")
    return values


def _run(bench: BenchRun, out: Path | None, verbose: bool) -> None:
    """Measure, print and write. Exits with 1 if no answer was completed, and with the signal's code if a signal ended it early."""
    import json

    from omnistage.cli.make.files import OutputFile

    # Opened before anything is asked: figures that cannot be kept would be lost.
    with nullcontext() if out is None else OutputFile(out, "--out", {".json": "JSON"}) as file:
        asyncio.run(bench.run(verbose))
        record = bench.as_object()

        def fill(path: Path) -> None:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

        if file is not None:
            file.write(fill)
    if bench.is_quiet:
        print(json.dumps(record))
    if bench.interrupted_by:
        raise typer.Exit(interrupt.exit_code(bench.interrupted_by))
    if not any(level.completed for level in bench.levels):
        raise typer.Exit(1)
