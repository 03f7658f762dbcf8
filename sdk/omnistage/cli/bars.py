"""Bars on stderr for work that takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


@contextmanager
def bars(console: Console | None = None) -> Iterator[Callable[[str, float], None]]:
    """What shows how much of a thing is done, 0 to 1, a bar for each thing; nothing is shown where stderr is no terminal.
    console: of stderr, for who prints there meanwhile."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description:>32}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def show(label: str, fraction: float) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=1.0)
            progress.update(tasks[label], completed=fraction)

        yield show
