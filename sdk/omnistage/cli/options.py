"""The parts that commands share before their work begins: their common options, their help, and the media typed with a question.

Every command imports this module at its start, so it imports no more than Typer."""

from __future__ import annotations

import inspect
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args

import typer
from typer._click.formatting import HelpFormatter
from typer.core import TyperArgument, TyperCommand, TyperGroup

from omnistage.cli.make.typed_fields import FIELDS

if TYPE_CHECKING:
    from omnistage.client.media import Medium


DEFAULT_TIMEOUT_S = 120.0
"""Time limit of a call. It is the Python client's, whose import would take a while."""


def _check_colour(colour: str | None) -> str | None:
    """Callback of --background. Raises BadParameter for a text that is no #rrggbb."""
    if colour is not None and re.fullmatch(r"#[0-9a-fA-F]{6}", colour) is None:
        raise typer.BadParameter(f"is {colour!r}; it must be a colour as #rrggbb, such as #ffffff for white")
    return colour


Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="A router, or several with commas between; default: OMNISTAGE_ROUTER, or that of this machine, or one is started.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="Who asks, for a router that serves many; default: OMNISTAGE_API_KEY, which keeps it out of the list of processes.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line, nothing else.")]
Background = Annotated[
    str | None,
    typer.Option(
        metavar="#RRGGBB",
        callback=_check_colour,
        help="Colour under what is transparent in what is shown; default: white, and none for layers.",
    ),
]
PipelineName = Annotated[
    str,
    typer.Option(
        *("--pipeline", "--model"),
        metavar="NAME",
        help="See `omnistage pipelines`; without --address also a checkpoint, DIR or OWNER/NAME. Default: the router's own.",
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Time limit of the call.")]
MaxRetries = Annotated[
    int | None,
    typer.Option(
        "--max-retries", min=0, metavar="N", help="How often to ask again where the server says when to, within --timeout; default: 2."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the servers' output and tracebacks.")]


MAX_SEED: int = get_args(FIELDS["seed"])[1].max

CALL: Mapping[str, Any] = {
    "address": Address,
    "api_key": ApiKey,
    "pipeline": PipelineName,
    "json": Json,
    "timeout_s": Timeout,
    "max_retries": MaxRetries,
    "verbose": Verbose,
}
"""The options of each call, by the name of the parameter."""

F = TypeVar("F", bound=Callable[..., None])


def with_fields(*names: str) -> Callable[[F], F]:
    """A decorator that gives a command an option for each of these fields of the contract; see `with_options`."""
    return with_options({name: FIELDS[name] for name in names}, "address")


def with_call(timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[[F], F]:
    """A decorator that gives a command the options of each call, as the last ones of its help; see `with_options`."""
    defaults = {"pipeline": "", "json": False, "timeout_s": timeout_s, "verbose": False}
    return with_options(CALL, defaults=defaults)


def with_options(
    annotations: Mapping[str, Any], before: str = "", defaults: Mapping[str, object] = MappingProxyType({})
) -> Callable[[F], F]:
    """A decorator that gives a command further options. The command gets their values as the keywords of its parameter with two stars.
    annotations: of Typer, by name. before: the parameter before which they are in the help; empty: they are the last. defaults: by name;
    None for an option that is not there."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    options = [inspect.Parameter(name, kind, default=defaults.get(name), annotation=each) for name, each in annotations.items()]

    def extended(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        place = next((number for number, each in enumerate(parameters) if each.name == before), len(parameters))
        command.__signature__ = signature.replace(parameters=[*parameters[:place], *options, *parameters[place:]])  # type: ignore[attr-defined]
        return command

    return extended


WIDEST, NARROWEST = 78, 20
"""Most and fewest columns of a help text."""

MAX_SHOWN = 64
"""The most characters that are shown of a wrong value."""

WIDE_COLUMNS = 50
"""In a terminal with this many columns the descriptions of options have room to the right of their names."""


class _Formatter(HelpFormatter):
    """Formats help to the width of the terminal. On a narrow terminal it also breaks the lines that Click does not break, between words."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(indent_increment, width or max(min(columns - 2, WIDEST), NARROWEST), max_width)

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= WIDE_COLUMNS else self.width // 6, col_spacing)

    def getvalue(self) -> str:
        return fit_lines(super().getvalue(), self.width) if self.width < WIDEST else super().getvalue()


class _Context(typer.Context):
    formatter_class = _Formatter


def fit_lines(text: str, columns: int) -> str:
    """Break the long lines of a text between words; the further parts of a line are indented more than its first part."""

    def parts(line: str) -> list[str]:
        indent = " " * (len(line) - len(line.lstrip()))
        if len(line) <= columns:
            return [line]
        return wrap(line, columns, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)

    return "".join(f"{part}\n" for line in text.splitlines() for part in parts(line))


class CommandGroup(TyperGroup):
    """The group of all commands."""

    context_class = _Context


@contextmanager
def _in_our_words() -> Iterator[None]:
    """A context that raises pydantic's errors, with which Typer refuses values, in the words of all other errors."""
    try:
        yield
    except typer.BadParameter as error:
        if faults := getattr(error.__cause__, "errors", None):
            from omnistage.host.errors import fault_found  # Not for a help text.

            first = faults()[0]
            error.message = fault_found(first, ascii(str(first["input"])[:MAX_SHOWN]))
        raise


class Command(TyperCommand):
    """A command whose help shows an argument by its name alone, without a Python type such as <str>, and whose errors are in our words."""

    context_class = _Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _in_our_words():
            rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if isinstance(value := ctx.params.get(parameter.name), float) and not math.isfinite(value):
                raise typer.BadParameter(f"is '{value}'; it must be a number", ctx, cast(Any, parameter))
        return rest

    def invoke(self, ctx: Any) -> Any:
        with _in_our_words():
            return super().invoke(ctx)

    def get_short_help_str(self, limit: int = 0) -> str:
        """The whole first sentence for the list of commands, which breaks it between words; Typer would cut it at `limit` characters."""
        return super().get_short_help_str(len(self.help or ""))

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for argument in params:
            if isinstance(argument, TyperArgument):
                argument.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # Typer has no other place for it.
        return params


def examples(*lines: str) -> str:
    """The end of a help text. lines: examples of command lines."""
    # The first character tells Click not to join the lines into one paragraph.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def show_version(is_wanted: bool) -> None:
    """Callback of an option --version."""
    if is_wanted:
        from importlib.metadata import version

        print(f"omnistage {version('omnistage')}")
        raise typer.Exit


ATTACHED_KINDS = ("image", "audio", "video")

ATTACHED = f"{__name__}.attached"


@dataclass(frozen=True, slots=True)
class Attached:
    """A picture, sound or film that is sent with a question. kind: image, audio or video, from the name of the option. path: of the file; -
    is standard input. use_audio: the model also hears the sound of a film."""

    kind: str
    path: str
    use_audio: bool = False

    def read(self) -> Medium:
        """Read the medium. Raises BadRequestError that names the option and the file, and RequestError if standard input has none."""
        from omnistage.cli.make.orders import STDIN, medium
        from omnistage.client.media import Video, to_medium

        source = medium(self.kind) if self.path == STDIN else self.path
        return to_medium(Video(source, self.use_audio) if self.kind == "video" else source, self.kind, f"--{self.kind}")


class Attaching(Command):
    """A command whose options --image, --audio and --video may be mixed. `Context.meta[ATTACHED]` gets the list of (kind, value), in the
    order in which they were typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        option_values, _, order = self.make_parser(ctx).parse_args(list(args))
        kinds = {f"--{kind}": kind for kind in ATTACHED_KINDS}
        media = [(kinds[option.opts[0]], option.name) for option in order if option.opts[0] in kinds]
        # Each option has the list of its values; the order says which option the next value is of.
        values = {name: iter(option_values[name]) for _, name in media}
        ctx.meta[ATTACHED] = [(kind, next(values[name])) for kind, name in media]
        return super().parse_args(ctx, args)
