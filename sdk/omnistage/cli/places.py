"""The places of files, and which option or variable decides each, so that an error of the disk says what to change."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omnistage.models.fetch.own_files import NEW, cache_directory, named_directory

STATE_VARIABLE = "OMNISTAGE_STATE"


def state_directory() -> Path:
    """The folder of this user's state: `OMNISTAGE_STATE`, else `omnistage` in the XDG state directory. (That outlives a login, unlike the
    XDG runtime directory.) It may not exist yet. Raises OSError if this user has no home."""
    return named_directory(STATE_VARIABLE, "XDG_STATE_HOME", ".local/state")


def state_folder(name: str = "") -> Path:
    """The folder of this user's state, or the folder `name` in it. A missing one is made, for this user alone. Raises OSError."""
    path = state_directory()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path /= name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


OF_VARIABLES: Mapping[str, Callable[[], Path]] = {
    STATE_VARIABLE: state_directory,
    "OMNISTAGE_CACHE": cache_directory,
    "TMPDIR": lambda: Path(tempfile.gettempdir()),
}
"""By variable: a function that returns the folder in force, also without the variable."""


def explain(error: OSError) -> str:
    """One sentence about an error of the disk: the path, what is wrong there, and the option or variable that decides the path."""
    reason = error.strerror or str(error)
    if not isinstance(error.filename, str | bytes):
        return reason
    place = Path(os.fsdecode(error.filename))
    place = place.parent if place.name.startswith(NEW) else place  # A draft, whose name says nothing.
    room = "make room there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    for name, folder in _typed_paths():
        if _is_along(place, folder):
            return f"{name} {place}: {reason}{f'; {room}give another place' if room else ''}"
    for name, find in OF_VARIABLES.items():
        with suppress(OSError):  # There may be none.
            if not _is_along(place, find()):
                continue
            return f"{place}: {reason}; {room}set {name} to {'another folder' if room else 'a folder of yours'}"
    return f"{place}: {reason}{'; make room there' if room else ''}"


def _is_along(place: Path, folder: Path) -> bool:
    """Whether a path is in a folder, or is a folder in which that folder was to be made."""
    place, folder = place.absolute(), folder.absolute()
    return place.is_relative_to(folder) or (folder.is_relative_to(place) and not folder.exists())


def origin(context: Any, name: str, text: str) -> str:
    """The source of a setting in words: the file, or a variable; for the command line `text`, for the default an empty text."""
    source = context.get_parameter_source(name)
    origins = {"DEFAULT": "", "DEFAULT_MAP": "the file", "ENVIRONMENT": f"{context.auto_envvar_prefix}_{name.upper()}"}
    return origins.get(source.name, text) if source is not None else ""


def _typed_paths() -> Iterator[tuple[str, Path]]:
    """Yields the name and value of each path that the user of this command set: by an option, an argument, a variable or a file."""
    from typer._click.globals import get_current_context

    context: Any = get_current_context(silent=True)
    for parameter in context.command.params if context is not None else ():
        value = context.params.get(parameter.name)
        if isinstance(value, Path):
            name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
            source = origin(context, parameter.name, "")
            yield f"{name} ({source})" if source else name, value
