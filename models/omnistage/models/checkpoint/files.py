"""Checks of a checkpoint that need no loading (whether its files are there, and whether the values in its JSON are possible), and a context
that keeps its loading from reaching a hub or any other host: anybody may have made the folder, and its configs may name things that a
library would fetch.

Only the launcher fetches, before a model is loaded (`models/fetch/hub.py`). Environment variables tell the libraries to stay offline. A
library that ignores them is stopped at the socket, which all Python code needs to reach a host.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from omnistage.models.reports import LoadError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
INSTEAD: Mapping[str, tuple[str, ...]] = {
    WEIGHTS: (WEIGHTS_INDEX,),
    "preprocessor_config.json": ("processor_config.json",),
    "tokenizer.json": ("vocab.json", "merges.txt"),
}
"""Files that together replace one file: the index of weights in shards, the settings that Transformers 5 saves together, and a tokenizer's
vocabulary and merges."""

LARGEST_JSON = 64 << 20
"""Largest number of bytes of a JSON file. The index of the largest models has a few million."""

MAX_CONFIG_NUMBER = 1 << 24
"""Largest size or count in a config. No model has so many parts of any kind."""

V = TypeVar("V", int, float, str, bool)


class BadCheckpoint(LoadError):
    """A folder that is not a complete checkpoint of the model. The text names the bad file, weight or value."""


class Config:
    """A JSON object of a checkpoint, whose values are checked when they are read. place: its file, and its keys in this file, for
    errors."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self._values = values
        self.place = place

    @property
    def raw(self) -> Mapping[str, Any]:
        """All values, for a caller that looks for keys that should not be there."""
        return self._values

    def has(self, name: str) -> bool:
        """Whether a value of that name is there and not null."""
        return self._values.get(name) is not None

    def value(self, name: str, kind: type[V], default: V | None = None) -> V:
        """The value under a name; a whole number counts as a float too. default: returned if the name is missing or null; None: then it is
        an error. Raises BadCheckpoint, also for a value of another kind."""
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise BadCheckpoint(f"{self.place} lacks {name!r}")
        return _of_kind(value, kind, f"{self.place}: {name!r}")

    def size(self, name: str, max_size: int = MAX_CONFIG_NUMBER) -> int:
        """The whole number, a size or a count, under a name. Raises BadCheckpoint if it is missing, below 1 or above `max_size`: building a
        model from a huge size would take all memory and time."""
        size = self.value(name, int)
        if not 1 <= size <= max_size:
            raise BadCheckpoint(f"{self.place}: {name!r} is {size}, which must be 1 to {max_size}")
        return size

    def at_least(self, name: str, min_value: float, default: float | None = None) -> float:
        """The number under a name. default: see `value`. Raises BadCheckpoint if it is missing, or below `min_value`."""
        if (value := self.value(name, float, default)) < min_value:
            raise BadCheckpoint(f"{self.place}: {name!r} is {value}, which must be {min_value} or more")
        return value

    def values(self, name: str, kind: type[V]) -> tuple[V, ...]:
        """The list under a name, with values of one kind. Raises BadCheckpoint."""
        items = self._values.get(name)
        if not isinstance(items, list):
            raise BadCheckpoint(f"{self.place} lacks the list {name!r}")
        return tuple(_of_kind(value, kind, f"{self.place}: {name!r}") for value in items)

    def lists(self, name: str, kind: type[V]) -> tuple[tuple[V, ...], ...]:
        """The list of lists under a name. Raises BadCheckpoint."""
        items = self._values.get(name)
        if not isinstance(items, list):
            raise BadCheckpoint(f"{self.place} lacks the list {name!r}")
        parts = Config({str(index): part for index, part in enumerate(items)}, f"{self.place}: {name!r}")
        return tuple(parts.values(str(index), kind) for index in range(len(items)))

    def table(self, name: str, kind: type[V]) -> dict[str, V]:
        """The object under a name as a dict, with values of one kind. Raises BadCheckpoint."""
        values = self.section(name)._values
        return {key: _of_kind(value, kind, f"{self.place}: {key!r} of {name!r}") for key, value in values.items()}

    def section(self, name: str) -> Config:
        """The object under a name as a Config. Raises BadCheckpoint."""
        values = self._values.get(name)
        if not isinstance(values, dict):
            raise BadCheckpoint(f"{self.place} lacks the object {name!r}")
        return Config(values, f"{self.place}: {name}")


def _of_kind(value: object, kind: type[V], place: str) -> V:
    """Returns `value` if it is of this kind; a whole number is converted if a float is wanted. place: where it was found, for errors.
    Raises BadCheckpoint for another kind, and for a float that is not finite."""
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not isfinite(value)):  # not isinstance: true and false are no numbers
        raise BadCheckpoint(f"{place} is {str(value)[:80]!r}, which is no {kind.__name__}")
    return value


