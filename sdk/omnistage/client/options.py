"""The options of a single call and the settings of a private stack, which callers give by name.

Two TypedDicts have the description of each keyword in its type. From these descriptions `help` and docs/client.md are made, and the values
are checked."""

# No postponed annotations here, because the docstrings of methods are made from the descriptions in these annotations.
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import cleandoc
from numbers import Integral, Real
from os import PathLike
from typing import Annotated, Any, Protocol, TypedDict, TypeVar, Union, get_args, get_origin

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`. high: None: there is no upper bound. is_above: `low` itself is excluded. is_below: `high` itself is
    excluded."""

    low: float
    high: float | None = None
    is_above: bool = False
    is_below: bool = False

    def has(self, value: float) -> bool:
        is_low = value <= self.low if self.is_above else value < self.low
        is_within_high = self.high is None or (value < self.high if self.is_below else value <= self.high)
        return is_within_high and not is_low

    def __str__(self) -> str:
        low_text = f"{'above' if self.is_above else 'from'} {_number(self.low)}"
        if self.high is None:
            return low_text
        if not self.is_above and not self.is_below:
            return f"{_number(self.low)} to {_number(self.high)}"
        return f"{low_text}, {'below' if self.is_below else 'at most'} {_number(self.high)}"


@dataclass(frozen=True, slots=True)
class About:
    """The description of one keyword. meaning: a sentence for users. default: the value if the keyword is absent, in words. allowed: the
    numbers or the words that its value may be; None: any value."""

    meaning: str
    default: str
    allowed: Range | Sequence[str] | None = None

    @property
    def allowed_text(self) -> str:
        """The allowed values in words; empty if any value of the type is allowed."""
        if self.allowed is None or isinstance(self.allowed, Range):
            return str(self.allowed or "")
        return ", ".join(self.allowed)


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword: its name, its type as people write it, and its description."""

    name: str
    type_text: str
    about: About

    def __str__(self) -> str:
        allowed = f"; {self.about.allowed_text}" if self.about.allowed else ""
        return f"    {self.name} ({self.type_text}{allowed}; default: {self.about.default})\n        {self.about.meaning}\n"


def keywords(annotations: Mapping[str, Any]) -> list[Keyword]:
    """The keywords of annotations that are all `Annotated[..., About(...)]`, such as those of a TypedDict, in the same order."""
    types_and_abouts = {name: get_args(annotation) for name, annotation in annotations.items()}
    return [Keyword(name, type_text(kind), about) for name, (kind, about) in types_and_abouts.items()]


def type_text(kind: Any) -> str:
    """A type as people write it: `str or Mapping[str, Any]`."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(type_text, get_args(kind)))
    if inner := get_args(kind):
        return f"{get_origin(kind).__name__}[{', '.join(map(type_text, inner))}]"
    return getattr(kind, "__name__", str(kind))


def takes(annotations: Mapping[str, Any], names: Collection[str] | None = None) -> Callable[[F], F]:
    """A decorator that adds descriptions of keywords to the docstring. names: the keywords to describe; None: all of `annotations`."""
    lines = [str(keyword) for keyword in keywords(annotations) if names is None or keyword.name in names]

    def extended(function: F) -> F:
        if function.__doc__:  # With -OO there is no docstring.
            function.__doc__ = f"{cleandoc(function.__doc__)}\n\nKeyword arguments:\n{''.join(lines)}"
        return function

    return extended


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


class Readable(Protocol):
    """A file that was opened in binary mode, or an object with the same `read`."""

    def read(self, size: int, /) -> bytes: ...


class PillowImage(Protocol):
    """A picture of Pillow; it is sent as PNG or TIFF, every pixel unchanged."""

    @property
    def mode(self) -> str: ...

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None: ...


Encoded = bytes | bytearray | memoryview | str | PathLike[str] | Readable
"""An encoded file (PNG, JPEG, WAV, MP3, MP4 ...): its bytes, its path, an open file, or a data: URL."""

ImageLike = Encoded | PillowImage


PIPELINE = "the pipeline's"
MODEL = "the model's"
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "video/webm", "video/mp4", 'video/mp4; codecs="avc1"')


class Options(TypedDict, total=False):
    """The options of a single call. An absent option has the pipeline's default; if the pipeline has none, the default that is described
    here.

    `help(Omni.generate)` and docs/client.md explain each of them."""

    pipeline: Annotated[str, About("Pipeline name, from `pipelines()`.", "the router's choice")]
    outputs: Annotated[
        Sequence[str],
        About(
            "Names of the outputs: text, audio, image, video; also alignment, latents, pixels, if a pipeline gives them on request.",
            "all but those on request; draw, film and sound ask for one alone",
        ),
    ]
    seed: Annotated[
        int,
        About(
            "The same seed gives the same answer; `Answer.seed` tells which seed was used. Without a temperature above 0 the text does not"
            " depend on chance, and every seed gives the same; `Answer.drew` tells whether another seed could have given another answer.",
            "random",
            Range(0, 2**64 - 1),
        ),
    ]
    conversation_id: Annotated[
        str, About("Turns of one conversation share it, for warm prefixes; at most 64 characters of A-Z a-z 0-9 _ -.", "none")
    ]
    request_id: Annotated[
        str,
        About(
            "Name of this request, at most 64 characters of A-Z a-z 0-9 _ -. A second request with the same name ends the answer that still"
            " runs for the first.",
            "one of its own",
        ),
    ]
    timeout_s: Annotated[float, About("Time limit of the whole call, seconds.", "120", Range(0, is_above=True))]
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

    max_tokens: Annotated[int, About("The most tokens of the answer.", PIPELINE, Range(1, 32768))]
    min_tokens: Annotated[int, About("The fewest tokens of the answer; no more than max_tokens.", "0", Range(0, 32768))]
    stop: Annotated[str | Sequence[str], About("The text ends before any of these; at most 16, of 1 to 256 characters.", "none")]
    ignore_eos: Annotated[bool, About("Go on after the end-of-text token.", "False")]
    json_schema: Annotated[
        str | Mapping[str, Any], About("The text is JSON that keeps to this schema, given as JSON or as a dict.", "none")
    ]
    regex: Annotated[str, About("The whole text keeps to this regular expression.", "none")]
    choice: Annotated[Sequence[str], About("The text is one of these; at most 1024.", "none")]
    logprobs: Annotated[bool, About("Report how likely each token was: `TextDelta.logprobs`, `Answer.logprobs`.", "False")]
    top_logprobs: Annotated[int, About("How many of the likeliest tokens to report too, in `TextDelta.top_logprobs`.", "0", Range(0, 20))]
    temperature: Annotated[float, About("How freely tokens are drawn; 0 takes the likeliest.", PIPELINE, Range(0, 2))]
    top_k: Annotated[int, About("Draw from this number of the likeliest tokens; 0 is off.", PIPELINE, Range(0))]
    top_p: Annotated[
        float, About("Draw from the likeliest tokens that together have this probability; 1 is off.", PIPELINE, Range(0, 1, is_above=True))
    ]
    min_p: Annotated[
        float,
        About(
            "Draw from tokens with at least this part of the probability of the likeliest; 0 is off.", PIPELINE, Range(0, 1, is_below=True)
        ),
    ]
    repetition_penalty: Annotated[
        float, About("Above 1, tokens that were there before are less likely; 1 is off.", PIPELINE, Range(0, 100, is_above=True))
    ]
    presence_penalty: Annotated[
        float, About("Subtracted once from the logit of each token that was made before; 0 is off.", PIPELINE, Range(-2, 2))
    ]
    frequency_penalty: Annotated[
        float, About("Subtracted from the logit of a token for each time that it was made; 0 is off.", PIPELINE, Range(-2, 2))
    ]

    voice: Annotated[str, About("Voice name, from `pipelines()`.", MODEL)]
    speed: Annotated[float, About("Speed of speech.", "1", Range(0.5, 2))]
    markdown: Annotated[
        bool,
        About("Whether a text that is spoken unchanged is Markdown, and its marks are not read. What a model writes always is.", "False"),
    ]
    max_frames: Annotated[int, About("The most frames of speech; the model decides how many a second has.", PIPELINE, Range(1, 1 << 20))]

    profile: Annotated[str, About("How sound is cut into chunks.", "balanced", ("latency", "balanced", "quality", "offline"))]
    sample_rate_hz: Annotated[
        int,
        About(
            "Sample rate of the sound, or the model's own.",
            MODEL,
            ("8000", "11025", "12000", "16000", "22050", "24000", "32000", "44100", "48000"),
        ),
    ]
    encoding: Annotated[str, About("The form of the samples.", "pcm16", ("pcm16", "float32"))]

    negative_prompt: Annotated[str, About("Words for things that the picture must not show.", "none")]
    width: Annotated[int, About("Pixels.", MODEL, Range(1, 16384))]
    height: Annotated[int, About("Pixels.", MODEL, Range(1, 16384))]
    steps: Annotated[int, About("Denoising steps.", MODEL, Range(1, 1000))]
    guidance_scale: Annotated[float, About("How closely to follow the prompt.", MODEL, Range(0, 100))]
    results: Annotated[int, About("How many pictures.", "1", Range(1, 8))]
    previews: Annotated[int, About("How many previews come during the drawing, of the first result alone.", "0", Range(0, 16))]
    preview_side: Annotated[int, About("Longest side of a preview, pixels.", MODEL, Range(1, 1024))]
    step_cache: Annotated[
        float,
        About(
            "How much the first block may change in a step (1 is all of it) for the step to reuse what the other blocks added before:"
            " faster, but another picture. 0 is off.",
            "0",
            Range(0, 1),
        ),
    ]
    sigmas: Annotated[
        Sequence[float],
        About(
            "Noise levels of the steps, in place of steps, as the pipeline takes them: at least 1e-6, each below the one before it, at most"
            " 1000 of them.",
            "the pipeline's, for the number of steps",
        ),
    ]
    strength: Annotated[
        float,
        About("How much of the given picture is drawn anew, if the pipeline has this option.", PIPELINE, Range(0, 1, is_above=True)),
    ]
    mask_image: Annotated[
        ImageLike,
        About("For a pipeline that fills in: a picture, as large as the other, that is white or transparent where to draw anew.", "none"),
    ]
    control_image: Annotated[
        ImageLike, About("For a pipeline with a ControlNet: a picture that guides the drawing, such as edges or depths.", "none")
    ]
    options: Annotated[
        Mapping[str, Any],
        About(
            "Options of the pipeline's own, by their names in diffusers, such as {'cfg_normalization': True}; at most 64.",
            MODEL,
        ),
    ]
    frames: Annotated[int, About("Frames of a film.", MODEL, Range(1, 1 << 16))]
    frames_per_second: Annotated[float, About("Frames a second of a film.", MODEL, Range(0.1, 120))]
    seconds: Annotated[float, About("Length of a sound, or of a film if frames are not given.", MODEL, Range(0, 3600, is_above=True))]
    begin_s: Annotated[float, About("The second at which the sound begins, if it is a part of a longer one.", "0", Range(0, 3600))]
    guidance_scale_2: Annotated[
        float, About("How closely to follow the prompt in the steps of a second transformer.", "guidance_scale", Range(0, 100))
    ]
    flow_shift: Annotated[float, About("How far the schedule is shifted to the side of more noise.", MODEL, Range(0, 100, is_above=True))]
    layers: Annotated[int, About("How many layers each picture has, for a model that draws layers.", MODEL, Range(0, 64))]
    media_type: Annotated[
        str,
        About("Type of the file, if the model makes it; a film in MP4 is VP9 unless avc1 asks for H.264.", MODEL, MEDIA_TYPES),
    ]


TOP = ("pipeline", "outputs", "seed", "conversation_id", "request_id")
MEDIA = ("background",)
"""Options for the pictures and films that are sent."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
THINKER = ("max_tokens", "min_tokens", "stop", "ignore_eos", "logprobs", "top_logprobs")
CONSTRAINTS = ("json_schema", "regex", "choice")
TALKER = ("voice", "speed", "markdown", "max_frames")
CODE2WAV = ("profile", "sample_rate_hz", "encoding")
DIFFUSION = (
    *("negative_prompt", "width", "height", "steps", "guidance_scale", "results", "previews", "preview_side", "step_cache"),
    *("frames", "frames_per_second", "seconds", "begin_s", "guidance_scale_2", "flow_shift"),
    *("sigmas", "strength", "mask_image", "control_image", "options", "layers", "media_type"),
)
GUIDES = ("mask_image", "control_image")
"""Options that are pictures."""

EVERY_CALL = (*TOP, "timeout_s", "max_retries")
SPEECH = (*EVERY_CALL, *TALKER, *CODE2WAV)
"""Options for a text that is spoken unchanged."""
DRAWING = (*EVERY_CALL, *MEDIA, *DIFFUSION)


OPTIONS: Mapping[str, Any] = Options.__annotations__
"""All options, each with its description."""


class StackSettings(TypedDict, total=False):
    """Settings of a private stack. An absent setting has the default of `omnistage serve`.

    A Mapping has values by stage, {"thinker": "cuda:0", "code2wav": "cpu"}, or by pipeline and stage, {"picture/diffusion": "cuda:0"},
    which take precedence. A bare value is for all stages that have a use for it. `help(Omni)` and docs/client.md explain each of them."""

    pipeline: Annotated[
        str | Sequence[str],
        About(
            "Name or YAML file of the pipeline. If there are several, the first starts at once, each other one when it is asked.",
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
    threads: Annotated[int | Mapping[str, int], About("Compute threads of a process.", "1", Range(1, 64))]
    replicas: Annotated[Mapping[str, int], About('Processes by stage: {"talker": 2}.', "1 of each", Range(1, 64))]
    max_sessions: Annotated[int, About("Answers at once; further requests wait or are refused.", MODEL, Range(1, 4096))]
    max_batch_size: Annotated[
        int | Mapping[str, int], About("Sequences in one step; other answers wait for a place in it.", "max_sessions", Range(1, 4096))
    ]
    max_batch_tokens: Annotated[
        int | Mapping[str, int],
        About(
            "Rows in one step. With fewer rows, a prompt that is read holds other answers up less; with more, it is read in fewer steps.",
            MODEL,
            Range(1, 1 << 20),
        ),
    ]
    kv_cache_bytes: Annotated[int | Mapping[str, int], About("Memory for keys and values, at least one whole context.", MODEL, Range(1))]
    enable_cache: Annotated[bool | Mapping[str, bool], About("Keep computed results for later prompts with the same beginning.", "True")]
    gpu_memory_utilization: Annotated[
        float | Mapping[str, float],
        About("Part of a GPU's memory that may be filled; has no effect on a CPU.", MODEL, Range(0, 1, is_above=True)),
    ]
    memory_share: Annotated[
        float | Mapping[str, float],
        About(
            "Part of a device's memory that a process may count on, if several processes that take all free memory share the device.",
            "equal parts",
            Range(0, 1, is_above=True),
        ),
    ]
    lora: Annotated[
        str | Sequence[str],
        About("LoRA files (safetensors) of a pipeline that draws: FILE[@PART][=SCALE], after PIPELINE= if several draw.", "none"),
    ]
    inline_limit: Annotated[int, About("Tensors of fewer bytes travel in the message, others through shared memory.", "65536", Range(0))]
    start_timeout_s: Annotated[float, About("Time limit for download, load and start, seconds.", "900", Range(0, is_above=True))]


SETTINGS: Mapping[str, Any] = {
    **StackSettings.__annotations__,
    "tensor_parallel_size": Annotated[
        int | Mapping[str, int],
        About("Number of ranks over which a model is spread: processes of this machine, each with a GPU.", "1", Range(1, 64)),
    ],
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
        if key.rpartition("/")[2] not in STAGES:
            return f"has {show_value(key)}; the stages are {', '.join(STAGES)}, or PIPELINE/STAGE"
    return ""


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
