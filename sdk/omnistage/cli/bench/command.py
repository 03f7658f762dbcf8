"""`omnistage bench`: its options. The other modules here do the work; they are imported when it runs."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from omnistage.cli import interrupt
from omnistage.cli.make.ask import MaxTokens, Profile, TextOnly, Voice
from omnistage.cli.options import DEFAULT_TIMEOUT_S, ApiKey, Json, Timeout, Verbose
from omnistage.cli.report import errors_reported
from omnistage.cli.show.commands import Running

if TYPE_CHECKING:
    from omnistage.cli.bench.prompts import Task
    from omnistage.cli.bench.run import BenchPlan, Result
    from omnistage.cli.make.files import OutputFile
    from omnistage.client.options import Options

MAX_REQUESTS, MAX_TOKENS, MAX_CONCURRENCY = 1_000_000, 32768, 4096

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
    typer.Option(
        *("--requests", "-n"),
        min=1,
        max=MAX_REQUESTS,
        metavar="N",
        help="Of each level; default: 10 for each that asks at once.",
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", min=0.001, metavar="S", help="Start requests for so long at each level; default with --rate: 30."),
]
WarmUp = Annotated[int, typer.Option(min=0, max=10_000, metavar="N", help="Requests before each level that no figure counts.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="F", help='A prompt a line; in a .jsonl {"prompt": .., "max_tokens": ..}. Default: some built in.'),
]
InputWords = Annotated[str | None, typer.Option(metavar="N[-M]", help="Prompts of so many random short words instead, about a token each.")]
OutputTokens = Annotated[
    str | None, typer.Option(metavar="N[-M]", help="Make each answer so long, random between the two, whatever else would end it.")
]
Say = Annotated[bool, typer.Option("--say", help="Have the prompts spoken instead of answered.")]
Draw = Annotated[bool, typer.Option("--draw", help="Have them drawn.")]
MAX_SIDE = 16384
Steps = Annotated[int | None, typer.Option(min=1, max=1000, metavar="N", help="Of a picture; default: the model's own.")]
Width = Annotated[int | None, typer.Option(min=1, max=MAX_SIDE, metavar="PIXELS", help="Of a picture, likewise.")]
Height = Annotated[int | None, typer.Option(min=1, max=MAX_SIDE, metavar="PIXELS", help="Likewise.")]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, metavar="N", help="Of the first request; each one after it has the next.")]
Slo = Annotated[
    str | None,
    typer.Option(metavar="NAME=LIMIT,..", help="Goodput counts answers within all of these, such as ttft=0.5,ttfa=1,rtf=0.5."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="F.json", help="Write all of it, each request too, to this file.")]
Plot = Annotated[Path | None, typer.Option(metavar="F.png", help="Draw it: .png or .svg.")]


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
    max_tokens: MaxTokens = None,
    text_only: TextOnly = False,
    say: Say = False,
    draw: Draw = False,
    steps: Steps = None,
    width: Width = None,
    height: Height = None,
    voice: Voice = None,
    profile: Profile = None,
    seed: Seed = 0,
    slo: Slo = None,
    out: Out = None,
    plot: Plot = None,
    json: Json = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    verbose: Verbose = False,
) -> None:
    """Measure a running router under load.

    First text, first sound, speed, gaps, errors: docs/bench.md says what each figure is. Ctrl-C ends early and tells what was measured by
    then, a second one ends now. Starts nothing.
    """
    _check_together(say=say, draw=draw, text_only=text_only, sound=voice or profile, picture=steps or width or height)
    if (max_tokens is not None or output_tokens is not None) and (say or draw):
        raise typer.BadParameter("--max-tokens and --output-tokens are of answers; leave --say and --draw out")
    if max_tokens is not None and output_tokens is not None:
        raise typer.BadParameter("--output-tokens says how long each answer is; leave --max-tokens out")

    from omnistage.cli.bench import run
    from omnistage.cli.bench.prompts import Questions
    from omnistage.cli.bench.run import BenchPlan
    from omnistage.cli.bench.summary import Objectives

    loads = run.loads_of(concurrency, rate, arrivals, burst_size, max_open)
    tokens = None if output_tokens is None else run.span_of("--output-tokens", output_tokens, MAX_TOKENS)
    try:
        objectives = None if slo is None else Objectives.parse(slo)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    option_values: dict[str, object] = {"pipeline": pipeline or None, "max_tokens": max_tokens, "voice": voice, "profile": profile}
    option_values |= {"steps": steps, "width": width, "height": height, "timeout_s": timeout, "outputs": ["text"] if text_only else None}
    option_values["max_retries"] = 0  # A refusal is a result, and is not tried again.
    options = cast("Options", {name: value for name, value in option_values.items() if value is not None})
    task: Task = "say" if say else "draw" if draw else "ask"
    with errors_reported(verbose):
        from omnistage.cli.targets import must_run

        questions = Questions(task, run.prompts_of(prompts, input_words, seed, to_draw=draw), options, seed, tokens)
        target = must_run(address, api_key)
        extent = partial(run.extent_of, requests=requests, seconds=seconds)
        _run(BenchPlan(target, questions, loads, extent, warmup, timeout, objectives, json), out, plot, verbose)


def _check_together(*, say: bool, draw: bool, text_only: bool, sound: object, picture: object) -> None:
    """Raises BadParameter for options that exclude each other. sound, picture: true if an option for sound, or for pictures, was typed."""
    if say + draw + text_only > 1:
        raise typer.BadParameter("--say, --draw and --text-only exclude each other; give one of them")
    if sound and (text_only or draw):
        raise typer.BadParameter("--voice and --profile are those of sound; leave --text-only and --draw out")
    if picture and not draw:
        raise typer.BadParameter("--steps, --width and --height are of pictures; add --draw")


def _run(plan: BenchPlan, out: Path | None, plot: Path | None, verbose: bool) -> None:
    """Measure, print and write. Exits with 1 if no answer was completed, and with the signal's code if a signal ended it early."""
    from contextlib import ExitStack

    from omnistage.cli.bench import results
    from omnistage.cli.bench.results import KINDS
    from omnistage.cli.bench.run import run
    from omnistage.cli.make.files import OutputFile

    with ExitStack() as files:
        # Opened before anything is asked: figures that cannot be kept would be lost.
        out_file = files.enter_context(OutputFile(out, "--out", {".json": "JSON"})) if out is not None else None
        plot_file = files.enter_context(OutputFile(plot, "--plot", KINDS)) if plot is not None else None
        screen = None if plan.is_quiet else results.BenchScreen()
        result = asyncio.run(run(plan, screen, verbose))
        if screen is not None:
            screen.end(result)
        _write(result, out_file, plot_file)
    if result.interrupted_by:
        raise typer.Exit(interrupt.exit_code(result.interrupted_by))
    if not result.completed:
        raise typer.Exit(1)


def _write(result: Result, out: OutputFile | None, plot: OutputFile | None) -> None:
    """Write the files, and then print the object if --json asks for it: a program that reads the object may read the files too."""
    import json

    from omnistage.cli.bench.results import as_object, draw

    record = as_object(result)
    if out is not None:
        out.write(lambda path: write_text(path, json.dumps(record, indent=1) + "\n"))
    if plot is not None:
        kind = plot.path.suffix[1:].lower()
        plot.write(lambda path: draw(path, result, kind))
    if result.plan.is_quiet:
        print(json.dumps(record))


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
