"""A setting has the same name and default in model, stage server, command line, client and page, its placeholder in --help tells its unit,
docs/limits.md says what the code does, and docs/logs.md has every event."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from omnistage.cli.main import app
from omnistage.cli.stack.layout import flag
from omnistage.client.private_stack import StackPlan, StackSettings
from omnistage.gateway.settings import GatewaySettings
from omnistage.host.settings import METAVARS, ServerSettings
from omnistage.models.options import DEFAULTS, OPTIONAL
from omnistage.models.registry import families
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings
from tools import limits

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = {name: default for name, default in DEFAULTS.items() if name not in ("path", "family")}
ALWAYS = ("device", "dtype", "max_sessions")
"""Settings that every model has a use for."""


def test_a_setting_is_for_every_model_or_for_some() -> None:
    assert sorted(SETTINGS) == sorted((*ALWAYS, *OPTIONAL))


def test_families_use_settings_that_there_are() -> None:
    used = {setting for family in families().values() for model in family.models.values() for setting in model.uses}
    assert used <= set(OPTIONAL)


def test_a_stage_server_has_every_setting_with_the_default_of_the_models() -> None:
    assert {name: StageSettings.model_fields[name].default for name in SETTINGS} == SETTINGS


@pytest.mark.parametrize("setting", OPTIONAL)
def test_the_command_line_reads_every_setting_by_stage(setting: str) -> None:
    result = CliRunner().invoke(app, ["serve", "toy", flag(setting), "nowhere=1"])
    assert result.exit_code == 2 and f"{flag(setting)} nowhere=1" in " ".join(result.output.split())


def test_the_client_gives_every_setting_to_the_launcher() -> None:
    assert set(SETTINGS) <= {*StackSettings.__annotations__, "tensor_parallel_size"}
    values = {"device": "cpu", "dtype": "auto", "enable_cache": True, "gpu_memory_utilization": 0.5, "memory_share": 0.5}
    settings = {name: values.get(name, 3) for name in set(SETTINGS) - {"tensor_parallel_size"}}
    order = StackPlan(StackSettings(**settings)).order  # type: ignore[typeddict-item]
    assert order["settings"].keys() == {*OPTIONAL}
    assert (order["devices"], order["dtype"], order["servers"]["max_sessions"]) == ({"": "cpu"}, "auto", 3)


def test_the_page_has_every_setting() -> None:
    page = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    table = page.partition("## Settings of a stack")[2].partition("\n#")[0]
    rows = re.findall(r"(?m)^\| (`[^|]+`) \|", table)
    assert set(SETTINGS) <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_page_has_every_variable_of_the_gateway_that_serve_has_no_option_for() -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    table = page.partition("## Settings")[2].partition("\n#")[0]
    rows = re.findall(r"(?m)^\| (`[^|]+`) \|", table)
    own = GatewaySettings.model_fields.keys() - ServerSettings.model_fields.keys() - {"router", "port_tries"}
    assert own
    named = {name.lower() for row in rows for name in re.findall(r"`OMNISTAGE_(\w+)`", row)}
    assert own <= named <= GatewaySettings.model_fields.keys()


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


def test_the_page_of_limits_is_fresh() -> None:
    assert limits.PAGE.read_text(encoding="utf-8") == limits.page(), "run python tools/limits.py"


EVENT = re.compile(r'\blog\.(?:debug|info|warning|error|critical|exception)\(\s*"([a-z_]+\.[a-z_]+)"')


def test_every_event_of_the_log_has_a_row() -> None:
    """Whoever is on call looks an event up in docs/logs.md."""
    page = (ROOT / "docs" / "logs.md").read_text()
    folders = ("connector", "engine", "gateway", "host", "link", "models", "router", "services", "wire")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    events = {event for source in sources for event in EVENT.findall(source)}
    assert len(events) > 50 and sorted(event for event in events if f"`{event}`" not in page) == []
