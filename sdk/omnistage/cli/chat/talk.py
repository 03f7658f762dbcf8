"""A conversation of `omnistage chat`: its turns, its settings, and the commands that begin with a slash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, TypedDict, cast, get_args

import grpc

from omnistage.cli.places import state_folder
from omnistage.client.conversation import Conversation
from omnistage.client.errors import BadRequestError, OmniError, RequestError, UnknownModelError
from omnistage.client.media import KINDS
from omnistage.client.options import ABOUT, OPTIONS, fault_of
from omnistage.client.request import Options
from omnistage.client.wording import PYTHON, did_you_mean
from omnistage.models.fetch.own_files import OwnFile

_PART = re.compile(r"conversation\[(\d+)\]\.content\[(\d+)\]")

WIDEST = 200
"""Columns of the help if there is no terminal."""

LAST, LINES = "chat.json", "chat-lines"
"""Names of the files that keep the last conversation and the typed lines."""

TEXTS = (".txt", ".md", ".json")
"""Endings of the files to which /save writes the words of a conversation, not the sound."""


class TalkSettings(TypedDict, total=False):
    """Settings of the answers that a user can change in a chat."""

    voice: str
    speed: float
    seed: int
    max_tokens: int
    system: str


@dataclass(slots=True)
class Talk:
    """A conversation. settings: those that the user typed, on the command line or in the chat. turns: questions and answers, oldest first,
    in the client's form: `content` is a text, or a list of parts in which media are paths."""

    settings: TalkSettings = field(default_factory=lambda: TalkSettings())
    turns: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def last(cls, settings: TalkSettings) -> Talk:
        """The last conversation, to go on with. settings: typed now; they win over the stored ones. Raises RequestError if there is no
        conversation, or it cannot be read."""
        path = state_folder() / LAST
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            stored_settings = cast("TalkSettings", dict(record["settings"]))
            turns = [{"role": turn["role"], "content": _check_content(turn["content"])} for turn in record["turns"]]
        except FileNotFoundError:
            raise RequestError("there is no conversation to go on with", hint="Leave --continue out.") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RequestError(
                f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint="Remove it, or leave --continue out."
            ) from None
        return cls(cast("TalkSettings", {**stored_settings, **settings}), turns)

    @property
    def conversation(self) -> Conversation:
        """The turns to send: the system text, if there is one, and all questions and answers."""
        system = self.settings.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *self.turns]

    @property
    def options(self) -> Options:
        """The options to send: all settings but the system text."""
        return cast("Options", {name: value for name, value in self.settings.items() if name != "system"})

    def ask(self, text: str, media: Sequence[Mapping[str, str]] = ()) -> None:
        """Add the next question. media: parts of the turn that come before its text."""
        words = [{"type": "text", "text": text}] if text else []
        self.turns.append({"role": "user", "content": [*media, *words] if media else text})

    def forget_gone(self) -> list[str]:
        """Put the file's name in the place of each medium whose file is no longer there. Returns these names."""
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
        """After the refusal of a file of an earlier turn, put the file's name in its place. field: the field that the refusal names.
        Returns the file's name. If the field names no file of an earlier turn, replace nothing, and return an empty text."""
        turn, part = place_of(field)
        if turn is None or part is None:
            return ""
        turn -= len(self.conversation) - len(self.turns)  # In the conversation the system text may stand before the turns.
        is_earlier = 0 <= turn < len(self.turns) - 1
        path = _path_of(self.turns[turn]["content"][part]) if is_earlier else None
        if path is None:
            return ""
        self.turns[turn]["content"][part] = {"type": "text", "text": f"[{path.name}]"}
        return path.name

    def answered(self, text: str) -> None:
        """Add the answer to the last question, as far as it came; if it is empty, remove the question."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def forget_oldest(self) -> bool:
        """Leave out the oldest question and its answer, so that the rest may fit. Returns False if only the last question is left."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True

    def keep(self) -> None:
        """Store the conversation where `last` finds it. Raises OSError."""
        folder = state_folder()
        draft = OwnFile(folder, 0o600)
        try:
            draft.path.write_text(
                json.dumps({"settings": self.settings, "turns": self.turns}, ensure_ascii=False, indent=1), encoding="utf-8"
            )
            draft.path.replace(folder / LAST)
        except OSError as error:
            error.filename = error.filename or str(folder)  # An error of writing has none.
            raise
        finally:
            draft.remove()

    def save_text(self, path: Path) -> None:
        """Write the words to a file: as JSON if its name ends in .json, else as text with a name before each turn. Raises RequestError."""
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
    """The words of a turn; each medium in it stands as its name in brackets."""
    if isinstance(turn["content"], str):
        return turn["content"]
    parts = ((part, _path_of(part)) for part in turn["content"])
    return " ".join(str(part["text"]) if path is None else f"[{path.name}]" for part, path in parts)


