"""`omnistage status` and `omnistage pipelines`: they start nothing, find what runs, and fit the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.command import omnistage
from helpers.output import object_of, refusal
from helpers.processes import ProcessFamily
from helpers.terminal import Terminal
from omnistage.cli.show.tables import settings_lines
from omnistage.cli.stack.served import Served, register_stack
from omnistage.client import Omni
from omnistage.client.connection import Replica

WATCHED = """
import json, os, sys
del os.environ["OMNISTAGE_ROUTER"]  # the tests have it turned off
from omnistage.client import connection
connection.LOCAL_ADDRESS = sys.argv[1]  # that of this machine may have anything behind it
started = []
sys.addaudithook(lambda event, arguments: started.append(str(arguments[1])) if event == "subprocess.Popen" else None)
from omnistage.cli.main import app
try:
    app(sys.argv[2:], prog_name="omnistage")
finally:
    assert not started, started
    assert "torch" not in sys.modules
"""


def watched(default_address: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command where `omnistage serve` listens at this address by default. It has started nothing."""
    command = [sys.executable, "-c", WATCHED, default_address, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "AssertionError" not in done.stderr, done.stderr
    return done


def on_terminal(width: int, *words: str) -> list[str]:
    """The lines that a terminal of this width shows of the command."""
    terminal = Terminal(width)
    assert terminal.run(words) == 0, terminal.lines
    return [line for line in terminal.lines if line]


def objects(done: subprocess.CompletedProcess[str], key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = object_of(done)[key]
    return found


def test_status_where_nothing_runs(family: ProcessFamily, free_port: int) -> None:
    done = watched(f"127.0.0.1:{free_port}", "status")
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error == f"error: nothing serves at 127.0.0.1:{free_port}"
    assert "omnistage serve" in hint and "--address" in hint


def test_status_where_nothing_runs_names_stacks_elsewhere(
    family: ProcessFamily, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stacks of this user are named; a look at them that fails only costs the hint."""
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))
    with register_stack(Served("127.0.0.1:7", os.getpid(), "toy", "", 5.0)):
        done = watched(f"127.0.0.1:{free_port}", "status")
        assert done.stderr.splitlines()[-1].endswith(" Stacks of yours serve elsewhere: --address 127.0.0.1:7.")
        (tmp_path / "state" / "run").chmod(0o777)
        done = watched(f"127.0.0.1:{free_port}", "status")
        assert done.stderr.splitlines()[-1].endswith(", or OMNISTAGE_ROUTER.")


def test_models_where_nothing_runs_are_those_that_come_with_it(family: ProcessFamily, free_port: int) -> None:
    done = watched(f"127.0.0.1:{free_port}", "pipelines", "--json")
    models = {model["name"]: model for model in objects(done, "pipelines")}
    omni = [f"{family}{end}" for family in ("qwen2_5_omni", "qwen3_omni") for end in ("", "-codes", "-text")]
    assert list(models) == ["diffusers", "picture", *omni, "smol", "toy", "toy-film", "toy-omni", "toy-picture"]
    assert (models["toy"]["stages"], models["toy"]["outputs"]) == (["thinker", "talker", "code2wav"], ["text", "audio"])
    assert f"nothing serves at 127.0.0.1:{free_port}" in done.stderr
    assert list(models["toy"]) == ["name", "stages", "inputs", "outputs", "voices", "description", "on_request"], (
        "none of them runs, in no state"
    )
    on_request = {name: model["on_request"] for name, model in models.items() if model["on_request"]}
    assert on_request == {"diffusers": ["latents", "pixels"], "picture": ["latents", "pixels"], "smol": ["alignment"]}


def test_what_runs_at_the_default_address_is_found(toy_address: str) -> None:
    replicas = objects(watched(toy_address, "status", "--json"), "replicas")
    assert [replica["stage"] for replica in replicas] == ["thinker", "talker", "code2wav"]
    assert [model["name"] for model in objects(watched(toy_address, "pipelines", "--json"), "pipelines")] == ["toy"]


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("localhost", "localhost has no port; give HOST:PORT, such as localhost:50050"),
        ("http://127.0.0.1:50050", "http://127.0.0.1:50050 is a URL; give HOST:PORT alone, without http://"),
        ("no-such-host.invalid:50050", "no host 'no-such-host.invalid' is known here"),
        ("127.0.0.1:99999", "has port 99999; ports are 1 to 65535"),
        ("127.0.0.1:1,50050", "50050 has no host; give HOST:PORT, such as 127.0.0.1:50050"),
    ],
)
def test_a_wrong_address_is_told_in_its_own_words(address: str, told: str) -> None:
    lines = "\n".join(refusal("status", "--address", address))
    assert lines.startswith("error: --address: ") and told in lines
    assert "no server answers" not in lines, "nobody was waited for"


def test_one_known_host_of_several_is_enough(toy_address: str) -> None:
    done = omnistage("status", "--json", "--address", f"no-such-host.invalid:50050,{toy_address}")
    assert len(objects(done, "replicas")) == 3


def test_status_tells_what_every_stage_chose(toy_address: str) -> None:
    for replica in objects(watched(toy_address, "status", "--json"), "replicas"):
        assert (replica["settings"]["family"], replica["settings"]["device"]) == ("toy", "cpu (default)")
    assert "family" not in watched(toy_address, "status").stdout, "that is for who asks for more"
    shown = watched(toy_address, "status", "-v").stdout.splitlines()
    for stage in ("thinker", "talker", "code2wav"):
        (line,) = [line for line in shown if line.startswith(f"{stage}  ") and "family" in line]
        assert "device cpu (default)" in line and "threads 1 (default)" in line


def test_bytes_are_written_for_people() -> None:
    settings = {
        "arena_bytes": ("536870912 (default)", "512 MiB (default)"),
        "context": ("32768 of the 32768 that the model was made for", "32768 of the 32768 that the model was made for"),
        "feature_cache_bytes": ("0", "0 B"),
        "kv_cache_bytes": ("2523136000, for 68512 tokens of 64 sessions", "2.35 GiB, for 68512 tokens of 64 sessions"),
        "other_bytes": ("as they come", "as they come"),
        "small_bytes": ("1023", "1023 B"),
    }
    values = {name: value for name, (value, _) in settings.items()}
    _, line = settings_lines([Replica("toy", "thinker", "toy", "x:1", 1, "serving", 0, 0, "", values)])
    shown = ", ".join(f"{name} {text}" for name, (_, text) in settings.items())
    assert re.sub(r"\[[^]]*\]", "", line).split("  ")[1] == shown


def test_settings_are_told_with_the_pipeline_where_several_have_such_a_stage() -> None:
    stages = [("one", "thinker"), ("one", "talker"), ("two", "thinker"), ("two", "diffusion")]
    replicas = [Replica(pipeline, stage, "toy", "x:1", 1, "serving", 0, 0, "", {"device": "cpu"}) for pipeline, stage in stages]
    _, *lines = settings_lines(replicas)
    assert [re.sub(r"\[[^]]*\]", "", line).split("  ")[0] for line in lines] == ["one/thinker", "talker", "two/thinker", "diffusion"]


@pytest.mark.parametrize(("width", "gone"), [(120, set()), (80, {"transport"}), (60, {"transport", "model", "pipeline"})])
def test_status_fits_the_terminal(toy_address: str, width: int, gone: set[str]) -> None:
    with Omni(address=toy_address) as omni:
        omni.generate("Hi")  # so that there are transports to show
        replicas = omni.replicas()
    header, *lines = on_terminal(width, "status", "--address", toy_address)
    assert not any("…" in line or len(line) > width for line in (header, *lines))
    assert len(lines) == len(replicas) and gone.isdisjoint(header.split())
    assert {"stage", "address", "state", "sessions"} <= set(header.split())
    for row, replica in zip(lines, replicas, strict=True):
        assert {replica.stage, replica.address} <= set(row.split())
        assert {"serving", "draining", "lost"} & set(row.split())


@pytest.fixture(scope="module")
def two_pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A stack with as many stages as the default one, of two pipelines, and a page: its address, and the folder of its user."""
    state = str(tmp_path_factory.mktemp("state"))
    words = ("serve", "toy", "toy-picture", "--detach", "--address", "127.0.0.1:0", "--http", "127.0.0.1:0")
    done = omnistage(*words, variables={"OMNISTAGE_STATE": state})
    assert done.returncode == 0, done.stderr
    try:
        address = done.stderr.split("serving on ")[1].split()[0]
        with Omni(address=address) as omni:
            omni.draw("A hill", pipeline="toy-picture")  # It starts after the first one.
            omni.generate("Hi", pipeline="toy")
        yield address, state
    finally:
        assert omnistage("stop", variables={"OMNISTAGE_STATE": state}).returncode == 0


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (34, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_status_of_two_pipelines_is_whole_on_a_small_terminal(
    two_pipelines: tuple[str, str], monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """No word is cut or broken, and on the usual terminal nothing scrolls away."""
    address, state = two_pipelines
    monkeypatch.setenv("OMNISTAGE_STATE", state)
    with Omni(address=address) as omni:
        replicas = omni.replicas()
    terminal = Terminal(*size)
    assert terminal.run(("status", "--address", address)) == 0
    assert len(terminal.lines) < max(size[1], 12)
    assert all(len(line) < size[0] and "…" not in line for line in terminal.lines)
    words = " ".join(terminal.lines).replace(":", " ").split()
    for replica in replicas:
        port = replica.address.rpartition(":")[2]
        assert {replica.pipeline, replica.stage, replica.state, port} <= set(words)
    assert any(line.startswith("page") and "http://127.0.0.1:" in line for line in terminal.lines)
    assert "family" not in words


def test_status_tells_settings_on_request(two_pipelines: tuple[str, str]) -> None:
    terminal = Terminal(40, 10)
    assert terminal.run(("status", "-v", "--address", two_pipelines[0])) == 0
    assert {"family", "device", "threads"} <= set(" ".join(terminal.lines).replace(",", " ").split())


@pytest.mark.parametrize("words", ["pipelines", "list"])
def test_a_list_that_does_not_fit_into_columns_has_lines_for_each_row(words: str) -> None:
    terminal = Terminal(40, 10)
    assert terminal.run((words,)) == 0
    (start,) = [number for number, line in enumerate(terminal.lines) if line == "smol"]
    told = " ".join(line.strip() for line in terminal.lines[start:])
    assert "takes: text gives: text, audio" in told
    assert all(len(line) <= 40 for line in terminal.lines)
