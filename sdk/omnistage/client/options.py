"""The options of a single call and the settings of a private stack, which callers give by name.

Two TypedDicts have the description of each keyword in its type. From these descriptions `help` and docs/client.md are made, and the values
are checked. The options that are fields of the contract stand in the protos alone, see call_options.py."""

# No postponed annotations here, because the docstrings of methods are made from the descriptions in these annotations.
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Annotated, Any, Union, get_args, get_origin

from omnistage.client.about import About, Range
from omnistage.client.call_options import FieldOptions
from omnistage.client.stage_settings import TENSOR_PARALLEL_SIZE, StageOptions

MODEL = "the model's"
DEFAULT_TIMEOUT_S = 120.0


class Options(FieldOptions, total=False):
    """The options of a single call. An absent option has the pipeline's default; if the pipeline has none, the default that is described
    here.

    `help(Omni.generate)` and docs/client.md explain each of them."""

    timeout_s: Annotated[float, About("Time limit of the whole call, seconds.", f"{DEFAULT_TIMEOUT_S:g}", Range(0, is_above=True))]
    max_retries: Annotated[
        int,
        About(
            "How often to ask again, within the time limit, if an error may pass and you have nothing of the answer yet.",
            "the client's, 2",
            Range(0),
        ),
    ]
    background: Annotated[
        str,
        About(
            "Colour under the transparent parts of pictures and films that are sent, as #rrggbb, in hexadecimal.",
            "white; a model of layers sees transparent parts",
        ),
    ]


OPTIONS: Mapping[str, Any] = Options.__annotations__
"""All options, each with its description."""

ABOUT: Mapping[str, About] = {name: get_args(annotation)[1] for name, annotation in OPTIONS.items()}
"""The descriptions alone."""


def _options_of(place: str) -> tuple[str, ...]:
    """The options that are fields of the message at this path of a request."""
    return tuple(name for name, about in ABOUT.items() if about.name and about.place == place)


TOP = _options_of("")
MEDIA = ("background",)
"""Options for the pictures and films that are sent."""
THINKER, SAMPLING, CONSTRAINTS = map(_options_of, ("thinker", "thinker.sampling", "thinker.constraint"))
TALKER, CODE2WAV, DIFFUSION = map(_options_of, ("talker", "code2wav", "diffusion"))
GUIDES = ("mask_image", "control_image")
"""Options that are pictures."""

EVERY_CALL = (*TOP, "timeout_s", "max_retries")
SPEECH = (*EVERY_CALL, *TALKER, *CODE2WAV)
"""Options for a text that is spoken unchanged."""
DRAWING = (*EVERY_CALL, *MEDIA, *DIFFUSION)


class StackSettings(StageOptions, total=False):
    """Settings of a private stack. An absent setting has the default of `omnistage serve`.

    A Mapping has values by stage, {"thinker": "cuda:0", "code2wav": "cpu"}, or by pipeline and stage, {"picture/diffusion": "cuda:0"},
    which take precedence. A bare value is for all stages that have a use for it. `help(Omni)` and docs/client.md explain each of them."""

    pipeline: Annotated[
        str | Sequence[str] | Mapping[str, str],
        About(
            "Name or YAML file of the pipeline, or a checkpoint, its folder or owner/name. If there are several, the first starts at once, "
            "each other one when it is asked. A Mapping has them by the names that they get, as `NAME=` before one in a text does.",
            "that of the checkpoint, or smol and picture",
        ),
    ]
    device: Annotated[str | Mapping[str, str], About("Where a model computes: cpu, cuda:0 ...", "cpu")]
    dtype: Annotated[
        str,
        About(
            "Number format that a model computes in; auto: the model's choice for this machine.", "auto", ("auto", "float32", "bfloat16")
        ),
    ]
    replicas: Annotated[Mapping[str, int], About('Processes by stage: {"talker": 2}.', "1 of each", Range(1, 64))]
    max_sessions: Annotated[int, About("Answers at once; further requests wait or are refused.", MODEL, Range(1, 4096))]
    lora: Annotated[
        str | Sequence[str],
        About("LoRA files (safetensors) of a pipeline that draws: FILE[@PART][=SCALE], after PIPELINE= if several draw.", "none"),
    ]
    inline_limit: Annotated[int, About("Tensors of fewer bytes travel in the message, others through shared memory.", "65536", Range(0))]
    start_timeout_s: Annotated[float, About("Time limit for download, load and start, seconds.", "900", Range(0, is_above=True))]


