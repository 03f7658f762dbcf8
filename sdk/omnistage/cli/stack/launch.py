"""`omnistage serve` and `omnistage stop`: their options. The work is in `stack.serve`, imported when it runs.

The settings of `serve` can also stand in a YAML file (--config), by the names of the options. A variable wins over the file, and the
command line over both."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from omnistage.cli.options import Command, Verbose, with_options
from omnistage.cli.report import errors_reported
from omnistage.cli.stack.layout import DEFAULT_ADDRESS, DEFAULT_HTTP
from omnistage.cli.stack.typed_settings import SERVER_SETTINGS, STAGE_SETTINGS
from omnistage.host.places import HOST_SHARE

VARIABLE_PREFIX = "OMNISTAGE_SERVE"
"""Prefix of the variables: OMNISTAGE_SERVE_ADDRESS is --address."""


class Configured(Command):
    """A command whose options may also stand in a file and in environment variables; its help says this once for all options. An error
    about a value that was not typed names the source of the value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            from omnistage.cli.places import origin  # Not for a help text.

            name = getattr(error.param, "name", None) or ""
            if source := origin(ctx, name, ""):
                error.message = f"{error.message} (from {source})"
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


OF_THE_CALL = frozenset({"config_file", "print_config", "detach", "verbose", "help"})
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
    "idle_unload": "never",
    "log_dir": "none; onto the terminal, and with --detach a folder for each start",
}
UNSET_DEFAULT = "the servers' own"
"""`UNSET` has texts for settings without a value, by setting; `UNSET_DEFAULT` is the text for all others."""

ALL = "all"
"""Written in place of a stage; it means all stages that the same setting does not name."""


def read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of --config, which is read first: the values of the file become the defaults of the command. Raises BadParameter for a file
    that cannot be read, and for values that a file cannot have."""
    if path is not None:
        context.default_map = dict(_settings(path, {**_options(context)}))
    return path


def check_variables(context: typer.Context) -> None:
    """Raises BadParameter for a variable with the prefix of `serve` that names no option."""
    variable_names = {f"{VARIABLE_PREFIX}_{name.upper()}" for name in (*_options(context), "config")}
    for variable in os.environ:
        if variable.startswith(f"{VARIABLE_PREFIX}_") and variable not in variable_names:
            suggestion = _nearest(variable, variable_names)
            raise typer.BadParameter(f"{variable}: there is no such setting{f'; did you mean {suggestion}?' if suggestion else ''}")


def settings_text(context: typer.Context) -> str:
    """The text of --print-config: all settings in force, in the form of the file, each with its source."""
    import yaml

    from omnistage.cli.places import origin

    lines = ["# omnistage serve --config FILE: a variable counts more than the file, and the command line more than both"]
    for name, option in _options(context).items():
        in_force, is_list = context.params[name], option.nargs < 0 or name in LISTS
        value = _list_or_one(in_force) if is_list else _file_value(in_force, is_many=option.multiple)
        is_unset = value is None or value == ""
        # YAML ends a text that is a single value with a line of three dots.
        source = f"default: {UNSET.get(name, UNSET_DEFAULT)}" if is_unset else origin(context, name, "command line") or "default"
        text = "null" if is_unset else yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").rstrip()
        lines.append(f"{name}: {text}  # {source}")
    return "\n".join(lines)


def counts_more(context: typer.Context, setting: str, other: str) -> bool:
    """Whether the source of one setting wins over that of another (see PRECEDENCE). setting, other: names of the two settings."""
    sources = (context.get_parameter_source(name) for name in (setting, other))
    rank, other_rank = (PRECEDENCE.index(source.name) if source is not None else 0 for source in sources)
    return rank > other_rank


def by_pipeline(words: Sequence[str]) -> dict[str, str]:
    """Read [PIPELINE=]DIR words into a mapping from PIPELINE to DIR; a bare DIR has the key "". An existing folder is a bare DIR even if
    its name has a "=". Raises ValueError."""
    checkpoints = dict[str, str]()
    for word in words:
        has_pipeline = not Path(word).is_dir() and re.match(r"[\w.-]+=", word) is not None
        pipeline, _, checkpoint = word.partition("=") if has_pipeline else ("", "", word)
        if not checkpoint:
            raise ValueError(f"--checkpoint {word}: expected [PIPELINE=]DIR")
        if pipeline in checkpoints:
            raise ValueError(
                f"--checkpoint {word}: {pipeline or 'the pipeline'} has {checkpoints[pipeline]} already; give PIPELINE=DIR each"
            )
        checkpoints[pipeline] = checkpoint
    return checkpoints


def _options(context: typer.Context) -> Mapping[str, Any]:
    """By name, Click's objects of the options that a file may set; pipeline, checkpoint and address come first. An option with `multiple`
    has a value for each stage; one with `nargs` below 0 is a list."""
    options = {option.name: option for option in context.command.params if option.name and option.name not in OF_THE_CALL}
    firsts = [name for name in options if name in ("pipeline", "checkpoint", "address")]
    return {name: options[name] for name in (*firsts, *options)}


def _nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` with the most similar spelling; empty if none is similar."""
    from omnistage.client.wording import find_similar  # Imported here, because a help text does without the client, which takes a while.

    return find_similar(name, names)


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
        if options[option].nargs < 0 and isinstance(value, dict):
            yield option, [f"{name}={_word(path, option, one)}" for name, one in value.items()]
        elif options[option].nargs < 0:
            yield option, [_word(path, option, one) for one in (value if isinstance(value, list) else [value])]
        elif options[option].multiple:
            yield option, _words(path, option, value)
        else:
            yield option, _word(path, option, value)


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


