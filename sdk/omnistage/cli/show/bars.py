"""Bars on stderr for work that takes a while, such as that of `make`: checkpoints with random weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from omnistage.cli.console import Notices
from omnistage.client.errors import StackError
from omnistage.models.fetch.own_files import WAITING
from omnistage.models.reports import LoadError, bytes_told
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

if TYPE_CHECKING:
    from omnistage.models.reports import ShowProgress as Show
    from omnistage.models.reports import Unit


LABEL = 32
BAR = 24
"""Columns of a bar; a narrow terminal gets a shorter one."""

NARROW = 72
"""A terminal with fewer columns gets no bars, only their texts."""

MARGIN = 4
"""Columns that stay free at the right: a terminal writes ^C there. Without them ^C would get a line of its own, the bars would move, and a
copy of one would stay."""


@contextmanager
def bars(notices: Notices | None = None, *, lines: bool = True) -> Iterator[Show]:
    """Yield a function that shows progress, with a bar for each label: for a download its bytes, their rate and the time left, for other
    work the share that is done and the time left.

    If stderr is no terminal, there are lines instead: when a download begins and when it is complete (not if `lines` is False), and always
    when this process waits for another one. notices: prints lines above the bars.
    """
    notices = notices or Notices()
    if not notices.is_terminal:
        yield _Lines(notices, lines)
        return
    label = TextColumn("{task.description}", justify="right", table_column=Column(min_width=LABEL, no_wrap=True))
    bar, remaining_time = BarColumn(None, table_column=Column(max_width=BAR)), TimeRemainingColumn(True, True, _one_line_column())
    amount, rate = _Amount(_one_line_column()), _Rate(_one_line_column())
    columns = (label, bar, amount, rate, remaining_time) if notices.width >= NARROW else (label, amount, rate)
    with _Bars(*columns, console=notices, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
            if label not in tasks:  # Bytes of an earlier try count as done, but not in the rate.
                tasks[label] = progress.add_task(escape(label), total=total, completed=int(done), unit=unit)
            progress.update(tasks[label], completed=done, total=total, unit=unit)

        yield show


def _one_line_column() -> Column:
    """A column for texts that stay on one line: in a narrow terminal the bar becomes shorter first."""
    return Column(no_wrap=True)


class _Bars(Progress):
    """Progress that leaves the last columns of the terminal free."""

    def get_renderable(self) -> RenderableType:
        return _Inset(super().get_renderable())


class _Inset:
    """Wraps a renderable, which gets all columns of the terminal except the last MARGIN."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self._inner, options.update_width(max(1, options.max_width - MARGIN)))


class _Lines:
    """Prints lines in place of bars: when a piece of work begins, and when it is complete. has_downloads: also for downloads, not only for
    waits."""

    def __init__(self, notices: Notices, has_downloads: bool) -> None:
        self._notices = notices
        self._has_downloads = has_downloads
        self._begin_times_s: dict[str, float] = {}
        self._done_labels: set[str] = set()

    def __call__(self, label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
        # Work in shares has no lines. A download has lines if they are wanted, and a wait always has.
        if unit == "share" or (label != WAITING and not self._has_downloads):
            return
        if label not in self._begin_times_s:
            self._begin_times_s[label] = time.monotonic()
            self._notices.tell(escape(label) + (f", {bytes_told(int(done))} are there" if done else ""))
        if done == total and label != WAITING and label not in self._done_labels:
            self._done_labels.add(label)
            self._notices.tell(f"{escape(label)}: {bytes_told(int(done))} in {time.monotonic() - self._begin_times_s[label]:.1f} s")


class _Amount(ProgressColumn):
    """A column for the amount that is done: a percentage, or bytes."""

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "share":
            return Text(f"{task.percentage:.0f}%", "progress.percentage")
        if task.total is None:
            return Text(bytes_told(int(task.completed)), "progress.download")
        return DownloadColumn(binary_units=True).render(task)


class _Rate(ProgressColumn):
    """A column for the bytes that come in a second; empty for other work."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text(f"{bytes_told(int(rate))}/s" if rate and task.fields["unit"] == "bytes" else "", "progress.data.speed")


def make(architecture: str, directory: Path, order: CheckpointOrder) -> None:
    """Make a checkpoint with random weights in `directory`. Bars go to stderr if that is a terminal. Raises StackError that says what to
    do, OSError."""
    with bars() as show:
        try:
            make_tiny(architecture, directory, order, show)
        except LoadError as error:
            raise StackError(str(error)) from error
