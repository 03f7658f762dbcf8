"""Shows progress while a level is measured: a line on stderr, if that is a terminal, which is erased at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from omnistage.cli.bench.level import Level
from omnistage.cli.bench.sample import Failure
from omnistage.cli.notices import Notices

SHOWN_S = 0.25
"""Seconds between two updates of the display. Each takes about a millisecond from the event loop that also measures."""

BAR = 24


@asynccontextmanager
async def watch_level(level: Level, *, is_quiet: bool) -> AsyncIterator[None]:
    """A context in which a line shows how far the level is. is_quiet: show nothing."""
    notices = Notices()
    if is_quiet or not notices.is_terminal:
        yield
        return
    label, bar = TextColumn("{task.description}"), BarColumn(None, table_column=Column(max_width=BAR))
    # No auto_refresh, because rich's thread would hold up the thread that measures, at any moment.
    with Progress(label, bar, TextColumn("{task.fields[told]}"), console=notices, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(str(level.load), total=1.0, told="")
        showing = asyncio.create_task(_show(level, progress, task))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait({showing})


async def _show(level: Level, progress: Progress, task: int) -> None:
    """Refresh the display again and again, until this is cancelled."""
    while True:
        progress.update(task, completed=_done_share(level), told=_progress_text(level))  # type: ignore[arg-type]
        progress.refresh()
        await asyncio.sleep(SHOWN_S)


def _done_share(level: Level) -> float:
    """The finished part of the level, 0 to 1: by requests or by time, whichever is larger."""
    extent = level.extent
    shares = [
        (level.offered - level.running) / extent.requests if extent.requests else 0.0,
        level.elapsed_s / extent.seconds if extent.seconds else 0.0,
    ]
    return min(1.0, max(shares))


def _progress_text(level: Level) -> str:
    """A line of text for the display: how the requests of the level have ended so far."""
    failed = sum(isinstance(sample.outcome, Failure) for sample in level.samples)
    parts = [f"{len(level.samples) - failed} done", f"{level.running} run"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{level.not_started} not started"] if level.not_started else []
    return " · ".join(parts)