def _option(metavar: str, text: str, **rules: Any) -> Any:
    """An option of `serve`. metavar: stands for its value in the help. text: the help. rules: as of typer.Option."""
    return typer.Option(metavar=metavar, help=text, **rules)


Words = list[str] | None
"""The values of an option that may be given several times."""


@with_options(STAGE_SETTINGS, "max_sessions")
@with_options(SERVER_SETTINGS, "grace")
def serve(
    context: typer.Context,
    pipeline: Annotated[
        Words,
        typer.Argument(
            metavar="[NAME=]PIPELINE",
            envvar="OMNISTAGE_SERVE_PIPELINE",
            show_envvar=False,
            help="Names or YAML files of pipelines, or checkpoints, DIR or OWNER/NAME, each under the NAME before it; default: what "
            "answers, and what draws.",
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="OMNISTAGE_SERVE_CONFIG",
            metavar="F.yaml",
            is_eager=True,
            callback=read_settings,
            help="Settings from a YAML file, by the names of these options; variables, OMNISTAGE_SERVE_ADDRESS for --address, count more.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings, set or not, as such a file, and where each is from.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Leave the stack running when it serves; `omnistage stop` ends it.")] = False,
    checkpoint: Annotated[
        Words,
        _option("[PIPELINE=]DIR", "Folder of the model, or its name at a hub: OWNER/NAME[@REVISION]; default: the pipeline's own."),
    ] = None,
    lora: Annotated[
        Words, _option("[PIPELINE=]FILE[@PART][=SCALE]", "A LoRA of a pipeline that draws, of safetensors. Repeatable.")
    ] = None,
    device: Annotated[
        Words,
        _option(
            "[STAGE=]DEV",
            "cpu, cuda:0 ...; a bare value is for all stages that have a use for it. A STAGE may be PIPELINE/STAGE, here and below.",
        ),
    ] = None,
    dtype: Annotated[str, _option("DTYPE", "auto, float32 or bfloat16.")] = "auto",
    replicas: Annotated[Words, _option("STAGE=N", "Processes of a stage.")] = None,
    address: Annotated[str, _option("HOST:PORT", "Where to listen; port 0 takes a free one.")] = DEFAULT_ADDRESS,
    http: Annotated[
        str,
        _option(
            "HOST:PORT",
            "Where to take HTTP, as OpenAI's clients speak it, with a page; if the default port is taken, at the next free one.",
        ),
    ] = DEFAULT_HTTP,
    no_http: Annotated[bool, typer.Option("--no-http", help="Take no HTTP.")] = False,
    metrics_address: Annotated[str, _option("HOST:PORT", "Prometheus metrics of the router alone.")] = "127.0.0.1:0",
    metrics: Annotated[
        str, _option("HOST:PORT", "Prometheus metrics of all processes on one page, such as 127.0.0.1:9464; default: none.")
    ] = "",
    otlp: Annotated[str, _option("URL", "OpenTelemetry collector for the spans of all processes, such as http://127.0.0.1:4317.")] = "",
    max_sessions: Annotated[int, _option("N", "Answers at once; 0: the servers' own limits.", min=0, max=4096)] = 0,
    grace: Annotated[float, _option("SECONDS", "Time for running answers to finish at the end.", min=0.0)] = 5.0,
    idle_limit: Annotated[float, _option("SECONDS", "End by itself when nobody has asked anything for so long; 0: never.", min=0.0)] = 0.0,
    idle_unload: Annotated[
        Words,
        _option(
            "[PIPELINE=]SECONDS", "Unload a pipeline that nobody has asked for so long; the next request loads it. Repeatable; 0: never."
        ),
    ] = None,
    log_dir: Annotated[Path | None, _option("DIR", "Keep the servers' logs here.")] = None,
    verbose: Verbose = False,
    **settings: object,
) -> None:
    """Start a stack that stays: a router, and all stages of its pipelines.

    On this machine, until Ctrl-C; with --detach until `omnistage stop`.
    """
    check_variables(context)
    from omnistage.cli.places import origin
    from omnistage.cli.stack import serve as serving
    from omnistage.cli.stack.layout import ServerOptions, by_stage, counts, flag, seconds_by_pipeline
    from omnistage.cli.stack.pipelines import Choice

    # An address for HTTP wins over `no_http` if its source counts more: the command line, for example, over the file.
    if no_http and counts_more(context, "http", "no_http"):
        no_http = context.params["no_http"] = False
    try:
        checkpoints = by_pipeline(checkpoint or ())
        devices = by_stage(device or (), "--device")
        processes = counts(replicas or (), "--replicas")
        idle_unload_s = seconds_by_pipeline(idle_unload or (), "--idle-unload")
        of_stages = {name: by_stage(words, flag(name)) for name in STAGE_SETTINGS if (words := context.params[name])}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    shared = {name: value for name in SERVER_SETTINGS if (value := context.params[name]) is not None}
    apart = ("settings", "idle_unload_s", "http_may_move")
    own = {each.name: context.params[each.name.removesuffix("_s")] for each in fields(ServerOptions) if each.name not in apart}
    may_move = not origin(context, "http", "command line")  # Whoever names a port has told it to others.
    own |= {"http": "" if no_http else http, "http_may_move": may_move, "idle_unload_s": idle_unload_s}
    servers = ServerOptions(**own, settings=shared)
    if print_config:
        print(settings_text(context))
        raise typer.Exit
    choice = Choice(pipeline or (), checkpoints, devices, processes, dtype, of_stages, servers, loras=lora or ())
    with errors_reported(verbose):
        if detach:
            serving.serve_detached(choice, log_dir, verbose)
        else:
            serving.serve(choice, log_dir, verbose)


def launch(descriptor: Annotated[int, typer.Argument()]) -> None:
    """Start the stack that a program orders in JSON over this descriptor."""
    with errors_reported():
        from omnistage.cli.stack.serve import serve_for_owner

        serve_for_owner(descriptor)


def stop(
    address: Annotated[
        str | None, typer.Argument(metavar="HOST:PORT", help="Of the router, or its port; default: the only stack that there is.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All stacks of this user.")] = False,
    is_now: Annotated[bool, typer.Option("--now", help="Do not wait for answers that run.")] = False,
    verbose: Verbose = False,
) -> None:
    """End a stack that `omnistage serve` started.

    On this machine, by the same user; with --detach or in another terminal.
    """
    if every and address is not None:
        raise typer.BadParameter("--all is every stack; leave the address out")
    with errors_reported(verbose):
        from omnistage.cli.stack.serve import stop as stop_stacks

        stop_stacks(address, every=every, is_now=is_now)