SETTINGS: Mapping[str, Any] = {
    **StackSettings.__annotations__,
    "tensor_parallel_size": TENSOR_PARALLEL_SIZE,
}
"""All settings, each with its description; the last one is a parameter of `Omni` itself."""

OF_CLIENT = ("address", "api_key", "model_path", "connect_timeout_s", "resume_timeout_s", "max_retries")
"""Parameters that `Omni` takes in addition to the settings."""


PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
"""The words of a message for each type."""
BY_STAGE = {int: 2, float: 0.5, bool: True, str: "cpu"}
"""An example of a value of each type."""

STAGES = ("thinker", "talker", "code2wav", "diffusion")


def fault_of(annotation: Any, value: object, *, of_kind: bool = False) -> str:
    """The fault of a value in words; empty: there is none. annotation: of the keyword, `Annotated[type, About]`. of_kind: check only the
    type, because a server checks the range."""
    kind, about = get_args(annotation)
    allowed = replace(about, allowed=None) if of_kind else about
    if any(_fits(one, allowed, plain(value)) for one in _kinds(kind)):
        return ""
    return f"is {show_value(value)}; it must be {_allowed_text(kind, about)}"


def plain(value: Any) -> Any:
    """A number of NumPy, or of another array library, as a number of Python; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def fault_of_stages(annotation: Any, value: object) -> str:
    """The fault of a setting's value in words; empty: there is none. The value may be a mapping by stage, or by pipeline and stage."""
    if fault := fault_of(annotation, value):
        return fault
    keys = value if isinstance(value, Mapping) else ()
    for key in keys:
        if key.rpartition("/")[2] not in STAGES or key.startswith("/") or "=" in key:
            return f"has {show_value(key)}; the stages are {', '.join(STAGES)}, or PIPELINE/STAGE"
    values = value.values() if isinstance(value, Mapping) else (value,)
    return "is empty; give a value, or leave it out" if "" in values else ""


def _kinds(kind: Any) -> Sequence[Any]:
    """The types in a union, or [kind] if `kind` is no union."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(kind: Any, about: About, value: object) -> bool:
    """Whether a value (as `plain` gives it) is of this type, and `about` allows it. In a list or a dict this holds for each value."""
    origin = get_origin(kind)
    if origin is Mapping:
        inner = get_args(kind)[1]
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and (inner is Any or _fits(inner, about, one)) for key, one in value.items()
        )
    if origin is Sequence:
        inner = get_args(kind)[0]
        return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(_fits(inner, about, one) for one in value)
    if kind is bool:
        return isinstance(value, bool)
    if kind is str:  # A range bounds only numbers.
        return isinstance(value, str) and (about.allowed is None or isinstance(about.allowed, Range) or value in about.allowed)
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        return False
    if not isinstance(value, Integral) and not math.isfinite(value):
        return False
    if isinstance(about.allowed, Range):
        return about.allowed.has(value)  # type: ignore[arg-type]  # Not as a float: a whole number may be too large.
    # The allowed words may be those of numbers, such as the sample rates.
    return about.allowed is None or str(value) in about.allowed


def _allowed_text(kind: Any, about: About) -> str:
    """The allowed values in words that follow "it must be"."""
    if isinstance(about.allowed, Sequence):
        *others, last = about.allowed
        return f"{', '.join(others)} or {last}"
    words = list[str]()
    for one in _kinds(kind):
        if one in PLAIN:
            words.append(f"{PLAIN[one]}, {about.allowed_text}" if about.allowed_text else PLAIN[one])
        elif get_origin(one) is Sequence:
            words.append("a list of texts" if get_args(one)[0] is str else "a list of numbers")
        elif any(get_origin(each) is Sequence for each in _kinds(kind)):  # Several of something are a list, or have names.
            words.append("a dict by name, such as {'film': 'DIR'}")
        else:
            inner = get_args(one)[1]
            words.append("a dict" if inner is Any else f"a dict by stage, such as {{'talker': {BY_STAGE[inner]!r}}}")
    return ", or ".join(words)


def show_value(value: object) -> str:
    """A value as a message shows it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to convert a whole number of thousands of digits to text.
        return "a number of too many digits"
    return text if len(text) <= 64 else f"{text[:60]} ..."
