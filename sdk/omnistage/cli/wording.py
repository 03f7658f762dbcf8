"""Writes errors for a shell and for a chat, with the options and commands that can be typed there."""

from __future__ import annotations

from omnistage.client.errors import BadRequestError, OmniError
from omnistage.client.wording import Wording

TYPED_NAMES = {
    "pipeline": "--pipeline",
    "seed": "--seed",
    "timeout_s": "--timeout",
    "background": "--background",
    "max_tokens": "--max-tokens",
    "stop": "--stop",
    "json_schema": "--json-schema",
    "regex": "--regex",
    "choice": "--choice",
    "thinker.constraint": "--json-schema, --regex or --choice",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "voice": "--voice",
    "speed": "--speed",
    "max_frames": "--max-frames",
    "profile": "--profile",
    "sample_rate_hz": "--sample-rate",
    "encoding": "--encoding",
    "prompt": "PROMPT",
    "text": "TEXT",
    "verbatim": "TEXT",
    "messages": "the question",
    "conversation": "the question",
    "request": "the question",
    "negative_prompt": "--negative",
    "width": "--width",
    "height": "--height",
    "steps": "--steps",
    "guidance_scale": "--guidance",
    "results": "--count",
    "previews": "--previews",
    "preview_side": "--preview-side",
    "step_cache": "--step-cache",
    "sigmas": "--sigmas",
    "strength": "--strength",
    "mask_image": "--mask",
    "control_image": "--control",
    "options": "--option",
    "layers": "--layers",
    "frames": "--frames",
    "frames_per_second": "--fps",
    "seconds": "--seconds",
    "begin_s": "--begin",
    "guidance_scale_2": "--guidance-2",
    "flow_shift": "--flow-shift",
    "image": "--image",
    "media_type": "--out",
    "images": "--image",
    "audios": "--audio",
    "videos": "--video",
    "use_audio": "--video-sound",
    "address": "--address",
    "api_key": "--api-key",
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
