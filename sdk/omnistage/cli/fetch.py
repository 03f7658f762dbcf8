"""The own checkpoint of a family on this machine: downloaded and converted once, with a bar."""

from __future__ import annotations

from pathlib import Path

from omnistage.cli.bars import bars
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
    with bars() as show:
        try:
            return fetch_default(family, show)
        except FetchError as error:
            raise StackError(str(error), hint="`omnistage fetch-default` tries again; what is already there is kept.") from error
