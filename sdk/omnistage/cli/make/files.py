"""Files that a command writes.

`OutputFile` appears only when it is whole. First a trial shows whether it can be written; later a draft is written in the same folder, and
renamed. A file that is a mount point, or stands in a folder that may not be changed, cannot be replaced: the new contents are copied into
it. `write_chunks` writes sound, `new_name` names a file after a prompt, and `film_size` reads the sides of a film from the head of its
file."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from unicodedata import category, east_asian_width, normalize

import numpy as np

from omnistage.client.answer import write_sound
from omnistage.client.errors import RequestError
from omnistage.client.events import AudioChunk
from omnistage.client.files import FORMATS, any_of
from omnistage.models.fetch.own_files import OwnFile

SOUND_KINDS = {ending: form.name for ending, form in FORMATS.items()}
"""Kinds of files for sound, by their endings."""

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
        self._draft.remove()

    def write(self, fill: Callable[[Path], object]) -> None:
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

    def _save_elsewhere(self, fill: Callable[[Path], object]) -> Path | None:
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


def write_chunks(chunks: Sequence[AudioChunk], path: Path, kind: str = "") -> None:
    """Write the chunks of a sound to a file. kind: the ending that decides the format, such as .wav; empty: that of `path`."""
    samples = np.concatenate([chunk.samples for chunk in chunks])
    write_sound(path, samples, chunks[0].sample_rate_hz, chunks[0].encoding, kind)


MAX_COLUMNS = 28
"""The most columns of a name without its ending: "wrote " and the name fit on a line of a narrow terminal."""

OTHERWISE = "picture"
"""Name for a prompt without letters."""

ARTICLES = ("a", "an", "the")

MAX_CALLS = 1000
"""Largest number of calls that can hold names in one folder at the same time."""

_PART, _NUMBER = re.compile(r"(-layer-\d+)?(-preview-\d+)?$"), re.compile(r"-\d+$")
"""Texts that are added to the name of a picture for layers, previews and numbers."""


@contextmanager
def new_name(prompt: str, ending: str, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the name of a new file in the current folder, made of the prompt. No file has this name, or a name that is made of it for one
    of several pictures, for a layer or for a preview. No other call of omnistage gets the same name inside this block. ending: such as
    .png. folders: the current one, and the folder of previews. Raises RequestError."""
    name = slug(prompt)
    used_names = _names_in_use(folders)
    # More names are tried than files and other calls can have.
    for stem in (name, *(f"{name}-{number}" for number in range(2, len(used_names) + MAX_CALLS + 2))):
        if stem not in used_names:
            with _claim(stem) as is_mine:
                # Read the folders a second time, because another call may have written a file and released its name meanwhile.
                if is_mine and stem not in _names_in_use(folders):
                    yield Path(f"{stem}{ending}")
                    return
    raise RequestError(f"{name}{ending}: others take one name after the other here", hint=f"Give a name: --out {name}{ending}")


def slug(prompt: str) -> str:
    """The first words of a prompt with hyphens between them; a word has letters and digits of any script."""
    signs = (sign if category(sign)[0] in "LMN" else " " for sign in normalize("NFC", prompt.lower()))
    words = "".join(signs).split()
    if len(words) > 1 and words[0] in ARTICLES:
        words = words[1:]
    stem = ""
    for word in words:
        longer = f"{stem}-{word}" if stem else _shorten(word)
        if _columns(longer) > MAX_COLUMNS:
            break
        stem = longer
    return stem or OTHERWISE


def _shorten(word: str) -> str:
    """The longest beginning of a word that fits into a name."""
    return next(word[:end] for end in range(len(word[:MAX_COLUMNS]), 0, -1) if _columns(word[:end]) <= MAX_COLUMNS)


def _columns(text: str) -> int:
    """The width of a text on a terminal. Accents that are characters of their own count too, so that the number of bytes is bounded."""
    return sum(2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def _names_in_use(folders: Sequence[Path]) -> set[str]:
    """The names, without ending, that a new picture must not get: those of the files in these folders, and the same names without the parts
    that stand for a number, a layer or a preview. All are in lower case."""
    names = set[str]()
    for file in (file for folder in folders for file in folder.iterdir()):
        picture = _PART.sub("", file.stem.lower())
        names |= {file.stem.lower(), picture, _NUMBER.sub("", picture)}
    return names


@contextmanager
def _claim(stem: str) -> Iterator[bool]:
    """Claim a name for the length of this block, and yield whether this call has it; False: another call of omnistage is using it. The
    claim is a lock on a hidden file: it ends with its process, and the next call removes the file (`OwnFile`). If no file can be written or
    locked here, it yields True."""
    path = Path(f".omnistage-{hashlib.sha256(stem.encode()).hexdigest()[:12]}.part")
    try:
        claim = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield True  # The picture itself cannot be written either, and that error says why.
        return
    is_mine = _try_lock(claim, path)
    try:
        yield is_mine
    finally:
        if is_mine:
            path.unlink(missing_ok=True)
        os.close(claim)


def _try_lock(claim: int, path: Path) -> bool:
    """Lock the hidden file, and return whether this call has the lock now."""
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another call may have removed the file before it was locked here, and may have made a new one.
        return os.path.samestat(os.fstat(claim), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # Files cannot be locked here.
        return True


MP4_SIDES_AT = 44
"""Offset of width and height in an MP4 after the name of the box "stsd", which describes a track: the rest of its head, the head of the
first sample entry, and what comes in that before the sides."""

SEGMENT, TRACKS, TRACK, VIDEO, WIDTH, HEIGHT = 0x18538067, 0x1654AE6B, 0xAE, 0xE0, 0xB0, 0xBA


def film_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of a film whose file begins with these bytes; None if these bytes do not contain them."""
    if data[4:8] != b"ftyp":
        return _of_webm(data)
    at = data.find(b"stsd") + MP4_SIDES_AT
    sides = data[at : at + 4]
    return (int.from_bytes(sides[:2], "big"), int.from_bytes(sides[2:], "big")) if at >= MP4_SIDES_AT and len(sides) == 4 else None


def _of_webm(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels from the beginning of a WebM; None if it does not say."""
    for name in (SEGMENT, TRACKS, TRACK, VIDEO):
        inner = next((body for its_name, body, _ in _elements(data) if its_name == name), None)
        if inner is None:
            return None
        data = inner
    sides = {name: int.from_bytes(body, "big") for name, body, is_whole in _elements(data) if is_whole}
    return (sides[WIDTH], sides[HEIGHT]) if WIDTH in sides and HEIGHT in sides else None


def _elements(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yields (its name as a number, its content, whether the content is complete) for each EBML element in these bytes. An element of
    unknown length ends with the bytes."""
    at = 0
    while at + 2 <= len(data) and data[at]:
        # Names and sizes have one byte more than 0 bits before the first 1 bit. A name includes that 1 bit, a size does not. A size of all
        # ones is unknown.
        name_bytes = 9 - data[at].bit_length()
        name, at = int.from_bytes(data[at : at + name_bytes], "big"), at + name_bytes
        if at >= len(data) or not data[at]:
            return
        size_bytes = 9 - data[at].bit_length()
        all_ones = (1 << 7 * size_bytes) - 1
        size, at = int.from_bytes(data[at : at + size_bytes], "big") & all_ones, at + size_bytes
        end = len(data) if size == all_ones else at + size
        yield name, data[at:end], end <= len(data)
        at = end
