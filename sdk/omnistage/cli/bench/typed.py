"""Turns typed options into the levels, the lengths and the prompts of a run. An impossible value raises typer.BadParameter."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from omnistage.cli.bench.arrivals import Process
from omnistage.cli.bench.level import Closed, Extent, Load, Open
from omnistage.cli.bench.prompts import NumberRange, Prompts, RandomWords, built_in_prompts, of_file

MOST_LEVELS, MOST_AT_ONCE, HIGHEST_RATE = 32, 4096, 10_000.0
MOST_WORDS = 100_000
CONCURRENCY = "1,4"
MAX_OPEN = 256
REQUESTS_EACH = 10
"""Default number of requests for each user of a closed loop."""
SECONDS = 30.0
"""Default length of a level of an open loop, in seconds."""


def loads_of(
    concurrency: str | None,
    rate: str | None,
    arrivals: Process | None,
    burst: int | None,
    max_open: int | None,
) -> list[Load]:
    """The levels of a run, by the typed options: a closed loop for each --concurrency, or an open loop for each --rate."""
    if rate is None:
        for option, value in (("--arrivals", arrivals), ("--burst-size", burst), ("--max-open", max_open)):
            if value is not None:
                raise typer.BadParameter(f"{option} is for requests that come by themselves; say how many in a second with --rate")
        counts = _numbers("--concurrency", concurrency if concurrency is not None else CONCURRENCY, MOST_AT_ONCE, "1,4,16")
        if any(count != int(count) for count in counts):
            raise typer.BadParameter(f"--concurrency {concurrency}: give whole numbers, such as 1,4,16")
        return [Closed(int(count)) for count in counts]
    if concurrency is not None:
        raise typer.BadParameter("--concurrency and --rate are two kinds of load; give one of them")
    process = arrivals or "poisson"
    if (process == "burst") != (burst is not None):
        raise typer.BadParameter("--arrivals burst and --burst-size N go together; give both or none")
    return [Open(one, process, max_open or MAX_OPEN, burst or 1) for one in _numbers("--rate", rate, HIGHEST_RATE, "0.5,1,2")]


def _numbers(option: str, text: str, maximum: float, example: str) -> list[float]:
    """The numbers in a text such as 1,4,16, each above 0 and at most `maximum`. example: for errors."""
    try:
        values = [float(one) for one in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: give numbers with commas between, such as {example}") from None
    if not all(0 < value <= maximum for value in values):
        raise typer.BadParameter(f"{option} {text}: give numbers above 0, at most {maximum:g}, such as {example}")
    if len(values) > MOST_LEVELS:
        raise typer.BadParameter(f"{option}: {len(values)} levels; give {MOST_LEVELS} at most")
    return values


def span_of(option: str, text: str, maximum: int) -> NumberRange:
    """The range in a text such as 100, or 100-900; its numbers must be from 1 to `maximum`. option: for errors."""
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text)
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 1 <= low <= high <= maximum:
        raise typer.BadParameter(f"{option} {text}: give a number from 1 to {maximum}, or two such as 100-900")
    return NumberRange(low, high)


def prompts_of(file: Path | None, input_words: str | None, seed: int, *, to_draw: bool) -> Prompts:
    """The prompts of the run: of a file, or random words, or the built-in ones. to_draw: they are to be drawn. Raises RequestError for a
    file without prompts."""
    if file is not None and input_words is not None:
        raise typer.BadParameter("--prompts and --input-words both say what is asked; give one of them")
    if input_words is not None:
        return RandomWords(span_of("--input-words", input_words, MOST_WORDS), seed)
    return of_file(file) if file is not None else built_in_prompts(to_draw=to_draw)


def extent_of(load: Load, requests: int | None, seconds: float | None) -> Extent:
    """The length of a level: as typed, or else the default for its load."""
    if requests is not None or seconds is not None:
        return Extent(requests, seconds)
    return Extent(REQUESTS_EACH * load.concurrency, None) if isinstance(load, Closed) else Extent(None, SECONDS)
