"""Fetches checkpoints to this machine, with a bar: a family's own, which is downloaded and converted once, or one at a hub, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from omnistage.cli.console import Notices
from omnistage.cli.show.bars import bars
from omnistage.cli.stack.layout import DEFAULT_PIPELINES
from omnistage.client.errors import BadRequestError, StackError
from omnistage.client.private_stack import ALL_EXTRAS, install
from omnistage.models.registry import fetch_default, has_default, missing_packages, recognise
from omnistage.models.reports import FetchError, LoadError
from omnistage.router.pipeline import load_pipeline

if TYPE_CHECKING:
    from omnistage.models.fetch.hub import FetchPlan, HubName


Check = Callable[[Path], object]
"""Called with the folder of a checkpoint when everything except its weights has been fetched. If it raises an error, the fetch ends."""


def fetch_defaults() -> list[Path]:
    """Fetch the own checkpoints of the default pipelines; returns their folders. Raises StackError if that of the first pipeline fails. If
    another one fails, only a line says so, because `serve` does without it."""
    folders = []
    for pipeline in map(load_pipeline, DEFAULT_PIPELINES):
        for family in dict.fromkeys(stage.family for stage in pipeline.stages if has_default(stage.family)):
            try:
                folders.append(fetch(family))
            except StackError as error:
                if pipeline.name == DEFAULT_PIPELINES[0]:
                    raise
                Notices().tell(f"{escape(pipeline.name)} is left out: {escape(error.message)}")
    return folders


def fetch(family: str) -> Path:
    """The folder of a family's own checkpoint, which is fetched if it is missing. Bars go to stderr if that is a terminal. Raises
    StackError that says what to do."""
    if missing := missing_packages(family):
        raise StackError(
            f"the models of {family} need packages that are not installed: {', '.join(missing)}",
            hint=install(*ALL_EXTRAS),
        )
    with bars() as show:
        try:
            return fetch_default(family, show)
        except FetchError as error:
            raise StackError(str(error), hint="`omnistage fetch-default` tries again; packages that came whole are kept.") from error


def pull(text: str) -> Path:
    """The folder of a checkpoint at a hub; parts that are missing are fetched first. text: its name. Raises BadRequestError for a text that
    is no name, StackError for a checkpoint that cannot be fetched, or is of no family."""
    name = hub_name(text)
    if name is None:
        raise BadRequestError.of("NAME", f"{text} is no name of a model: give owner/name, or owner/name@revision")
    notices = Notices()
    if Path(text).is_dir():
        notices.tell(
            f"[dim]{escape(text)} is a folder here too, which `omnistage serve {escape(text)}` takes; {escape(str(name))} is not[/]"
        )
    folder = _fetch(name, lambda folder: recognise(folder, called=text), notices)
    notices.tell(f"[dim]serve it: omnistage serve {escape(name.repository)}@{folder.name}[/]")
    return folder


def checkpoint(text: str, option: str, check: Check) -> Path:
    """The folder of a checkpoint. text: a folder, or the name of a checkpoint at a hub, which is fetched first; a folder is preferred.
    option: where it was typed, for errors. Raises BadRequestError for a text that is neither, and the errors of `pull` and of `check`."""
    folder, notices = Path(text), Notices()
    name = hub_name(text)
    if folder.is_dir():
        if name is not None:
            notices.tell(f"[dim]{escape(text)} is the folder of this name; the model at the hub is {escape(str(name))}[/]")
        return folder.absolute()
    if name is None:
        raise BadRequestError.of(option, f"{text} is not a folder")
    try:
        return _fetch(name, check, notices)
    except StackError as error:
        if folder.parent.is_dir():  # The folder above it exists, so the user may have meant a path.
            error.hint = f"There is no folder {text} here. {error.hint}"
        raise


def hub_name(text: str) -> HubName | None:
    """The text as a name at a hub; None if it does not look like one. Raises StackError if the packages for names are missing."""
    if "/" not in text or text.startswith(("/", ".", "~")) or text.endswith((".yaml", ".yml")):
        return None
    try:
        from omnistage.models.fetch.hub import hub_name
    except ModuleNotFoundError as error:
        raise StackError(f"models by name need a package that is not installed: {error.name}", hint=install(*ALL_EXTRAS)) from error
    return hub_name(text)


def _fetch(name: HubName, check: Check, notices: Notices) -> Path:
    """Fetch the missing parts of a checkpoint by its name. check: as in `Check`. Raises StackError, and the errors of `check`."""
    from omnistage.models.fetch.hub import fetch as fetch_named

    try:
        with bars(notices, lines=False) as show:
            return fetch_named(name, check, lambda plan: _tell(plan, notices), show)
    except FetchError as error:
        raise StackError(str(error), hint=_hint(name, error)) from error
    except LoadError as error:
        raise StackError(str(error), hint="`omnistage pipelines` lists what can be served.") from error


def _hint(name: HubName, error: FetchError) -> str:
    """A hint for the error of a fetch; empty if the message is enough."""
    from omnistage.models.fetch.hub import ENDPOINT, AccessRefused, HubUnreachable, NoWeights, UnknownName

    match error:
        case UnknownName():
            return f"Names are as {ENDPOINT} spells them, owner/name or owner/name@revision; HF_ENDPOINT names another hub. {_listing()}"
        case NoWeights():
            return "`omnistage pipelines` lists what can be served."
        case AccessRefused():
            return f"When that is done, `omnistage pull {name}` tries again."
        case HubUnreachable():
            return _listing()
    return ""


def _listing() -> str:
    """A sentence that names the models on this machine, which can be served without a hub."""
    from omnistage.cli.show.inventory import models_here  # Imported only for an error, because it takes a while.

    return f"On this machine: {', '.join(model.name for model in models_here() if model.is_here) or 'no model'}."


def _tell(plan: FetchPlan, notices: Notices) -> None:
    """Print the commit that a name stands for, and how much of it is to be fetched."""
    from omnistage.models.reports import bytes_told

    commit_text = "" if plan.commit == plan.name.revision else f" is {plan.commit}"
    unasked = ", as far as the cache knows: the hub is not reached" if plan.is_unasked else ""
    notices.tell(f"{escape(str(plan.name))}{commit_text}{unasked}")
    if plan.missing:
        room = f"{escape(str(plan.cache))} has {bytes_told(plan.free)} free"
        notices.tell(f"[dim]{bytes_told(plan.missing)} to fetch of {bytes_told(plan.size)}; {room}[/]")
