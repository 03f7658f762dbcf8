"""Servers that are started by hand, with a mistake: one line that says what to change, before anything heavy is loaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers import lengths
from helpers.processes import ProcessFamily

RUN_AND_LOOK = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("torch" in sys.modules)
"""


def refused(family: ProcessFamily, module: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """The reason in the one line with which a server of this module ends. The server has not imported torch."""
    line, printed = family.refused(RUN_AND_LOOK, f"omnistage.{module}", *words, environment=environment)
    entry = json.loads(line)
    assert (entry["event"], entry["level"]) == ("server.cannot_start", "error")
    assert printed == "False\n", "torch was imported to find that out"
    return str(entry["reason"])


@lengths.drawn_cells(
    2,
    ("module", "words", "told"),
    [
        ("thinker", [], "--family is missing"),
        ("talker", ["--family", "smoll"], "no talker named 'smoll'; there are qwen2_5_omni, qwen3_omni, smol, toy"),
        ("diffusion", ["--family", "smol"], "no diffusion named 'smol'; there are diffusers, toy"),
        ("code2wav", ["--family", "toy", "--colour", "red"], "there is no option --colour"),
        ("diffusion", ["--family", "toy", "--options", '{"speed": 3}'], "unknown options ['speed']"),
        ("diffusion", ["--family", "toy", "--options", '{"length": "long"}'], "option length of the toy models is 'long'"),
        ("thinker", ["--family", "smol", "--options", '{"speed": 3}'], "smol has no options, ['speed'] are given"),
        ("thinker", ["--family", "toy", "--checkpoint", "/"], "the models of toy have no weights"),
        ("talker", ["--family", "smol", "--device", "cuda:0"], "the talker of smol computes on cpu only"),
        ("thinker", ["--family", "smol", "--device", "gpu"], "'gpu' is no device"),
        ("talker", ["--family", "smol", "--dtype", "bfloat16"], "the talker of smol computes in float32 only"),
        (
            "talker",
            ["--family", "smol", "--tensor-parallel-size", "2"],
            "the talker of smol computes on one device; for more answers at once",
        ),
        ("talker", ["--family", "smol", "--max-batch-size", "2"], "the talker of smol computes one session after the other; leave it out"),
        (
            "talker",
            ["--family", "smol", "--max-batch-tokens", "99"],
            "max_batch_tokens 99: the talker of smol has no use for it; leave it out",
        ),
        ("code2wav", ["--family", "smol", "--kv-cache-bytes", "99"], "kv_cache_bytes 99: the code2wav of smol has no use for it"),
        ("code2wav", ["--family", "smol", "--enable-cache", "false"], "enable_cache false: the code2wav of smol has no use for it"),
        ("diffusion", ["--family", "toy", "--threads", "2"], "threads 2: the diffusion of toy has no use for it"),
        ("thinker", ["--family", "smol", "--tensor-parallel-size", "0"], "--tensor-parallel-size: is '0'; it must be at least 1"),
        ("thinker", ["--family", "smol", "--dtype", "float64"], "--dtype: is 'float64'; it must be"),
        ("talker", ["--family", "toy", "--address", "50051"], "--address: '50051' has no host"),
        ("talker", ["--family", "toy", "--metrics-address", "0.0.0.0:99999"], "--metrics-address: '0.0.0.0:99999' has no possible port"),
        ("router", ["--channelz-address", "0.0.0.0:0"], "--channelz-address: '0.0.0.0:0' can be reached from other hosts"),
        ("router", ["--pipeline", "nothing"], "no pipeline 'nothing'"),
        ("router", ["--pipeline", "toy"], "--stages thinker=HOST:PORT"),
        ("router", ["--address", "localhost"], "'localhost' has no port"),
    ],
)
def test_a_mistake_is_told_in_one_line(family: ProcessFamily, module: str, words: list[str], told: str) -> None:
    assert told in refused(family, module, *words)


@lengths.drawn_cells(1, "module", ["thinker", "talker", "code2wav"])
def test_a_folder_that_is_no_model(family: ProcessFamily, tmp_path: Path, module: str) -> None:
    told = refused(family, module, "--family", "smol", "--checkpoint", str(tmp_path))
    assert f"{tmp_path / module / 'config.json'} is missing" in told
    (tmp_path / module).mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / module / name).write_text("{")
    assert "is not JSON" in refused(family, module, "--family", "smol", "--checkpoint", str(tmp_path))
    (tmp_path / module / "config.json").write_text('{"model_type": "llama"}')
    assert "is a 'llama', not a" in refused(family, module, "--family", "smol", "--checkpoint", str(tmp_path))


@pytest.mark.parametrize("module", ["thinker", "router"])
def test_a_bad_variable_of_the_environment_is_named(family: ProcessFamily, module: str) -> None:
    told = refused(family, module, *(["--family", "smol"] if module == "thinker" else []), environment={"OMNISTAGE_LOG_LEVEL": "loud"})
    assert told.startswith("OMNISTAGE_LOG_LEVEL: is 'loud'; it must be 'debug', 'info', 'warning' or 'error'")


@pytest.mark.parametrize("option", ["--address", "--metrics-address"])
def test_a_taken_port_is_found_before_the_model_is_loaded(family: ProcessFamily, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        told = refused(family, "thinker", "--family", "smol", option, address)
    assert told.startswith(f"cannot listen on {address}: the port is taken by ")
    assert told.endswith(f"choose another {option}")