def check_files(checkpoint: Path, folder: str, files: Sequence[str]) -> None:
    """Raises BadCheckpoint if one of these files is missing in a folder of the checkpoint, or if any file could be read without an end. A
    file of INSTEAD may be replaced by others."""
    place = checkpoint / folder
    for name in files:
        substitutes = INSTEAD.get(name, (name,))  # A file that nothing replaces counts as its own substitute.
        for file in (name, *substitutes):
            _check_regular(place / file)
        absent_substitutes = [file for file in substitutes if not (place / file).is_file()]
        if absent_substitutes and not (place / name).is_file():
            instead = f"; {' and '.join(absent_substitutes)} would do as well" if name in INSTEAD else ""
            raise BadCheckpoint(
                f"{place / name} is missing: give the whole folder of a checkpoint, or none for the family's own default{instead}"
            )
    _check_sizes(checkpoint)


def _check_sizes(checkpoint: Path) -> None:
    """Raises BadCheckpoint for a device or a pipe among the files of a checkpoint, which libraries would read for ever, and for JSON that
    is too large."""
    for path in (*checkpoint.glob("*"), *checkpoint.glob("*/*")):
        size = _check_regular(path)
        if path.suffix == ".json" and size > LARGEST_JSON:
            raise BadCheckpoint(f"{path} has {size} bytes, and {LARGEST_JSON} are the most that such a file may have")


def _check_regular(path: Path) -> int:
    """The size of a file in bytes; 0 if it cannot be read: whoever needs it tells that. Raises BadCheckpoint for a device or a pipe."""
    try:
        file = path.stat()
    except OSError:
        return 0
    if not stat.S_ISREG(file.st_mode) and not stat.S_ISDIR(file.st_mode):
        raise BadCheckpoint(f"{path} is no file but a device or a pipe: take it out of the checkpoint")
    return file.st_size


def checkpoint_name(checkpoint: Path) -> str:
    """The name that people use for a checkpoint: its folder's name; in a hub's cache, NAME of models--OWNER--NAME/snapshots/COMMIT."""
    folder = checkpoint.resolve()
    store = folder.parent.parent.name
    return store.rpartition("--")[2] if folder.parent.name == "snapshots" and store.startswith("models--") else folder.name


def name_of(folder: Path) -> str:
    """The name that people use for the model in a folder, in lower case: the name in its config without the owner, else
    `checkpoint_name`."""
    name = json_object(folder / "config.json").get("_name_or_path")
    return (name if isinstance(name, str) and name else checkpoint_name(folder)).rpartition("/")[2].lower()


def read_config(directory: Path, model_type: str) -> Config:
    """config.json of the folder. Raises BadCheckpoint if it is missing or damaged, or belongs to a model of another type."""
    path = directory / "config.json"
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: give the folder of a complete checkpoint, or none for the family's own default")
    values = json_object(path)
    if values.get("model_type") != model_type:
        raise BadCheckpoint(f"{path} is a {values.get('model_type')!r}, not a {model_type!r}")
    return Config(values, str(path))


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BadCheckpoint if the file is missing, too large, or holds something else."""
    try:
        if (size := path.stat().st_size) > LARGEST_JSON:
            raise BadCheckpoint(f"{path} has {size} bytes, and {LARGEST_JSON} are the most that such a file may have")
        values = json.loads(path.read_bytes())
    except BadCheckpoint:
        raise
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{path} is not a JSON object")
    return values


OFFLINE_VARIABLES = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "DO_NOT_TRACK"), "1"),
    "DIFFUSERS_TRUST_REMOTE_KERNELS": "0",
}
"""Environment variables that libraries read when they are imported; child processes inherit them. With them the libraries do not send the
user's token for the hub, which only fetching needs."""

CONSTANTS = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_IMPLICIT_TOKEN")
"""Names of the constants in huggingface_hub that hold the values of these variables after its import."""

DIALS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
"""Names of Python's audit events for connecting to a host, or looking up its address."""


class Unreachable(OSError):
    """Loading tried to reach another host."""


class _Thread(threading.local):
    """Whether this thread loads a model now."""

    loads = False


_thread = _Thread()


def say_offline() -> None:
    """Set the variables that keep the libraries of this process and of its children offline, for its whole life. Call this before the
    libraries are imported."""
    os.environ.update(OFFLINE_VARIABLES)


@contextmanager
def offline() -> Iterator[None]:
    """While the context is open, libraries fetch nothing, even libraries that were imported before, and this thread connects to no host."""
    _watch_sockets()
    hub: Any = sys.modules.get("huggingface_hub.constants")
    old_environment = {name: os.environ.get(name) for name in OFFLINE_VARIABLES}
    old_constants = {} if hub is None else {name: getattr(hub, name) for name in CONSTANTS}
    was_loading, _thread.loads = _thread.loads, True
    try:
        say_offline()
        for name in old_constants:
            setattr(hub, name, True)
        yield
    finally:
        _thread.loads = was_loading
        for name, value in old_constants.items():
            setattr(hub, name, value)
        for name, old_value in old_environment.items():
            if old_value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old_value


@cache
def _watch_sockets() -> None:
    """Install the audit hook, once for the life of the process, because Python cannot remove it."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: raises Unreachable if a thread that loads a model reaches for another host."""
    if event in DIALS and _thread.loads:
        target = arguments[1] if event == "socket.connect" else arguments[0]
        # A path is the socket of another process of this machine, such as another rank.
        is_path = event == "socket.connect" and isinstance(target, str | bytes)
        if not is_path:
            raise Unreachable(f"it names something that would have to be fetched from {target}, and loading fetches nothing")
