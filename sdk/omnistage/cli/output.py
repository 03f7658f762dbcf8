"""A file that is there when it is whole, and not before: tried before anything is asked, written beside its place, and renamed."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from omnistage.client.errors import RequestError


class OutputFile:
    """The place of a file that will be written, between `with` and its end.

    path: as it was typed. option: what it was typed for. suffix: what it must end in. Raises RequestError where no such file can be
    written; nothing of it is left unless `write` has returned.
    """

    def __init__(self, path: Path, option: str, suffix: str) -> None:
        self.path = path
        try:
            _check(path, option, suffix)
        except OSError as error:
            raise _not_written(path, error) from error
        # Through links: whoever has one wants the file behind it replaced.
        self._place = Path(os.path.realpath(path))
        self._draft = self._place.with_name(f".omnistage-{secrets.token_hex(6)}.part")
        try:
            os.close(os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except OSError as error:
            raise _not_written(path, error) from error
        if self._place.exists():
            self._draft.chmod(stat.S_IMODE(self._place.stat().st_mode))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()

    def write(self, fill: Callable[[Path], None]) -> None:
        """Have `fill` write a file at the path that it is called with, and put that in its place. Raises RequestError if it cannot."""
        try:
            fill(self._draft)
            with self._draft.open("rb") as written:
                os.fsync(written.fileno())  # a disk that is full may say so only now
            self._draft.replace(self._place)
        except OSError as error:
            raise _not_written(self.path, error) from error

    def _discard(self) -> None:
        self._draft.unlink(missing_ok=True)


def _check(path: Path, option: str, suffix: str) -> None:
    """What can be said without touching the disk's contents."""
    if str(path) == "-":
        raise RequestError(f"{option} -: standard output is for the text", hint=f"Give the name of a file: {option} answer{suffix}")
    if path.is_dir():
        raise RequestError(f"{option} {path}: this is a folder", hint=f"Give the name of a file in it: {option} {path / f'answer{suffix}'}")
    if path.suffix.lower() != suffix:
        kind = suffix.removeprefix(".").upper()
        raise RequestError(f"{option} {path}: only {kind} can be written", hint=f"Give a name that ends in {suffix}.")
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path}: its folder does not exist", hint=f"Make it first: mkdir -p {path.parent}")
    if path.exists() and not path.is_file():
        raise RequestError(f"{option} {path}: this is no file but a device or a pipe", hint="Give the name of a file.")
    if path.exists() and not os.access(path, os.W_OK):
        raise RequestError(f"{option} {path}: the file may not be changed", hint="Give another name, or make it writable.")


def _not_written(path: Path, error: OSError) -> RequestError:
    return RequestError(f"{path} cannot be written: {error.strerror or error}", hint="Give another place, or make room there.")
