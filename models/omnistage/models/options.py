"""Options for loading a model, and those that Thinkers with encoders, their Talkers and Code2Wavs have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omnistage.models.reports import LoadError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Made = TypeVar("Made", bound="DataclassInstance")


USUAL_SESSIONS = 64


def with_resumed(sessions: int) -> int:
    """Number of sessions that a replica with a limit of `sessions` may have when it takes over sessions of a lost replica. They may exceed
    the limit, because they must not be refused while there is memory for them."""
    return 2 * sessions


@dataclass(frozen=True, slots=True)
class SettingAbout:
    """The description of a setting that not every model uses. text: for people. metavar: stands for its value in --help. least, most: its
    bounds; above_least: `least` itself is excluded. default_text: the value if it is not set, in words."""

    text: str
    metavar: str = "N"
    least: float = 0
    most: float | None = None
    above_least: bool = False
    default_text: str = "the model's"


def _setting(default: object, text: str, metavar: str = "N", **rules: Any) -> Any:
    """A field of LoadOptions that not every model uses; see SettingAbout."""
    return field(default=default, metadata={"about": SettingAbout(text, metavar, **rules)})


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options with which a model is loaded. A default leaves a setting to the model. path: folder of a checkpoint; None: the family's
    own checkpoint. max_sessions: largest number of answers at once. family: options that only models of one family have.

    The settings of servers and of whole stacks are made of these fields; `python -m tools.options` writes the files for clients and
    commands."""

    path: Path | None = None
    device: str = "cpu"
    dtype: str = "auto"
    max_sessions: int = 0
    threads: int = _setting(1, "Compute threads of a process.", least=1, most=64, default_text="1")
    max_batch_size: int = _setting(
        0, "Sequences in one step; other answers wait for a place in it.", least=1, most=4096, default_text="max_sessions"
    )
    max_batch_tokens: int = _setting(
        0,
        "Rows in one step. With fewer rows, a prompt that is read holds other answers up less; with more, it is read in fewer steps.",
        least=1,
        most=1 << 20,
    )
    kv_cache_bytes: int = _setting(0, "Memory for keys and values, at least one whole context.", "BYTES", least=1)
    enable_cache: bool | None = _setting(
        None, "Keep computed results for later prompts with the same beginning.", "BOOL", default_text="True"
    )
    max_pixels: int = _setting(
        0,
        "Pixels of the largest picture that may be drawn, or of the largest frame of a film.",
        least=1,
        most=1 << 28,
        default_text="four times those of the model's own size",
    )
    tensor_parallel_size: int = _setting(
        1,
        "Number of ranks over which a model is spread: processes of this machine, each with a GPU.",
        least=1,
        most=64,
        default_text="1",
    )
    gpu_memory_utilization: float = _setting(
        0.0, "Part of a GPU's memory that may be filled; has no effect on a CPU.", "PART", most=1, above_least=True
    )
    memory_share: float = _setting(
        1.0,
        "Part of a device's memory that a process may count on, if several processes that take all free memory share the device.",
        "PART",
        most=1,
        above_least=True,
        default_text="equal parts",
    )
    family: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Any) -> LoadOptions:
        """The options in the settings of a server, see omnistage.stage.settings."""
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

SETTING_ABOUT: Mapping[str, SettingAbout] = {each.name: each.metadata["about"] for each in fields(LoadOptions) if "about" in each.metadata}
OPTIONAL = tuple(SETTING_ABOUT)
"""Settings that not every model uses."""

DEFAULTS: Mapping[str, object] = {each.name: each.default for each in fields(LoadOptions)}


@dataclass(frozen=True, slots=True)
class ThinkerOptions:
    """Options of a Thinker; 0 leaves a choice to the model.

    context: tokens that a conversation and its answer may have together. medium_rows: tokens that a picture or film may have; larger media
    are made smaller. feature_cache_bytes: largest number of bytes of kept features of media. decoders: number of processes that decode
    media. film_fps: frames a second as which the frames of each film count, at any speed; 0: they have their real times."""

    context: int = 0
    medium_rows: int = 0
    feature_cache_bytes: int = 0
    decoders: int = 0
    film_fps: float = 0.0


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """Options of a Talker; 0 leaves a choice to the model. context: largest number of rows of a conversation and frames of its speech
    together."""

    context: int = 0


@dataclass(frozen=True, slots=True)
class Code2WavOptions:
    """Options of a Code2Wav; 0 leaves a choice to the model. workers: number of threads that compute at the same time, each with `threads`
    torch threads; 0: as many as the cores allow, up to a few."""

    workers: int = 0


MAX_WORKERS = {"workers": 64}
"""The largest values of Code2WavOptions."""


@dataclass(frozen=True, slots=True)
class OptionsOf(Generic[Made]):
    """The options of one model. options: their class. of: the model's name in errors. max_values: name of an option -> its largest
    value."""

    options: type[Made]
    of: str
    max_values: Mapping[str, int] = field(default_factory=dict)

    def from_settings(self, values: Mapping[str, Any]) -> Made:
        """The options, from the settings of a server. Raises LoadError for an unknown option, one of another type, below 0, or above its
        largest value."""
        result = self.options(**validate_options(values, self.options(), self.of))
        for each in fields(result):
            value, max_value = getattr(result, each.name), self.max_values.get(each.name)
            if not isinstance(value, str) and value < 0:
                raise LoadError(f"option {each.name} of {self.of} is {value}; 0 leaves it to the model")
            if max_value is not None and value > max_value:
                raise LoadError(f"option {each.name} of {self.of} is {value}; {max_value} is the most")
        return result
