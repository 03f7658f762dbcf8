"""Servers that are started by hand, with a mistake: one line that says what to change, before anything heavy is loaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.processes import Family

pytestmark = pytest.mark.serial

RUN_AND_LOOK = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("torch" in sys.modules)
"""


def refused(family: Family, module: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """The reason in the one line that a server of this module ends with. It has not imported torch."""
    line, printed = family.refused(RUN_AND_LOOK, f"omnistage.{module}", *words, environment=environment)
    entry = json.loads(line)
    assert (entry["event"], entry["level"]) == ("server.cannot_start", "error")
    assert printed == "False\n", "torch was imported to find that out"
    return str(entry["reason"])


@pytest.mark.parametrize(
    ("module", "words", "told"),
    [
        ("thinker", [], "--model is missing"),
        ("talker", ["--model", "smoll"], "no talker named 'smoll'; there are smol, toy"),
        ("diffusion", ["--model", "smol"], "no diffusion named 'smol'; there are toy"),
        ("code2wav", ["--model", "toy", "--colour", "red"], "unrecognized arguments: --colour red"),
        ("diffusion", ["--model", "toy", "--options", '{"speed": 3}'], "unknown options ['speed']"),
        ("diffusion", ["--model", "toy", "--options", '{"length": "long"}'], "option length of the toy models is 'long'"),
        ("thinker", ["--model", "smol", "--options", '{"speed": 3}'], "smol has no options, ['speed'] are given"),
        ("thinker", ["--model", "toy", "--model-path", "/"], "the toy models have no weights"),
        ("thinker", ["--model", "smol", "--device", "cuda:0"], "the thinker of smol computes on cpu only"),
        ("thinker", ["--model", "smol", "--device", "gpu"], "'gpu' is no device"),
        ("talker", ["--model", "smol", "--dtype", "bfloat16"], "the talker of smol computes in float32 only"),
        ("thinker", ["--model", "smol", "--dtype", "float64"], "--dtype: must be"),
        ("talker", ["--model", "toy", "--address", "50051"], "--address: '50051' has no host"),
        ("talker", ["--model", "toy", "--metrics-address", "0.0.0.0:99999"], "--metrics-address: '0.0.0.0:99999' has no possible port"),
        ("router", ["--channelz-address", "0.0.0.0:0"], "--channelz-address: '0.0.0.0:0' can be reached from other hosts"),
        ("router", ["--pipeline", "nothing"], "no pipeline 'nothing'"),
        ("router", ["--pipeline", "toy"], "--stages thinker=HOST:PORT"),
        ("router", ["--address", "localhost"], "'localhost' has no port"),
    ],
)
def test_a_mistake_is_told_in_one_line(family: Family, module: str, words: list[str], told: str) -> None:
    assert told in refused(family, module, *words)


@pytest.mark.parametrize("module", ["thinker", "talker", "code2wav"])
def test_a_folder_that_is_no_model(family: Family, tmp_path: Path, module: str) -> None:
    told = refused(family, module, "--model", "smol", "--model-path", str(tmp_path))
    assert f"{tmp_path / module / 'config.json'} is missing" in told
    (tmp_path / module).mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / module / name).write_text("{")
    assert "is not JSON" in refused(family, module, "--model", "smol", "--model-path", str(tmp_path))
    (tmp_path / module / "config.json").write_text('{"model_type": "llama"}')
    assert "is a 'llama', not a" in refused(family, module, "--model", "smol", "--model-path", str(tmp_path))


@pytest.mark.parametrize("module", ["thinker", "router"])
def test_a_bad_variable_of_the_environment_is_named(family: Family, module: str) -> None:
    told = refused(family, module, *(["--model", "smol"] if module == "thinker" else []), environment={"OMNISTAGE_LOG_LEVEL": "loud"})
    assert told.startswith("OMNISTAGE_LOG_LEVEL: must be 'debug', 'info', 'warning' or 'error'")


@pytest.mark.parametrize("option", ["--address", "--metrics-address"])
def test_a_taken_port_is_found_before_the_model_is_loaded(family: Family, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        told = refused(family, "thinker", "--model", "smol", option, address)
    assert told.startswith(f"cannot listen on {address}: the port is taken by ")
    assert told.endswith(f"choose another {option}")
