"""Writes errors for a shell and for a chat, with the options and commands that can be typed there."""

from __future__ import annotations

from omnistage.client.errors import BadRequestError, OmniError
from omnistage.client.options import ABOUT
from omnistage.client.wording import Wording

TYPED_NAMES = {
    **{name: about.typed for name, about in ABOUT.items() if about.typed},
    **{name: f"--{name.replace('_', '-')}" for name in ("background", "address", "api_key")},
    **dict.fromkeys(("messages", "conversation", "request"), "the question"),
    **dict.fromkeys(("image", "images"), "--image"),
    "audios": "--audio",
    "videos": "--video",
    "use_audio": "--video-sound",
    "timeout_s": "--timeout",
    "thinker.constraint": "--json-schema, --regex or --choice",
    "prompt": "PROMPT",
    "text": "TEXT",
    "verbatim": "TEXT",
    "model_path": "--checkpoint",
}
"""By the option or field of the Python client: the words that a user of a shell types."""

SHELL = Wording(
    {
        **TYPED_NAMES,
        "pipelines": "`omnistage pipelines`",
        "servers": "`omnistage status`",
        "addresses": "--address HOST:PORT,HOST:PORT",
        "more_places": "`omnistage serve --max-sessions N`",
        "anew": "ask again",
        "output": "--verbose shows what its processes say",
        "keep_sound": "--out F",
        "text_alone": "--text-only, without --out and --captions",
        "named_with": "`omnistage serve NAME --checkpoint DIR`",
        "own_stack": "--pipeline DIR",
        "start_timeout": "`omnistage serve`, which waits without a limit",
    },
    lambda name, value: f"{name} {value}",
)

CHAT = Wording(
    {
        **SHELL.names,
        "voice": "/voice",
        "speed": "/speed",
        "seed": "/seed",
        "max_tokens": "/max-tokens",
        "keep_sound": "/save F",
    },
    SHELL.with_value,
)


def word_error(error: OmniError, wording: Wording = SHELL) -> tuple[str, str]:
    """Returns (the message of an error, its hint, which may be empty) in the words of one place. Only the message of a refusal of fields is
    reworded: others are written for a shell already."""
    if not isinstance(error, BadRequestError):
        return error.message, wording.hint(error.advice)
    faults = {bad.field: bad.description.removeprefix(f"{bad.field}: ") for bad in error.fields}
    reworded = wording.message(error.message)
    further_faults = [f"{field}: {fault}" for field, fault in faults.items() if wording.message(fault) not in reworded]
    message = wording.message("; ".join([error.message, *further_faults]), tuple(bad.field for bad in error.fields))
    return message, wording.hint(error.advice)
