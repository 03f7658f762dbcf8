"""Finds pictures, sounds and films that a line of a conversation names: dropped onto the terminal, pasted, or behind /image."""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from omnistage.client.media import KINDS, to_medium
from omnistage.client.media_types import LOOK_BYTES, media_types

WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|\S)+""")
"""A word as a shell has it: a path that is dropped onto a terminal comes in quotes, or with a backslash before each space."""

BEGINNINGS = ("/", "./", "../", "~/")
"""Beginnings of a path among other words. A line that is only a path may begin in any way."""

STOPS = "?!.,;:)"
"""Characters that a sentence may have behind a path."""


@dataclass(frozen=True, slots=True)
class MentionedFile:
    """A file that goes with a question. kind: image, audio or video. path: absolute."""

    kind: str
    path: str

    @property
    def part(self) -> dict[str, str]:
        """The part of a turn, as the client takes it."""
        return {"type": self.kind, self.kind: self.path}

    def __str__(self) -> str:
        return f"{Path(self.path).name} ({KINDS[self.kind]})"


def find_named_file(kind: str, typed: str) -> tuple[MentionedFile, str]:
    """The file behind /image, /audio or /video, and the words behind it. Raises BadRequestError if it is no file of that kind."""
    ends = [len(typed), *(match.start() for match in reversed([*re.finditer(r"\s+", typed)]))]
    first = WORD.match(typed)
    quoted = [first.end()] if first is not None and typed[0] in "'\"" else []
    # The longest path that exists: names have spaces.
    there = (end for end in quoted or ends if os.path.isfile(_path(typed[:end])))  # noqa: PTH113
    end = next(there, first.end() if first is not None else 0)
    path = _path(typed[:end])
    to_medium(path, kind, f"/{kind}")
    return MentionedFile(kind, str(path.absolute())), typed[end:].strip()


def find_files(text: str) -> tuple[list[MentionedFile], str]:
    """The files of a message, and its words without them: paths at its ends are removed, and those within become their names."""
    if (alone := _shown(text)) is not None:
        return [alone], ""
    shown, words = list[MentionedFile](), list[str]()
    at = 0
    for match, one, path_end in _found(text):
        shown.append(one)
        is_at_end = not text[: match.start()].strip() or not text[path_end:].strip()
        words += [text[at : match.start()].rstrip() if is_at_end else text[at : match.start()], "" if is_at_end else Path(one.path).name]
        at = path_end
    return shown, "".join([*words, text[at:]]).strip()


def _found(text: str) -> Iterator[tuple[re.Match[str], MentionedFile, int]]:
    """Each file with its word's place, and where the path in it ends."""
    for match in WORD.finditer(text):
        word = match[0]
        for end in (len(word), len(word.rstrip(STOPS))):
            if _unquoted(word[:end]).startswith(BEGINNINGS) and (one := _shown(word[:end])) is not None:
                yield match, one, match.start() + end
                break


def _shown(typed: str) -> MentionedFile | None:
    """The medium that is typed, if it is a file of one: by its content, for a container by its name too."""
    try:
        path = _path(typed)
        if not S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            types = media_types(file.read(LOOK_BYTES))
        whole = str(path.absolute())
    except (OSError, ValueError):
        return None
    by_name = mimetypes.guess_type(path.name)[0]
    found = by_name if by_name in types else next(iter(types), "")
    kind = found.partition("/")[0]
    return MentionedFile(kind, whole) if kind in KINDS else None


def _path(typed: str) -> Path:
    name = _unquoted(typed)
    return Path(name if os.path.exists(name) else os.path.expanduser(name))  # noqa: PTH110, PTH111  # They take any text, pathlib does not.


def _unquoted(typed: str) -> str:
    typed = typed.strip()
    if len(typed) > 1 and typed[0] in "'\"" and typed[-1] == typed[0]:
        return typed[1:-1]
    return re.sub(r"\\(.)", r"\1", typed)
