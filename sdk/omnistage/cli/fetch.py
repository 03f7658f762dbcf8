"""The own checkpoint of a family on this machine: downloaded and converted once, with a bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from omnistage.client.errors import StackError
from omnistage.models.common.fetch import FetchError
from omnistage.models.registry import fetch_default, missing_packages

DEFAULT_FAMILY = "smol"


def fetch(family: str = DEFAULT_FAMILY) -> Path:
    """The folder of the checkpoint. Bars go to stderr if that is a terminal. Raises StackError that says what to do."""
    if missing := missing_packages(family):
        raise StackError(
            f"the models of {family} need packages that are not installed: {', '.join(missing)}",
            hint="pip install 'omnistage[cli,models,convert]'; convert is needed for the first start only.",
        )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>32}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def show(label: str, fraction: float) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=1.0)
            progress.update(tasks[label], completed=fraction)

        try:
            return fetch_default(family, show)
        except FetchError as error:
            raise StackError(str(error), hint="`omnistage fetch-default` tries again; what is already there is kept.") from error
