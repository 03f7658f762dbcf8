"""The placeholder of a value in --help tells its unit: nobody shall take a part for seconds, or bytes for MiB."""

from __future__ import annotations

import re

import pytest
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from omnistage.cli.main import app
from omnistage.host.settings import METAVARS
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings

UNITS = {"SECONDS": r"\bseconds\b", "PART": r"\bpart\b", "BYTES": r"\bbytes\b|\brequest\b|\bmemory\b"}
"""The words that a description must have, by placeholder."""

FIELDS: dict[tuple[type, str], FieldInfo] = {
    (kind, name): field for kind in (RouterSettings, StageSettings) for name, field in kind.model_fields.items()
}


def said(metavar: object) -> str:
    """The unit of an option's value, by its placeholder; the name of a stage may come before it."""
    return str(metavar or "").removeprefix("[STAGE=]").removeprefix("STAGE=")


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_the_number_of_a_setting_has_its_unit(kind: type, name: str) -> None:
    field = FIELDS[kind, name]
    if field.annotation not in METAVARS:
        return
    extra = field.json_schema_extra
    metavar = said(extra["metavar"] if isinstance(extra, dict) else "")
    assert field.annotation is int or metavar in UNITS, "a number with a fraction is of something"
    for unit, words in UNITS.items():
        if metavar == unit:
            assert re.search(words, field.description or "")
    for unit in ("SECONDS", "PART"):
        assert metavar == unit or not re.match(rf"(greatest )?{UNITS[unit]}", field.description or "")


COMMANDS = sorted(str(command.name or getattr(command.callback, "__name__", "")).replace("_", "-") for command in app.registered_commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_value_on_the_command_line_has_a_name(command: str) -> None:
    """The placeholder of the type alone says nothing about seconds or bytes."""
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0 and "--help" in shown.output
    assert re.findall(r"--?[a-z-]+ +(?:<[a-z]+(?: range)?>|INTEGER|FLOAT)", shown.output) == []
