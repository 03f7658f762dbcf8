"""Writes a file that appears only when it is whole. First a trial shows whether it can be written; later a draft is written in the same
folder, and renamed.

A file that is a mount point, or stands in a folder that may not be changed, cannot be replaced: the new contents are copied into it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from omnistage.client.errors import RequestError
from omnistage.client.files import any_of
from omnistage.models.fetch.disk import OwnFile

_KEPT_BY_FOLDER = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_REPLACED = (*_KEPT_BY_FOLDER, errno.EBUSY, errno.EXDEV)


class OutputFile:
    """A file that is to be written before its `with` block ends.

    path: as it was typed. option: the option by which it was typed. kinds: names of the kinds of files that can be written, by their
    endings. Raises RequestError if the file cannot be written. Unless `write` has returned, no part of it is left.
    """

    def __init__(self, path: Path, option: str, kinds: Mapping[str, str]) -> None:
        self.path = path
        try:
            _check(path, option, kinds)
            # If the path is a link, the file that it points to is replaced.
            self._place = Path(os.path.realpath(path))
            self._draft = _draft_for(self._place)
        except OSError as error:
            raise _not_written(path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()

    def write(self, fill: Callable[[Path], None]) -> None:
        """Call `fill` with the path of a draft, which it writes, and put the draft in the file's place. Raises RequestError if that
        fails."""
        try:
            fill(self._draft.path)
            with self._draft.path.open("rb") as file:
                os.fsync(file.fileno())  # a full disk may report its error only now
            _put(self._draft.path, self._place)
        except OSError as error:
            copy_path = self._save_elsewhere(fill)
            raise _not_written(self.path, error, f"; it is kept as {copy_path}" if copy_path else "; what was made is lost") from error

    def _save_elsewhere(self, fill: Callable[[Path], None]) -> Path | None:
        """After a failure, let `fill` write among the temporary files, where there may be room, because the result took minutes to make.
        Returns the path; None if that fails too."""
        place = None
        try:
            self._draft.path.unlink(missing_ok=True)  # The draft may fill that disk.
            descriptor, name = tempfile.mkstemp(self.path.suffix, "omnistage-kept-")
            os.close(descriptor)
            place = Path(name)
            fill(place)
        except OSError:
            if place is not None:
                place.unlink(missing_ok=True)
            return None
        return place

    def _discard(self) -> None:
        self._draft.remove()


class GrowingFile(OutputFile):
    """A file that exists from its first piece on, and can be read while it grows. Its pieces stay, also after an error."""

    _grows = False

    def append(self, data: bytes) -> None:
        """Append the next piece; the first one replaces an existing file. Raises RequestError if it cannot be written."""
        try:
            if self._grows:
                with self._place.open("r+b") as file:  # Not "ab", which would make a removed file anew.
                    file.seek(0, os.SEEK_END)
                    file.write(data)
            else:
                self._draft.path.write_bytes(data)
                _put(self._draft.path, self._place)
                self._grows = True
        except OSError as error:
            raise _not_written(self.path, error, "; what came before is there" if self._grows else "") from error

    def finish(self) -> None:
        """Make sure that the complete file is on the disk. Raises RequestError if the disk reports only now that it has no room."""
        try:
            with self._place.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise _not_written(self.path, error) from error


def _draft_for(place: Path) -> OwnFile:
    """A draft in the folder of `place`, or among the temporary files if the folder may not be changed, but the file in it may."""
    try:
        if not place.exists():
            return OwnFile(place.parent, 0o666)
        draft = OwnFile(place.parent, 0o600)
        try:
            draft.path.chmod(stat.S_IMODE(place.stat().st_mode))
        except OSError:
            draft.remove()
            raise
        return draft
    except OSError as error:
        if error.errno not in _KEPT_BY_FOLDER or not place.exists():
            raise
        return OwnFile(Path(tempfile.gettempdir()), 0o600)


def _put(draft: Path, place: Path) -> None:
    """Move the draft to its place, or copy its contents if the file there cannot be replaced."""
    try:
        draft.replace(place)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not place.exists():
            raise
        _overwrite(place, draft)


def _overwrite(place: Path, draft: Path) -> None:
    """Copy the draft into the existing file `place`. Room is reserved first, so that a full disk is noticed before the old contents are
    gone."""
    with draft.open("rb") as new, place.open("r+b") as file:
        before, size = os.fstat(file.fileno()).st_size, os.fstat(new.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            file.truncate(before)
            raise
        shutil.copyfileobj(new, file)
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def _check(path: Path, option: str, kinds: Mapping[str, str]) -> None:
    """Raises RequestError for a path at which no file can be written. Some faults show only later."""
    suffix = next(iter(kinds))
    if str(path) == "-":
        raise RequestError(f"{option} -: standard output is for the text", hint=f"Give the name of a file: {option} answer{suffix}")
    if path.is_dir():
        raise RequestError(f"{option} {path}: this is a folder", hint=f"Give the name of a file in it: {option} {path / f'answer{suffix}'}")
    if path.suffix.lower() not in kinds:
        *names, last = dict.fromkeys(kinds.values())
        can = f"{', '.join(names)} and {last}" if names else last
        raise RequestError(f"{option} {path}: only {can} can be written", hint=f"Give a name that ends in {any_of(kinds)}.")
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path}: its folder does not exist", hint=f"Make it first: mkdir -p {path.parent}")
    if path.exists() and not path.is_file():
        raise RequestError(f"{option} {path}: this is no file but a device or a pipe", hint="Give the name of a file.")
    if path.exists() and not os.access(path, os.W_OK):
        raise RequestError(f"{option} {path}: the file may not be changed", hint="Give another name, or make it writable.")


def _not_written(path: Path, error: OSError, suffix: str = "") -> RequestError:
    """The error of a file that could not be written. suffix: ends the message."""
    room = ", or make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return RequestError(f"{path} cannot be written: {error.strerror or error}{suffix}", hint=f"Give another place{room}.")
