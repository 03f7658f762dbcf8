"""Options that only some pipelines have. The signature of the pipeline's `__call__` shows their names and types. No torch."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omnistage.models.interface import BadRequest

Value = bool | int | float | str
Range = tuple[float, float]

KINDS: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
MAX_COUNT = 1024
MAX_NUMBER = 1e6

SAID_ELSEWHERE: Mapping[str, str] = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "image": "images",
    "width": "width",
    "height": "height",
    "resolution": "width and height",
    "num_inference_steps": "steps",
    "sigmas": "sigmas",
    "strength": "strength",
    "mask_image": "mask_image",
    "control_image": "control_image",
    "generator": "seed",
    "layers": "layers",
    "output_type": "media_type",
    **dict.fromkeys(("num_frames", "video_length", "min_seconds", "max_seconds"), "frames"),
    **dict.fromkeys(("frame_rate", "fps"), "frames_per_second"),
    **dict.fromkeys(("audio_length_in_s", "audio_end_in_s", "audio_duration_s", "audio_duration", "duration"), "duration_s"),
    **dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt"), "results"),
}
"""Parameters of pipelines that a field of the request sets."""
GUIDANCE = ("true_cfg_scale", "guidance_scale")
"""The first of these that a pipeline has is set by the guidance_scale of requests."""
SERVERS = frozenset({"self", "return_dict", "callback_steps", "enable_prompt_rewrite", "sample_audio"})
"""Parameters that only a server sets. It also sets all parameters that are no number and no text, such as latents."""


@dataclass(frozen=True, slots=True)
class OwnOption:
    """An option. kind: the type of its values, one of KINDS. min_value, max_value: bounds of a number."""

    name: str
    kind: type
    min_value: float = -MAX_NUMBER
    max_value: float = MAX_NUMBER

    def __repr__(self) -> str:
        """The text in a model's revision, so it does not change with the names of fields."""
        return f"OwnOption(name={self.name!r}, kind={self.kind!r}, least={self.min_value!r}, most={self.max_value!r})"

    def __str__(self) -> str:
        """The permitted values, in words."""
        bounded = self.kind in (int, float) and (self.min_value, self.max_value) != (-MAX_NUMBER, MAX_NUMBER)
        return f"{KINDS[self.kind]} from {self.min_value:g} to {self.max_value:g}" if bounded else KINDS[self.kind]

    def read(self, text: str) -> Value:
        """The value that a text states. Raises ValueError for a text that states no permitted value."""
        if self.kind is str:
            return text
        if self.kind is bool:
            return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _fail(self)
        try:
            value: int | float = self.kind(text)
        except ValueError:
            value = float(text)  # A whole number may be written as 2.0.
        # Bounds first: NaN has no whole number, and not every whole number has a float.
        if not self.min_value <= value <= self.max_value or (self.kind is int and value != int(value)):
            _fail(self)
        return self.kind(value)  # type: ignore[no-any-return]


def own_options(call: Callable[..., Any], guidance: str | None, followed: Mapping[str, Range] | None = None) -> tuple[OwnOption, ...]:
    """The options of a pipeline's `__call__`. guidance: its parameter for the request's guidance_scale. followed: the parameters that a
    loop here follows, with their bounds; None: all, for a whole call. A count costs memory, so its bound follows from its usual value."""
    try:
        hints = typing.get_type_hints(call)
    except (NameError, TypeError):  # Types that a module imports only for type checkers are missing at run time.
        hints = {}
    options = list[OwnOption]()
    for name, parameter in inspect.signature(call).parameters.items():
        kind = _kind(hints.get(name, parameter.annotation), parameter.default)
        if kind is None or name in SAID_ELSEWHERE or name in SERVERS or name == guidance or "embeds" in name:
            continue
        option = OwnOption(name, kind)
        if kind is int:
            default = parameter.default if isinstance(parameter.default, int) else 0
            # No pipeline takes 0 for a count that begins at 1.
            option = replace(option, min_value=1 if default > 0 else default, max_value=max(2 * default, MAX_COUNT))
        if followed is None:
            options.append(option)
        elif name in followed:
            options.append(replace(option, min_value=followed[name][0], max_value=followed[name][1]))
    return tuple(options)


def read_options(texts: Mapping[str, str], model_options: Collection[OwnOption], model: str) -> tuple[tuple[str, Value], ...]:
    """The values of the options, ordered by name. texts: by name. Raises BadRequest for an option that the model does not have, or a value
    of another type."""
    options = {option.name: option for option in model_options}
    read = []
    for name, text in sorted(texts.items()):
        if name not in options:
            raise BadRequest("diffusion.options", f"{model} has no option {name[:64]!r}: {_advice(name, options)}")
        try:
            read.append((name, options[name].read(text)))
        except ValueError:
            advice = f"{name} is {text[:64]!r}: give {options[name]}"
            raise BadRequest("diffusion.options", advice) from None
    return tuple(read)


def _advice(name: str, options: Collection[str]) -> str:
    """Advice for a name that is no option: the field of the request, or the options that there are."""
    if field := {**SAID_ELSEWHERE, **dict.fromkeys(GUIDANCE, "guidance_scale")}.get(name):
        return f"the request has {field} for it"
    return f"it has {', '.join(options)}" if options else "leave it out"


def _kind(annotation: Any, default: Any) -> type | None:
    """The type of a parameter's values, one of KINDS; None if it has only values that a request cannot carry."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    able: tuple[Any, ...] = typing.get_args(annotation) if union else (annotation,)
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        able = (type(default),)
    return next((kind for kind in KINDS if kind in able), None)


def _fail(option: OwnOption) -> typing.NoReturn:
    raise ValueError(f"{option.name} is {option}")
