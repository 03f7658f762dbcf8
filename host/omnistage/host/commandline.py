"""The settings of a server from its command line and its environment; a mistake is reported in one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from omnistage.host.errors import StartError
from omnistage.host.faults import fault_found

S = TypeVar("S", bound=BaseSettings)

METAVARS: Mapping[object, str] = {int: "N", float: "X"}
"""The words that stand for a value in --help, by the type of the field. A field can name another word by
`json_schema_extra={"metavar": ...}`; a field with a unit must do so."""

MAX_SHOWN = 80
"""Largest number of characters of a bad value that an error quotes."""


def read(kind: type[S], words: Sequence[str], program: str) -> S:
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
    fault = fault_found(details, repr(str(details["input"])[:MAX_SHOWN]))
    return _one_line(f"{flag if is_option or variable not in os.environ else variable}: {fault}")


def _find_unknown(kind: type[BaseModel], words: Sequence[str]) -> str:
    """The first word that is an option of no setting, with the option that may have been meant; empty if there is no such word."""
    flags = ["--help", *(f"--{field.replace('_', '-')}" for field in kind.model_fields)]
    for word in (word.partition("=")[0] for word in words if word.startswith("--")):
        if word not in flags:
            similar = get_close_matches(word, flags, 1)
            return f"there is no option {word[:MAX_SHOWN]}{f', did you mean {similar[0]}?' if similar else ''}"
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
