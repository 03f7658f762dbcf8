"""Starts a stack, with a bar for each process, and later prints lines about its processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from omnistage.cli.layout import Layout
from omnistage.cli.notices import Notices
from omnistage.cli.stack import Stack

COLOURS = {"restarted": "green", "ended": "yellow"}


@asynccontextmanager
async def start_stack(
    layout: Layout, log_folder: Path | None, verbose: bool, on_begin: Callable[[Stack], object] | None = None
) -> AsyncIterator[Stack]:
    """Start a stack, and stop it at the end of this block. A bar per process shows the start, on stderr if that is a terminal; the bars are
    gone when the stack serves. From then on a line says which process was lost, and another one when it serves again. on_begin: called with
    the stack before it starts."""
    console = Notices()
    columns = (TextColumn("{task.description:>12}"), BarColumn(24), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=verbose or not console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def done(name: str) -> None:
        if name in tasks:  # Processes of later pipelines have no bar.
            progress.update(tasks[name], total=1, completed=1)

    def tell(event: str, text: str) -> None:
        console.tell(f"[bold {COLOURS.get(event, 'red')}]{event}[/] {escape(text)}")

    stack = Stack(layout, log_folder=log_folder, verbose=verbose, report=done, tell=tell)
    if on_begin is not None:
        on_begin(stack)
    tasks = {name: progress.add_task(name, total=None) for name in stack.names}
    with progress:
        await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()
