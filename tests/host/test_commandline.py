"""The settings of a server from its command line and its environment."""

from __future__ import annotations

import re
from typing import Any

import pytest

from omnistage.host.errors import StartError, fault_found
from omnistage.host.settings import read_settings
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings

TOY = ["--family", "toy"]


def test_words_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_THREADS", "3")
    monkeypatch.setenv("OMNISTAGE_DEVICE", "cuda:1")
    settings = read_settings(StageSettings, [*TOY, "--threads=2", "--options", '{"length": 3}', "--allow", "a:1,b:2"], "stage")
    assert (settings.threads, settings.device, settings.options, settings.allow) == (2, "cuda:1", {"length": 3}, ("a:1", "b:2"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--family is missing: family of models"),
        ([*TOY, "--colour", "red"], "there is no option --colour; --help tells more"),
        ([*TOY, "--max-session", "3"], "there is no option --max-session, did you mean --max-sessions?"),
        ([*TOY, "--thread=3"], "there is no option --thread, did you mean --threads?"),
        ([*TOY, "red"], "unrecognized arguments: red"),
        ([*TOY, "--address"], "argument --address: expected one argument"),
        ([*TOY, "--address", "nowhere"], "--address: 'nowhere' has no port"),
        ([*TOY, "--metrics-address=:1"], "--metrics-address: ':1' has no host"),
        ([*TOY, "--device", "gpu"], "--device: 'gpu' is no device: give cpu, cuda or cuda:N"),
        ([*TOY, "--dtype", "float64"], "--dtype: is 'float64'; it must be 'auto', 'float32' or 'bfloat16'"),
        ([*TOY, "--max-sessions", "-1"], "--max-sessions: is '-1'; it must be at least 0"),
        ([*TOY, "--threads", "many"], "--threads: is 'many'; it must be a whole number"),
        ([*TOY, "--options", '{"a":'], "options"),
        ([*TOY, "--device", "x" * 100_000], "is no device"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(words: list[str], told: str) -> None:
    with pytest.raises(StartError) as raised:
        read_settings(StageSettings, words, "stage")
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OMNISTAGE_LOG_LEVEL", "loud", "OMNISTAGE_LOG_LEVEL: is 'loud'; it must be 'debug', 'info', 'warning' or 'error'"),
        ("OMNISTAGE_GRACE", "soon", "OMNISTAGE_GRACE: is 'soon'; it must be a number"),
        ("OMNISTAGE_KEPT_PORT", "maybe", "OMNISTAGE_KEPT_PORT: is 'maybe'; it must be true or false"),
        ("OMNISTAGE_STAGES", "thinker", "OMNISTAGE_STAGES: must be KIND=HOST:PORT"),
        ("OMNISTAGE_STAGES", "thinker=50051", "OMNISTAGE_STAGES: '50051' has no host"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartError) as raised:
        read_settings(RouterSettings, ["--pipeline", "toy"], "router")
    assert told in str(raised.value)


@pytest.mark.parametrize("kind", [StageSettings, RouterSettings])
def test_help_is_for_people(kind: type[StageSettings | RouterSettings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read_settings(kind, ["--help"], "python -m omnistage.thinker")
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m omnistage.thinker ")
    assert "--address HOST:PORT" in shown
    for internal in ("tuple", "str", "int", "dict", "__main__", "PydanticUndefined"):
        assert not re.search(rf"\b{internal}\b", shown), internal


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"type": "int_parsing", "msg": "..."}, "is 'x'; it must be a whole number"),
        ({"type": "less_than_equal", "msg": "...", "ctx": {"le": 2.0}}, "is 'x'; it must be at most 2"),
        ({"type": "literal_error", "msg": "...", "ctx": {"expected": "'a' or 'b'"}}, "is 'x'; it must be 'a' or 'b'"),
        ({"type": "value_error", "msg": "Value error, give more"}, "give more"),
        ({"type": "missing", "msg": "..."}, "is missing"),
        ({"type": "extra_forbidden", "msg": "..."}, "is no name of a setting here"),
        ({"type": "string_pattern", "msg": "Input should have 3 items"}, "must have 3 items"),
    ],
)
def test_what_pydantic_finds_is_told_in_the_same_words(fault: dict[str, Any], told: str) -> None:
    assert fault_found(fault, "'x'") == told


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize("kind", [StageSettings, RouterSettings])
def test_no_number_is_infinite(kind: type[StageSettings | RouterSettings], value: str) -> None:
    for name in [name for name, field in kind.model_fields.items() if field.annotation is float]:
        option = "--" + name.replace("_", "-")
        with pytest.raises(StartError, match=f"{option}: is '{value}'; it must be a number"):
            read_settings(kind, [f"{option}={value}"], "server")
