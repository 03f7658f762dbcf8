"""Writes errors in the words of the user's interface: Python here, a shell and a chat in `cli.wording`, HTTP in `gateway.failure`.

An error has two texts. Its hint has places for names: "ask for less ({max_tokens})" is `max_tokens` in Python and `--max-tokens` in a
shell; `{pipeline=NAME}` is an option with its value. Its message comes from the code that found the fault, with the contract's names of
fields. In a message the field at its beginning and the names of options are replaced, but only names with an underscore: `seed` and
`stop` are English words too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omnistage.client.options import CODE2WAV, CONSTRAINTS, DIFFUSION, OPTIONS, SAMPLING, TALKER, THINKER
from omnistage.client.settings import SETTINGS

OF_STAGES = {
    "thinker": (*THINKER, "messages", "verbatim"),
    "thinker.sampling": SAMPLING,
    "thinker.constraint": CONSTRAINTS,
    "talker": TALKER,
    "code2wav": (*TALKER, *CODE2WAV),
    "diffusion": (*DIFFUSION, "prompt", "images"),
}
"""The fields of a request for each stage."""

OPTION_OF = {
    "model": "pipeline",
    "diffusion.duration_s": "seconds",
    **{f"{stage}.{name}": name for stage, names in OF_STAGES.items() for name in names},
}
"""The option that sets a field of the contract, if their names differ."""

_PLACE = re.compile(r"\{([a-z_0-9]+)(?:=([^{}]*))?\}")
"""A place in a hint: {NAME} or {NAME=VALUE}."""
_QUOTED = re.compile(r"""('[^']*'|"[^"]*")""")
_NAME = re.compile(r"(?<![\w./-])(?:[a-z0-9]+\.)*[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/-]|\.\w)")
"""A name with an underscore in a message, with the names of stages before it if there are some: talker.max_frames."""


def rename_field(field: str, names: Mapping[str, str]) -> str:
    """The field as the caller writes it: `names` replaces the longest beginning of the field that is one of its keys."""
    for name in sorted(names, key=len, reverse=True):
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return names[name] + field[len(name) :]
    return field


@dataclass(frozen=True, slots=True)
class Wording:
    """Writes errors with the names that the users of one interface know. names: the local name of an option, a setting, or another {NAME}
    in a hint; a name that is absent here stays. with_value: returns an option and its value as a user types them."""

    names: Mapping[str, str]
    with_value: Callable[[str, str], str]

    def name_of(self, field: str) -> str:
        """The name of a field of the contract, or of an option."""
        return rename_field(rename_field(field, OPTION_OF), self.names)

    def hint(self, advice: str) -> str:
        """A hint with local names in place of each {NAME}; a {NAME} that is unknown stays."""

        def filled(place: re.Match[str]) -> str:
            name = self.names.get(place[1], place[1] if place[1] in OPTIONS else None)
            if name is None:
                return place[0]
            return name if place[2] is None else self.with_value(name, place[2])

        return _PLACE.sub(filled, advice)

    def message(self, message: str, fields: tuple[str, ...] = ()) -> str:
        """A message in local words. fields: the contract's names of the fields that it is about."""
        for field in fields:
            for spelt in (field, PYTHON.name_of(field)):
                if message.startswith(f"{spelt}:"):
                    message = self.name_of(field) + message[len(spelt) :]
                    break
        head, colon, rest = message.partition(": ") if fields else ("", "", message)
        pieces = _QUOTED.split(rest)  # A quoted text is somebody's own and stays.
        pieces[::2] = [_NAME.sub(lambda name: self.name_of(name[0]), piece) for piece in pieces[::2]]
        return f"{head}{colon}{''.join(pieces)}"


def of_launcher(message: str) -> str:
    """The launcher's message about settings in Python's names; the launcher writes settings as options of `omnistage serve`."""
    message = re.sub(r"--replicas (\w+)=(\d+)", r"replicas={'\1': \2}", message)
    names = {f"--{name.replace('_', '-')}": name for name in SETTINGS} | {"--checkpoint": "model_path"}
    return re.sub(r"--[a-z][a-z-]*[a-z]", lambda option: names.get(option[0], option[0]), message)


PYTHON = Wording(
    {
        "thinker.constraint": "json_schema, regex or choice",
        "pipelines": "`pipelines()`",
        "servers": "`replicas()`",
        "addresses": "address='HOST:PORT,HOST:PORT'",
        "more_places": "max_sessions=N or replicas={'talker': 2}",
        "anew": "make a new Omni",
        "output": "a stack of `omnistage serve --verbose` shows what its processes say",
        "keep_sound": "answer.save(path), or SoundFile",
        "text_alone": "outputs=['text']",
        "named_with": "pipeline='NAME' beside model_path",
        "start_timeout": "start_timeout_s",
        "address": "address",
    },
    lambda name, value: f"{name}={value!r}",
)
