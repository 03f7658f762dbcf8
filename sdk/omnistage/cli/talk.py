"""A conversation of `omnistage chat`: its turns, its settings, and the commands that begin with a slash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, TypedDict, cast

import grpc

from omnistage.cli.folders import state_folder
from omnistage.client.conversation import Conversation
from omnistage.client.errors import BadRequestError, OmniError, RequestError, UnknownModelError
from omnistage.client.guesses import did_you_mean
from omnistage.client.media import KINDS
from omnistage.client.request import Options
from omnistage.client.wording import PYTHON
from omnistage.models.common.owned import OwnFile

_PART = re.compile(r"conversation\[(\d+)\]\.content\[(\d+)\]")

WIDEST = 200
"""Columns where there is no terminal."""

LAST, LINES = "chat.json", "chat-lines"
"""Files of the last conversation, and of the typed lines."""

TEXTS = (".txt", ".md", ".json")
"""Endings of files for the words of a conversation."""


class TalkSettings(TypedDict, total=False):
    """Settings of the answers."""

    voice: str
    speed: float
    seed: int
    max_tokens: int
    system: str


@dataclass(slots=True)
class Talk:
    """settings: as they were typed, here or later. turns: questions and answers, oldest first, as the client takes them: content is text,
    or parts of it, whose media are paths."""

    settings: TalkSettings = field(default_factory=lambda: TalkSettings())
    turns: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def last(cls, settings: TalkSettings) -> Talk:
        """The last conversation, with its own settings as far as none are given. Raises RequestError if there is none."""
        path = state_folder() / LAST
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            before, turns = (
                cast("TalkSettings", dict(kept["settings"])),
                [{"role": turn["role"], "content": _checked(turn["content"])} for turn in kept["turns"]],
            )
        except FileNotFoundError:
            raise RequestError("there is no conversation to go on with", hint="Leave --continue out.") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RequestError(f"{path} cannot be read: {error}", hint="Remove it, or leave --continue out.") from None
        return cls(cast("TalkSettings", {**before, **settings}), turns)

    @property
    def conversation(self) -> Conversation:
        """The turns of a request."""
        system = self.settings.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *self.turns]

    @property
    def options(self) -> Options:
        """The options of a request."""
        return cast("Options", {name: value for name, value in self.settings.items() if name != "system"})

    def ask(self, text: str, media: Sequence[Mapping[str, str]] = ()) -> None:
        """Add the next question. media: parts that come before its text."""
        words = [{"type": "text", "text": text}] if text else []
        self.turns.append({"role": "user", "content": [*media, *words] if media else text})

    def forget_gone(self) -> list[str]:
        """Leave out the media whose files are no longer there; their names stay. Returns the names."""
        gone = []
        for turn in self.turns:
            parts = turn["content"] if isinstance(turn["content"], list) else []
            for number, part in enumerate(parts):
                path = _path_of(part)
                if path is not None and not path.is_file():
                    gone.append(path.name)
                    parts[number] = {"type": "text", "text": f"[{path.name}]"}
        return gone

    def leave_out(self, field: str) -> str:
        """Leave out a file of an earlier turn that a refusal names; only its name stays. Returns it, empty if the refusal names none."""
        turn, number = place_of(field)
        if turn is None or number is None:
            return ""
        turn -= len(self.conversation) - len(self.turns)
        if not 0 <= turn < len(self.turns) - 1 or (path := _path_of(self.turns[turn]["content"][number])) is None:
            return ""
        self.turns[turn]["content"][number] = {"type": "text", "text": f"[{path.name}]"}
        return path.name

    def answered(self, text: str) -> None:
        """Add the answer, as far as it came; without one the question is removed."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def forget_oldest(self) -> bool:
        """Leave out the oldest question and its answer when the conversation no longer fits; False if only the last question is left."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True

    def keep(self) -> None:
        """Put it where `last` finds it. Raises OSError."""
        folder = state_folder()
        draft = OwnFile(folder, 0o600)
        try:
            draft.path.write_text(
                json.dumps({"settings": self.settings, "turns": self.turns}, ensure_ascii=False, indent=1), encoding="utf-8"
            )
            draft.path.replace(folder / LAST)
        finally:
            draft.remove()

    def save_text(self, path: Path) -> None:
        """Write the words: as JSON, or as text with a name before each turn. Raises RequestError."""
        if path.suffix.lower() == ".json":
            text = json.dumps(self.conversation, ensure_ascii=False, indent=1) + "\n"
        else:
            names = {"system": "System", "user": "You", "assistant": "Answer"}
            text = "\n\n".join(f"{names[turn['role']]}: {turn_text(turn).strip()}" for turn in self.conversation) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}", hint="Give another place.") from None


def turn_text(turn: Mapping[str, Any]) -> str:
    """The words of a turn, with the names of its media."""
    if isinstance(turn["content"], str):
        return turn["content"]
    told = ((part, _path_of(part)) for part in turn["content"])
    return " ".join(str(part["text"]) if path is None else f"[{path.name}]" for part, path in told)


def place_of(field: str) -> tuple[int | None, int | None]:
    """The turn that a refusal names, and the place of the part in it; None if it names none."""
    found = _PART.match(field)
    return (int(found[1]), int(found[2])) if found else (None, None)


def is_of_setting(error: OmniError) -> bool:
    """Whether a refusal is about the settings or the key, and not about the question."""
    names = {setting.name for setting in SETTINGS.values()}
    fields = error.fields if isinstance(error, BadRequestError) else ()
    is_of_asker = error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    return (
        isinstance(error, UnknownModelError) or is_of_asker or (bool(fields) and all(PYTHON.name_of(bad.field) in names for bad in fields))
    )


def _path_of(part: Mapping[str, str]) -> Path | None:
    """The path of a medium; None for text."""
    return None if part["type"] == "text" else Path(part[part["type"]])


def _checked(content: Any) -> str | list[dict[str, str]]:
    """The stored content of a turn. Raises LookupError, TypeError or ValueError for any other value."""
    if isinstance(content, str):
        return content
    parts = [{"type": str(part["type"]), part["type"]: str(part[part["type"]])} for part in content]
    if not all(part["type"] in ("text", *KINDS) for part in parts):
        raise ValueError("it has media of an unknown kind")
    return parts


def _speed(text: str) -> float:
    value = float(text)
    if not 0.5 <= value <= 2.0:
        raise ValueError
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**64:
        raise ValueError
    return value


def _tokens(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 32768:
        raise ValueError
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """name: of the setting. read: turns a typed text into its value; ValueError for an impossible one. form: what can be typed, for
    people."""

    name: str
    read: Callable[[str], Any]
    form: str


SETTINGS: Mapping[str, Setting] = {
    "/voice": Setting("voice", str, "NAME, who speaks"),
    "/speed": Setting("speed", _speed, "X, 0.5 to 2, how fast"),
    "/seed": Setting("seed", _seed, "N, the same answer again"),
    "/max-tokens": Setting("max_tokens", _tokens, "N, longest answer"),
    "/system": Setting("system", str, "TEXT, what the model is told first"),
}
"""By the typed command; with `off` behind it a setting gets its default again, and with nothing it is shown."""

OFF = "off"

OTHERS = {
    "/image": "F, a picture with the next message; words behind it ask at once",
    "/audio": "F, the same for a sound",
    "/video": "F, the same for a film",
    "/pipeline": "NAME, who answers; /model does the same",
    "/save": "F: the sound of the last answer (.wav, .flac, .ogg, .opus, .mp3), or all words (.txt, .md, .json)",
    "/new": "begin a new conversation",
    "/help": "show this",
    "/quit": "end, as Ctrl-D does; /exit, /bye and /q do the same",
}

ALIAS = "/model"

ENDS = ("/quit", "/exit", "/bye", "/q")

WORDS = (*SETTINGS, *OTHERS, ALIAS)

MORE = (
    f"With {OFF} behind it a setting is as usual again, and a file is left out.",
    "A path in a message, or alone, is a picture, a sound or a film too.",
    'Alt-Enter begins a new line; """ before and behind a text of several lines makes it one message.',
    "Enter or Ctrl-C stops an answer; Ctrl-D ends.",
)
"""Stands below the commands in the help."""


