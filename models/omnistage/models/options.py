"""Options for loading a model, and those that Thinkers with encoders, their Talkers and Code2Wavs have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from omnistage.models.reports import LoadError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Made = TypeVar("Made", bound="DataclassInstance")


class SettingsLike(Protocol):
    """The settings of a server that loading uses; see omnistage.stage.settings."""

    checkpoint: str
    device: str
    threads: int
    max_sessions: int
    max_batch_size: int
    max_batch_tokens: int
    kv_cache_bytes: int
    enable_cache: bool | None
    tensor_parallel_size: int
    gpu_memory_utilization: float
    memory_share: float
    options: dict[str, int | float | str | bool]

    @property
    def dtype(self) -> str: ...


USUAL_SESSIONS = 64


def with_resumed(sessions: int) -> int:
    """Number of sessions that a replica with a limit of `sessions` may have when it takes over sessions of a lost replica. They may exceed
    the limit, because they must not be refused while there is memory for them."""
    return 2 * sessions


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options with which a model is loaded. A default leaves a setting to the model. path: folder of a checkpoint; None: the family's
    own checkpoint. threads: torch threads of a computing thread. max_sessions: largest number of answers at once. max_batch_size,
    max_batch_tokens: largest numbers of sequences and of rows in one step. kv_cache_bytes: bytes of keys and values. enable_cache: whether
    to keep the common beginnings of prompts. tensor_parallel_size: number of ranks of the model. gpu_memory_utilization: part of a GPU's
    memory that it may fill, above 0 to 1. memory_share: part of the device's memory that it may count on, above 0 to 1, if other models
    that take all free memory start at the same time. family: options that only models of one family have."""

    path: Path | None = None
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    max_sessions: int = 0
    max_batch_size: int = 0
    max_batch_tokens: int = 0
    kv_cache_bytes: int = 0
    enable_cache: bool | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.0
    memory_share: float = 1.0
    family: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: SettingsLike) -> LoadOptions:
        path = Path(settings.checkpoint) if settings.checkpoint else None
        keywords = {name: getattr(settings, name) for name in ("device", "dtype", "max_sessions", *OPTIONAL)}
        return cls(path, family=settings.options, **keywords)

    def is_set(self, name: str) -> bool:
        """Whether the user set this setting to another value than the default."""
        return bool(getattr(self, name) != DEFAULTS[name])

    @property
    def sessions(self) -> int:
        """Largest number of answers at once; USUAL_SESSIONS if the user does not set it."""
        return self.max_sessions or USUAL_SESSIONS

    @property
    def keeps_prompts(self) -> bool:
        """Whether the common beginnings of prompts are kept, which is the default."""
        return self.enable_cache is not False

    def describe(self, name: str, value: object) -> str:
        """The text of a setting's chosen value, marked as default if the user did not set it."""
        return value_text(value) if self.is_set(name) else f"{value_text(value)} (default)"


def validate_options(options: Mapping[str, Any], defaults: DataclassInstance, of: str) -> Mapping[str, Any]:
    """Returns `options` after a check that each is known and has the type of its default. defaults: the family's options with default
    values. of: the model's name in errors. Raises LoadError."""
    default_values = {each.name: getattr(defaults, each.name) for each in fields(defaults)}
    unknown = sorted(options.keys() - default_values.keys())
    if unknown:
        raise LoadError(f"unknown options {unknown} of {of}; known are {sorted(default_values)}")
    for name, value in options.items():
        default = default_values[name]
        types = (int, float) if isinstance(default, float) else type(default)
        # Python counts a bool as an int; an option does not.
        if not isinstance(value, types) or isinstance(value, bool) is not isinstance(default, bool):
            raise LoadError(f"option {name} of {of} is {value!r} and must be like {default!r}")
    return options


def not_negative(options: Made, of: str) -> Made:
    """Returns `options` after a check that no number is below 0. of: the model's name in errors. Raises LoadError."""
    for each in fields(options):
        value = getattr(options, each.name)
        if not isinstance(value, str) and value < 0:
            raise LoadError(f"option {each.name} of {of} is {value}; 0 leaves it to the model")
    return options


def check_counts(options: DataclassInstance, names: Sequence[str], of: str) -> None:
    """Raises LoadError for an option below 1. names: the options to check. of: the model's name in errors."""
    for name in names:
        if getattr(options, name) < 1:
            raise LoadError(f"option {name} of {of} is {getattr(options, name)}: give 1 or more")


def value_text(value: object) -> str:
    """The text of a value, spelled as on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


GPU_MEMORY = "gpu_memory_utilization"
"""Name of a setting that every model accepts on a CPU, where it has no effect."""

MEMORY_SHARE = "memory_share"
"""Name of a setting of models that take all free memory."""

OPTIONAL = (
    "threads",
    "max_batch_size",
    "max_batch_tokens",
    "kv_cache_bytes",
    "enable_cache",
    "tensor_parallel_size",
    GPU_MEMORY,
    MEMORY_SHARE,
)
"""Settings that not every model uses."""

DEFAULTS: Mapping[str, object] = {each.name: each.default for each in fields(LoadOptions)}


@dataclass(frozen=True, slots=True)
class ThinkerOptions:
    """Options of a Thinker; 0 leaves a choice to the model. family: name of the family, for humans.

    context: tokens that a conversation and its answer may have together. medium_rows: tokens that a picture or film may have; larger media
    are made smaller. feature_cache_bytes: largest number of bytes of kept features of media. decoders: number of processes that decode
    media. film_fps: frames a second as which the frames of each film count, at any speed; 0: they have their real times."""

    family: ClassVar[str]

    context: int = 0
    medium_rows: int = 0
    feature_cache_bytes: int = 0
    decoders: int = 0
    film_fps: float = 0.0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Self:
        """The options, from the settings of a server. Raises LoadError."""
        of = f"the thinker of {cls.family}"
        return not_negative(cls(**validate_options(options, cls(), of)), of)


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """Options of a Talker; 0 leaves a choice to the model. family: name of the family, for humans. context: largest number of rows of a
    conversation and frames of its speech together."""

    family: ClassVar[str]

    context: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Self:
        """The options, from the settings of a server. Raises LoadError."""
        of = f"the talker of {cls.family}"
        return not_negative(cls(**validate_options(options, cls(), of)), of)


@dataclass(frozen=True, slots=True)
class Code2WavOptions:
    """Options of a Code2Wav; 0 leaves a choice to the model. family: name of the family, for humans. max_values: name of an option -> its
    largest value. workers: number of threads that compute at the same time, each with `threads` torch threads; 0: as many as the cores
    allow, up to a few."""

    family: ClassVar[str]
    max_values: ClassVar[Mapping[str, int]] = {"workers": 64}

    workers: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Self:
        """The options, from the settings of a server. Raises LoadError."""
        of = f"the code2wav of {cls.family}"
        result = not_negative(cls(**validate_options(options, cls(), of)), of)
        for name, max_value in cls.max_values.items():
            if getattr(result, name) > max_value:
                raise LoadError(f"option {name} of {of} is {getattr(result, name)}; {max_value} is the most")
        return result
