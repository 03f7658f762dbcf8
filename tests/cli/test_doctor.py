"""`omnistage doctor`: a line for each thing, an exit code, and an end whatever hangs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.bare import bare_environment, bare_python
from helpers.command import omnistage
from helpers.processes import ProcessFamily
from helpers.serving import serving
from helpers.terminal import terminal_after
from omnistage.cli.show import doctor


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))


def examined(*words: str, code: int = 0, variables: dict[str, str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """The findings by the name of their check. They say of each whether it is well, and what to do about it if not."""
    done = omnistage("doctor", "--json", *words, variables=variables)
    assert (done.returncode, done.stderr) == (code, "")
    findings = json.loads(done.stdout)["checks"]
    assert (code == 1) is any(one["state"] == "bad" for one in findings)
    assert all(bool(one["advice"]) is (one["state"] != "ok") for one in findings if "has no home" not in one["fact"])
    by_check: dict[str, list[dict[str, Any]]] = {}
    for one in findings:
        by_check.setdefault(one["check"], []).append(one)
    return by_check


def test_each_thing_has_a_line(tmp_path: Path) -> None:
    found = examined()
    assert found.keys() >= {
        *("omnistage", "gRPC", "torch", "processors", "memory", "shared memory", "pressure", "descriptors", "state and logs", "models"),
        *("temporary files", "model", "router's port", "HTTP port", "router", "proxies", "player"),
    }
    assert found["state and logs"][0]["fact"].startswith(f"{tmp_path}/state, ")
    assert "OMNISTAGE_PLAYER=none" in found["player"][0]["fact"]
    plain = omnistage("doctor").stdout.splitlines()
    assert [line.split()[0] for line in plain] and {line.split()[0] for line in plain} <= {"ok", "warn", "bad"}


def test_a_stack_that_serves_answers_and_one_that_hangs_is_bad(family: ProcessFamily, free_port: int) -> None:
    with serving(family, "toy", "--http", "127.0.0.1:0", environment={"OMNISTAGE_SERVE_NO_HTTP": "false"}) as server:
        address = server.address()
        found = examined()
        assert found["router"][0]["state"] == "ok" and found["router"][0]["fact"].startswith(f"{address}: serves, ")
        [gateway] = found["gateway"]
        assert gateway["fact"].endswith("/ready answers 200")
        [router] = examined("--address", address)["router"]
        assert router["state"] == "ok", "it is named and served here, and asked once"
    found = examined("--address", f"127.0.0.1:{free_port}", code=1)
    assert "UNAVAILABLE" in found["router"][0]["fact"] and f"127.0.0.1:{free_port}" in found["router"][0]["fact"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        [router] = examined("--address", address, code=1)["router"]
        assert router["fact"] == f"{address}: no answer within 3 s"


@pytest.mark.parametrize(
    ("variables", "check", "state", "told"),
    [
        ({"OMNISTAGE_STATE": "/proc/version/x"}, "state and logs", "bad", "OMNISTAGE_STATE"),
        ({"OMNISTAGE_STATE": "~no-such-user/x"}, "state and logs", "bad", "OMNISTAGE_STATE"),
        ({"OMNISTAGE_CACHE": "/proc/version/x"}, "models", "bad", "OMNISTAGE_CACHE"),
        ({"OMNISTAGE_PLAYER": "no-such"}, "player", "bad", "pacat"),
        ({"OMNISTAGE_PLAYER": "", "PATH": "/nowhere"}, "player", "warn", "OMNISTAGE_PLAYER"),
        ({"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}, "proxies", "warn", "no_proxy=127.0.0.1"),
        ({"OMNISTAGE_ROUTER": "no port"}, "routers", "bad", "OMNISTAGE_ROUTER"),
        ({"OMNISTAGE_ROUTER": "no-such-host.invalid:1"}, "routers", "bad", "no-such-host"),
    ],
)
def test_what_is_wrong_says_what_to_do(variables: dict[str, str], check: str, state: str, told: str) -> None:
    [one, *_] = examined(code=1 if state == "bad" else 0, variables=variables)[check]
    assert one["state"] == state and told in one["fact"] + one["advice"]


def test_a_port_of_another_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor, "DEFAULT_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        [router, _] = doctor._ports()
    assert router.state == "warn" and f"(pid {os.getpid()})" in router.fact


def test_what_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIMIT_S", 0.05)
    goes_on = threading.Event()

    def hang() -> Iterator[doctor.Finding]:
        goes_on.wait()
        yield doctor.Finding("disk", "is back")

    [one] = asyncio.run(doctor._run("disk", hang))
    goes_on.set()
    assert (one.check, one.state) == ("disk", "warn") and "no result within" in one.fact


def test_a_narrow_terminal_has_room_for_it() -> None:
    shown = terminal_after("doctor", size=(60, 200))
    assert any(line.startswith("ok") and "omnistage" in line for line in shown.lines)
    assert all(len(line) <= 60 for line in shown.lines)


def test_it_needs_no_package_of_models(tmp_path: Path) -> None:
    """As in an installation of the command alone."""
    command = [*bare_python(), "-m", "omnistage.cli", "doctor", "--json"]
    done = subprocess.run(command, env=bare_environment(tmp_path, "cli"), capture_output=True, text=True, timeout=60, check=False)
    findings = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert findings["torch"]["state"] == "warn" and "omnistage[models]" in findings["torch"]["advice"], done.stderr