def is_command(first: str) -> bool:
    """Whether a message with this first word is a command of the chat: a slash and letters. A path or a fraction is a question like any
    other."""
    return first in WORDS or (first.startswith("/") and first[1:].isalpha())


def change(settings: TalkSettings, command: str, value: str) -> str:
    """Set the value that was typed behind one of SETTINGS; returns a line about it. Raises RequestError."""
    setting = SETTINGS[command]
    told = cast("dict[str, Any]", settings)
    if value == OFF:
        told.pop(setting.name, None)
    elif value:
        try:
            told[setting.name] = setting.read(value)
        except ValueError:
            raise RequestError(f"{command} {value}: give {setting.form}, or {OFF}") from None
    return f"{command[1:]}: {told.get(setting.name, 'as usual')}"


def help_lines(columns: int | None) -> list[str]:
    """The commands, in lines that are broken between words. columns: of the terminal; None: there is none."""
    forms = {command: setting.form for command, setting in SETTINGS.items()} | OTHERS
    indent = max(map(len, forms)) + 2
    width = max((columns or WIDEST) - 1, indent + 8)
    wrapped = partial(wrap, width=width, break_long_words=False, break_on_hyphens=False)
    lines = [wrapped(form, initial_indent=command.ljust(indent), subsequent_indent=" " * indent) for command, form in forms.items()]
    return [line for several in (*lines, *map(wrapped, MORE)) for line in several]


def unknown(command: str) -> OmniError:
    """The error for a word that begins with a slash and is no command."""
    return RequestError(f"there is no {command}{did_you_mean(command, WORDS)}", hint="/help shows what can be typed.")
