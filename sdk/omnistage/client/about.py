"""Descriptions of keywords, from which `help`, docs/client.md and the checks of values are made."""

# No postponed annotations here, because the docstrings of methods are made from the descriptions in these annotations.
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from os import PathLike
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin

from omnistage.v1 import options_pb2, stage_pb2

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
    numbers or the words that its value may be; None: any value.

    The others are of an option that is a field of the contract. place: path of its message in a request, such as thinker.sampling. name:
    its name there. typed: as it is typed in a shell. http: its names in bodies of the gateway that differ, by endpoint. other_names: names
    in other libraries. makes: see options.proto. never_zero: 0 means in the contract that it is absent. max_characters: of a
    text; 0: only the request bounds it."""

    meaning: str
    default: str
    allowed: Range | Sequence[str] | None = None
    place: str = ""
    name: str = ""
    typed: str = ""
    http: Mapping[str, str] = field(default_factory=dict)
    other_names: Sequence[str] = ()
    makes: Sequence[str] = ()
    never_zero: bool = False
    max_characters: int = 0

    @property
    def allowed_text(self) -> str:
        """The allowed values in words; empty if any value of the type is allowed."""
        if self.allowed is None or isinstance(self.allowed, Range):
            return str(self.allowed or "")
        return ", ".join(self.allowed)


def max_count(path: str) -> int:
    """The most elements of a repeated field in one request. path: MESSAGE.FIELD of stage.proto, such as ThinkerParams.stop."""
    message, field_name = path.split(".")
    options = stage_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name[field_name].GetOptions()
    return options.Extensions[options_pb2.about].max_count


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
    """The keywords of annotations that are all `Annotated[..., About(...)]`, such as those of a in the same order."""
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
