"""The default model on this machine: downloaded and converted once, with a bar."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from omnistage.client.errors import StackError

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "hibari")
"""Packages without which nobody can run the default model."""


def fetch() -> Path:
    """The folder of the default model. Bars go to stderr if that is a terminal. Raises StackError that says what to do."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise StackError(
            f"the default model needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'omnistage[cli,models,convert]'; convert is needed for the first start only.",
        )
    from omnistage.models.smol.store import FetchError, model_directory

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>32}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def show(label: str, fraction: float) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=1.0)
            progress.update(tasks[label], completed=fraction)

        try:
            return model_directory(progress=show)
        except FetchError as error:
            raise StackError(str(error), hint="`omnistage fetch-default` tries again; what is already there is kept.") from error
