"""Makes checkpoints with random weights, with a bar."""

from __future__ import annotations

from pathlib import Path

from omnistage.cli.bars import bars
from omnistage.client.errors import StackError
from omnistage.models.reports import LoadError
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny


def make(architecture: str, directory: Path, order: CheckpointOrder) -> None:
    """Make a checkpoint with random weights in `directory`. Bars go to stderr if that is a terminal. Raises StackError that says what to
    do, OSError."""
    with bars() as show:
        try:
            make_tiny(architecture, directory, order, show)
        except LoadError as error:
            raise StackError(str(error)) from error