def place_of(field: str) -> tuple[int | None, int | None]:
    """Returns (index of the turn, index of the part in it) that a field of a refusal names; (None, None) if it names no part."""
    match = _PART.match(field)
    return (int(match[1]), int(match[2])) if match else (None, None)


def is_of_setting(error: OmniError) -> bool:
    """Whether a refusal is about a setting, the pipeline or the user's key, and not about the question."""
    if isinstance(error, UnknownModelError) or error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return True
    names = {setting.name for setting in SETTINGS.values()}
    fields = error.fields if isinstance(error, BadRequestError) else ()
    return bool(fields) and all(PYTHON.name_of(bad.field) in names for bad in fields)


def _path_of(part: Mapping[str, str]) -> Path | None:
    """The path of a part that is a medium; None for a text."""
    return None if part["type"] == "text" else Path(part[part["type"]])


def _check_content(content: Any) -> str | list[dict[str, str]]:
    """Return the content of a stored turn if it has the right form. Raises LookupError, TypeError or ValueError if not."""
    if isinstance(content, str):
        return content
    parts = [{"type": str(part["type"]), part["type"]: str(part[part["type"]])} for part in content]
    if not all(part["type"] in ("text", *KINDS) for part in parts):
        raise ValueError("it has media of an unknown kind")
    return parts


def _number_of(option: str) -> Callable[[str], float]:
    """Make a function that reads a number within the bounds of an option from a text; it raises ValueError for any other text."""
    kind, _ = get_args(OPTIONS[option])

    def read(text: str) -> float:
        value: float = kind(text)
        if fault_of(OPTIONS[option], value):
            raise ValueError
        return value

    return read


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that a command changes. name: of the option. read: turns the typed text into a value; raises ValueError for an impossible
    one. form: what can be typed, for people."""

    name: str
    read: Callable[[str], Any]
    form: str


SETTINGS: Mapping[str, Setting] = {
    "/voice": Setting("voice", str, "NAME, who speaks"),
    "/speed": Setting("speed", _number_of("speed"), f"X, {ABOUT['speed'].allowed_text}, how fast"),
    "/seed": Setting("seed", _number_of("seed"), "N, the same answer again"),
    "/max-tokens": Setting("max_tokens", _number_of("max_tokens"), "N, longest answer"),
    "/system": Setting("system", str, "TEXT, what the model is told first"),
}
"""The settings by their commands. With `off` after it, a command restores the default; alone, it shows the value."""

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

HELP_NOTES = (
    f"With {OFF} behind it a setting is as usual again, and a file is left out.",
    "A path in a message, or alone, is a picture, a sound or a film too.",
    'Alt-Enter begins a new line; """ before and behind a text of several lines makes it one message.',
    "Enter or Ctrl-C stops an answer; Ctrl-D ends.",
)
"""Further lines of the help, below the commands."""


def is_command(first_word: str) -> bool:
    """Whether a message that begins with this word is a command of the chat: a slash and letters. A path or a fraction is a question like
    any other."""
    return first_word in WORDS or (first_word.startswith("/") and first_word[1:].isalpha())


def change(settings: TalkSettings, command: str, value: str) -> str:
    """Set a setting. command: one of SETTINGS. value: the text after it; `off`: back to the default; empty: no change. Returns a line that
    states the present value. Raises RequestError."""
    setting = SETTINGS[command]
    values = cast("dict[str, Any]", settings)
    if value == OFF:
        values.pop(setting.name, None)
    elif value:
        try:
            values[setting.name] = setting.read(value)
        except ValueError:
            raise RequestError(f"{command} {value}: give {setting.form}, or {OFF}") from None
    return f"{command[1:]}: {values.get(setting.name, 'as usual')}"


def help_lines(columns: int | None) -> list[str]:
    """The help, in lines that are broken between words. columns: width of the terminal; None: there is none."""
    forms = {command: setting.form for command, setting in SETTINGS.items()} | OTHERS
    indent = max(map(len, forms)) + 2
    width = max((columns or WIDEST) - 1, indent + 8)  # A description has at least 8 columns, however narrow the terminal is.
    wrapped = partial(wrap, width=width, break_long_words=False, break_on_hyphens=False)
    entries = [wrapped(form, initial_indent=command.ljust(indent), subsequent_indent=" " * indent) for command, form in forms.items()]
    return [line for lines in (*entries, *map(wrapped, HELP_NOTES)) for line in lines]


def unknown(command: str) -> OmniError:
    """The error for a word that begins with a slash and is no command."""
    return RequestError(f"there is no {command}{did_you_mean(command, WORDS)}", hint="/help shows what can be typed.")


TOO_LONG = (["thinker.messages"], ["request"])
"""Fields that a refusal names if the conversation no longer fits into the model's context, or with its media into a request."""
