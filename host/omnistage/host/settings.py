"""The settings that every server process has, and how they are read from its command line and its environment.

Each is a command-line flag (`--max-message-bytes`) and an environment variable (`OMNISTAGE_MAX_MESSAGE_BYTES`); a mistake is reported in
one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from omnistage.host.addresses import check_address, host_and_port, is_loopback
from omnistage.host.errors import StartError, fault_found
from omnistage.wire.channel import MAX_MESSAGE_BYTES
from omnistage.wire.limits import HOP_ROOM_BYTES

Address = Annotated[str, AfterValidator(check_address), Field(json_schema_extra={"metavar": "HOST:PORT"})]
"""HOST:PORT; port 0 takes a free one."""


def _check_loopback(address: str) -> str:
    """Return `address` if it is empty, or HOST:PORT that only this host can reach. Raises ValueError."""
    if address and not is_loopback(host_and_port(check_address(address))[0]):
        raise ValueError(f"{address!r} can be reached from other hosts, and channelz names every connection; use 127.0.0.1:PORT")
    return address


def _check_collector(url: str) -> str:
    """Return `url` if it is empty, or http:// or https:// and HOST:PORT without a path. Raises ValueError."""
    scheme, _, address = url.removesuffix("/").partition("://")
    if url and (scheme not in ("http", "https") or not address):
        raise ValueError(f"{url[:80]!r} is no collector: give http://HOST:PORT such as http://127.0.0.1:4317, or https:// for TLS")
    if "/" in address:
        raise ValueError(f"{url[:80]!r} has a path: spans go by OTLP over gRPC, to a port such as 4317; give {scheme}://HOST:PORT alone")
    if url and host_and_port(check_address(address))[1] == 0:
        raise ValueError(f"{url[:80]!r} has no port that a collector can have; its usual one is 4317")
    return url


def setting(default: object, metavar: str, description: str, *, is_of_stack: bool = False, **rules: Any) -> Any:
    """A field of settings. metavar: stands for its value in --help. is_of_stack: `omnistage serve` has an option for it, made by
    `python -m tools.options`. rules: as of pydantic's Field."""
    return Field(default, description=description, json_schema_extra={"metavar": metavar, "is_of_stack": is_of_stack}, **rules)


class ServerSettings(BaseSettings):
    """Settings of a server process; stages and the router add their own."""

    model_config = SettingsConfigDict(
        env_prefix="OMNISTAGE_", cli_kebab_case=True, cli_hide_none_type=True, extra="forbid", allow_inf_nan=False
    )

    address: Address = Field("127.0.0.1:0", description="where to listen; port 0 takes a free one")
    metrics_address: Address = Field("127.0.0.1:0", description="Prometheus metrics")
    channelz_address: Annotated[str, AfterValidator(_check_loopback)] = setting(
        "", "HOST:PORT", "channelz, on the loopback address only, for whoever debugs a stuck chain; empty: none"
    )
    otlp: Annotated[str, AfterValidator(_check_collector)] = setting(
        "", "URL", "OpenTelemetry collector that gets the spans of requests, over gRPC; needs the extra otel; empty: none"
    )
    kept_port: bool = setting(
        False, "BOOL", "the port of --address is kept for this server by another process of the same user, bound with SO_REUSEPORT"
    )
    grace: float = setting(30.0, "SECONDS", "seconds that running sessions get to finish after SIGTERM", ge=0)
    session_limit: float = setting(600.0, "SECONDS", "seconds that an answer without a deadline may take", gt=0)
    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        "BYTES",
        f"largest request of a client; stages take {HOP_ROOM_BYTES >> 20} MiB more between each other",
        ge=1 << 20,
    )
    token_file: str = setting("", "FILE", "file with the token of the stack, which stages ask for; or the token itself in OMNISTAGE_TOKEN")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console in a terminal, else JSON lines")
    ready_fd: int = setting(-1, "FD", "file descriptor that gets one JSON line when the server is SERVING")
    lifeline_fd: int = setting(-1, "FD", "drain and exit when the other end of this pipe closes")
    liveness_fd: int = setting(-1, "FD", "socket on which every question gets a byte while the event loop turns")


S = TypeVar("S", bound=BaseSettings)

METAVARS: Mapping[object, str] = {int: "N", float: "X"}
"""The words that stand for a value in --help, by the type of the field. A field can name another word by
`json_schema_extra={"metavar": ...}`; a field with a unit must do so."""

MAX_SHOWN = 80
"""Largest number of characters of a bad value that an error quotes."""


def read_settings(kind: type[S], words: Sequence[str], program: str) -> S:
    """Read settings of class `kind` from the words of the command line and from the environment; --help prints and exits. program: name of
    the server in --help. Raises StartError, which names the option or the variable."""
    fields = kind.model_fields

    def add_argument(parser: argparse.ArgumentParser, *names: str, **keywords: Any) -> argparse.Action:
        if field := fields.get(keywords.get("dest", "")):
            keywords["help"] = _help(field)
            if not keywords["metavar"].startswith("{"):  # The help lists the choices.
                keywords["metavar"] = _metavar(field)
        return argparse.ArgumentParser.add_argument(parser, *names, **keywords)

    try:
        source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
            kind, cli_prog_name=program, cli_parse_args=list(words), cli_exit_on_error=False, add_argument_method=add_argument
        )
        return kind(_cli_settings_source=source)
    except ValidationError as error:
        raise StartError("; ".join(_describe(details, kind, words) for details in error.errors(include_url=False))) from None
    except SettingsError as error:
        fault = _find_unknown(kind, words) or str(error).removeprefix("error parsing CLI: ")
        raise StartError(_one_line(f"{fault}; --help tells more")) from None


def _metavar(field: FieldInfo) -> str:
    """The word that stands for the value of a field in --help."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "metavar" in extra:
        return str(extra["metavar"])
    return METAVARS.get(field.annotation, "TEXT")


def _help(field: FieldInfo) -> str:
    """The text of an option in --help, with its default."""
    default = field.default
    if field.is_required():
        return f"{field.description} (needed)"
    if field.default_factory is not None or default in ("", ()):
        return str(field.description)
    return f"{field.description} (default: {','.join(default) if isinstance(default, tuple) else default})"


def _describe(details: ErrorDetails, kind: type[BaseModel], words: Sequence[str]) -> str:
    """Describe one mistake that pydantic found: the option or the variable that it came from, and what is wrong."""
    field = str(details["loc"][0])
    flag, variable = f"--{field.replace('_', '-')}", f"OMNISTAGE_{field.upper()}"
    if details["type"] == "missing":
        return f"{flag} is missing: {kind.model_fields[field].description}"
    is_option = any(word == flag or word.startswith(f"{flag}=") for word in words)
    source = flag if is_option or variable not in os.environ else variable
    return _one_line(f"{source}: {fault_found(details, repr(str(details['input'])[:MAX_SHOWN]))}")


def _find_unknown(kind: type[BaseModel], words: Sequence[str]) -> str:
    """The first word that is an option of no setting, with the option that may have been meant; empty if there is no such word."""
    flags = ["--help", *(f"--{field.replace('_', '-')}" for field in kind.model_fields)]
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        if option not in flags:
            similar = get_close_matches(option, flags, 1)
            return f"there is no option {option[:MAX_SHOWN]}{f', did you mean {similar[0]}?' if similar else ''}"
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
