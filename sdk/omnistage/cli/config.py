"""The file of `omnistage serve --config`: YAML with settings by the names of the options. A variable wins over the file, and the command
line over both."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperOption

from omnistage.cli.helping import Command
from omnistage.host.places import HOST_SHARE

PREFIX = "OMNISTAGE_SERVE"
"""Prefix of the variables: OMNISTAGE_SERVE_ADDRESS is --address."""


class Configured(Command):
    """A command whose options may also stand in a file and in environment variables; its help says this once for all options. An error
    about a value that was not typed names the source of the value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = getattr(error.param, "name", None) or ""
            if origin := _origin(ctx, name, ""):
                error.message = f"{error.message} (from {origin})"
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for option in params:
            if isinstance(option, TyperOption):
                option.show_envvar = False
                option.allow_from_autoenv = option.name not in OF_THE_CALL
            if option.name in PATHS:
                option.split_envvar_value = _split  # Click itself would split paths at spaces.
        return params


OF_THE_CALL = frozenset({"config_file", "print_config", "detach", "verbose", "help", "ready_fd", "lifeline_fd"})
"""Options that describe this call alone and not the stack, so a file cannot have them."""

PATHS = frozenset({"pipeline", "checkpoint", "lora"})
"""Settings whose variable holds several words, which may be paths."""

LISTS = frozenset({"lora"})
"""Repeatable settings that are no values by stage."""

PRECEDENCE = ("DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")
"""Sources of a setting, by Click's names; a later one wins over an earlier one."""

UNSET = {
    "pipeline": "what answers, and what draws",
    "checkpoint": "the pipeline's own",
    "lora": "none",
    "device": "cpu",
    "replicas": "one of each stage",
    "metrics": "none",
    "otlp": "none, unless a variable of OpenTelemetry says so",
    "memory_share": "equal for all that are on a device",
    "client_share": f"{HOST_SHARE:g}",
    "log_dir": "none; onto the terminal, and with --detach a folder for each start",
}
OWN = "the servers' own"
"""`UNSET` has texts for settings without a value, by setting; `OWN` is the text for all others."""

ALL = "all"
"""Written in place of a stage; it means all stages that the same setting does not name."""


