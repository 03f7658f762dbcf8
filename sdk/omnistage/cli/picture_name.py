"""Chooses a file name for a picture by its prompt, such that it replaces no existing file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unicodedata import category, east_asian_width, normalize

from omnistage.client.errors import RequestError

MOST_COLUMNS = 28
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
    """Yield the name of a new file in the current folder, made of the prompt. It is so chosen that no file has it, or has a name that
    several pictures, layers or previews would get from it. No other call of omnistage gets the same name inside this block. ending: such as
    .png. folders: the current one, and the folder of previews. Raises RequestError."""
    name = slug(prompt)
    used_names = _names_in_use(folders)
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
        longer = f"{stem}-{word}" if stem else _cut(word)
        if _columns(longer) > MOST_COLUMNS:
            break
        stem = longer
    return stem or OTHERWISE


def _cut(word: str) -> str:
    """As much of a word as fits into a name."""
    return next(word[:end] for end in range(len(word[:MOST_COLUMNS]), 0, -1) if _columns(word[:end]) <= MOST_COLUMNS)


def _columns(text: str) -> int:
    """The width of a text on a terminal. Accents that are characters of their own count too, so that the number of bytes is bounded."""
    return sum(2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def _names_in_use(folders: Sequence[Path]) -> set[str]:
    """The names, without ending, that a new picture must not get: those of the files in these folders, and the names without the parts that
    were added for a number, a layer or a preview. All are in lower case."""
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
    except BlockingIOError:
        return False
    except OSError:
        return True
    return _is_there(claim, path)  # Another call may have removed the file before it was locked here.


def _is_there(claim: int, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(claim), path.lstat())
    except OSError:
        return False