def read(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of --config, which is read first: the values of the file become the defaults of the command. Raises BadParameter for a file
    that cannot be read, and for values that a file cannot have."""
    if path is not None:
        context.default_map = dict(_settings(path, {**_options(context)}))
    return path


def check_variables(context: typer.Context) -> None:
    """Raises BadParameter for a variable with the prefix of `serve` that names no option."""
    variable_names = {f"{PREFIX}_{name.upper()}" for name in (*_options(context), "config")}
    for variable in os.environ:
        if variable.startswith(f"{PREFIX}_") and variable not in variable_names:
            suggestion = _nearest(variable, variable_names)
            raise typer.BadParameter(f"{variable}: there is no such setting{f'; did you mean {suggestion}?' if suggestion else ''}")


def settings_text(context: typer.Context) -> str:
    """The text of --print-config: all settings in force, in the form of the file, each with its source."""
    import yaml

    lines = ["# omnistage serve --config FILE: a variable counts more than the file, and the command line more than both"]
    for name, option in _options(context).items():
        value = (
            _list_or_one(context.params[name])
            if option.nargs < 0 or name in LISTS
            else _file_value(context.params[name], is_many=option.multiple)
        )
        is_unset = value is None or value == ""
        origin = f"default: {UNSET.get(name, OWN)}" if is_unset else _origin(context, name, "command line") or "default"
        text = "null" if is_unset else yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").rstrip()
        lines.append(f"{name}: {text}  # {origin}")
    return "\n".join(lines)


def counts_more(context: typer.Context, setting: str, other: str) -> bool:
    """Whether the source of one setting wins over that of another (see PRECEDENCE). setting, other: names of the two settings."""
    sources = (context.get_parameter_source(name) for name in (setting, other))
    one, another = (PRECEDENCE.index(source.name) if source is not None else 0 for source in sources)
    return one > another


def _origin(context: typer.Context, name: str, text: str) -> str:
    """The source of a setting in words: the file, or a variable; for the command line `text`, for the default an empty text."""
    source = context.get_parameter_source(name)
    origins = {"DEFAULT": "", "DEFAULT_MAP": "the file", "ENVIRONMENT": f"{PREFIX}_{name.upper()}"}
    return origins.get(source.name, text) if source is not None else ""


def by_pipeline(words: Sequence[str]) -> dict[str, str]:
    """Read [PIPELINE=]DIR words into a mapping from PIPELINE to DIR; a bare DIR has the key "". An existing folder is a bare DIR even if
    its name has a "=". Raises ValueError."""
    checkpoints = dict[str, str]()
    for word in words:
        pipeline, _, checkpoint = word.partition("=") if not Path(word).is_dir() and re.match(r"[\w.-]+=", word) else ("", "", word)
        if not checkpoint:
            raise ValueError(f"--checkpoint {word}: expected [PIPELINE=]DIR")
        if pipeline in checkpoints:
            raise ValueError(
                f"--checkpoint {word}: {pipeline or 'the pipeline'} has {checkpoints[pipeline]} already; give PIPELINE=DIR each"
            )
        checkpoints[pipeline] = checkpoint
    return checkpoints


def _options(context: typer.Context) -> Mapping[str, Any]:
    """By name, Click's objects of the options that a file may set. An option with `multiple` has a value for each stage; one with `nargs`
    below 0 is a list."""

    def named() -> Iterator[tuple[str, Any]]:
        for parameter in context.command.params:
            if parameter.name and parameter.name not in OF_THE_CALL:
                yield parameter.name, parameter

    return dict(sorted(named(), key=lambda item: item[0] not in ("pipeline", "checkpoint", "address")))


def _nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` with the most similar spelling; empty if none is similar."""
    from omnistage.client.wording import near  # Imported here, because a help text does without the client, whose import takes a while.

    return near(name, names)


def _settings(path: Path, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (name of an option, its value as Click takes it for a default) for each setting of a file. Raises BadParameter."""
    for name, value in _mapping(path).items():
        option = str(name).replace("-", "_")
        if option not in options:
            suggestion = _nearest(option, options)
            hint = f"did you mean {suggestion}?" if suggestion else f"there are: {', '.join(options)}"
            raise typer.BadParameter(f"{path}: there is no setting {name!r}; {hint}")
        if value is None:
            continue
        if options[option].nargs < 0:
            yield option, [_word(path, option, one) for one in (value if isinstance(value, list) else [value])]
        else:
            yield option, _words(path, option, value) if options[option].multiple else _word(path, option, value)


def _split(value: str) -> list[str]:
    """The words of a variable, split as a shell splits words; but an existing path is one word, and so is PIPELINE=PATH."""
    if Path(value).exists() or Path(value.partition("=")[2] or value).exists():
        return [value]
    try:
        return shlex.split(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value}: {error}") from None


def _mapping(path: Path) -> dict[Any, Any]:
    """The contents of a YAML file with settings; empty for an empty file. Raises BadParameter."""
    from omnistage.router.yaml_text import BadYaml, read_yaml

    try:
        contents = read_yaml(path)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except BadYaml as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    if contents is None:
        return {}
    if not isinstance(contents, dict):
        raise typer.BadParameter(f"{path}: give settings, one a line, such as address: 127.0.0.1:50050")
    return contents


def _words(path: Path, name: str, value: Any) -> list[str]:
    """The value of a setting as [STAGE=]VALUE words. value: one for all stages, or a list of words, or a mapping from stages to values, in
    which `all` stands for the stages that it does not name."""
    if isinstance(value, dict):
        pairs = {str(stage): _word(path, name, one) for stage, one in value.items()}
        return [one if stage == ALL else f"{stage}={one}" for stage, one in pairs.items()]
    if isinstance(value, list):
        return [_word(path, name, one) for one in value]
    return [_word(path, name, value)]


def _word(path: Path, name: str, value: Any) -> str:
    """One value of a setting as a text. Raises BadParameter if it is missing or nested."""
    if value is None:
        raise typer.BadParameter(f"{path}: {name} has an empty value among others; leave it out")
    if isinstance(value, dict | list):
        raise typer.BadParameter(f"{path}: {name} takes one value, not {value!r}")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pair(word: str) -> tuple[str, str]:
    """Returns (stage, value) of a [STAGE=]VALUE word; the stage "" stands for all stages."""
    stage, equals, value = word.partition("=")
    return (stage, value) if equals else ("", word)


def _file_value(value: Any, *, is_many: bool) -> Any:
    """The value of an option as the file writes it. is_many: `value` is a list of [STAGE=]VALUE words, which become one value or a
    mapping."""
    if not is_many:
        return str(value) if isinstance(value, Path) else value
    pairs = {stage or ALL: _yaml_value(one) for stage, one in map(_pair, value or ())}
    return pairs[ALL] if set(pairs) == {ALL} else pairs or None


def _list_or_one(value: Any) -> Any:
    """Values in the form of the file: a list, or a single value without a list."""
    return value[0] if value and len(value) == 1 else list(value or ()) or None


def _yaml_value(word: str) -> Any:
    """The value that YAML reads from a text: it may be a number or a truth value."""
    return int(word) if word.isdecimal() else {"true": True, "false": False}.get(word, word)
