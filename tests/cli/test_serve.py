"""`omnistage serve` from start to end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import Family, wait_end
from omnistage.client import Omni


def serve(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "omnistage.cli", "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    line = server.stderr.readline()
    assert line.startswith("serving on "), line + server.stderr.read()
    return line.split()[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_serves_until_it_is_told_to_end(family: Family, number: signal.Signals) -> None:
    with serve("toy", "--address", "127.0.0.1:0") as server:
        address = read_address(server)
        with Omni(address=address) as omni:
            assert omni.generate("Hi").text
        server.send_signal(number)
        assert server.wait(30) == 0
    assert family.pids() == []


def test_a_second_server_on_the_same_port_says_so(family: Family, free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    with serve("toy", "--address", address) as first:
        assert read_address(first) == address
        with serve("toy", "--address", address) as second:
            assert second.stderr is not None
            told = second.stderr.read()
            assert second.wait(30) == 1
        assert "router ended with code" in told
        assert "port is taken" in told
        first.terminate()
        assert first.wait(30) == 0
    assert family.pids() == []


def test_replicas_and_logs(family: Family, tmp_path: Path) -> None:
    with serve("toy", "--address", "127.0.0.1:0", "--replicas", "talker=2", "--log-dir", str(tmp_path)) as server:
        with Omni(address=read_address(server)) as omni:
            assert [replica.stage for replica in omni.replicas()] == ["thinker", "talker", "talker", "code2wav"]
        server.terminate()
        assert server.wait(30) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code2wav.log", "router.log", "talker-0.log", "talker-1.log", "thinker.log"]


def test_a_stage_that_dies_is_told_and_the_router_ends_the_stack(family: Family) -> None:
    with serve("toy", "--address", "127.0.0.1:0") as server:
        assert server.stderr is not None
        with Omni(address=read_address(server)) as omni:
            pids = {replica.stage: replica.pid for replica in omni.replicas()}
        os.kill(pids["talker"], signal.SIGKILL)
        lines = iter(server.stderr.readline, "")
        assert next(line for line in lines if line.startswith("lost")) == f"lost talker (pid {pids['talker']}) ended with signal SIGKILL\n"
        router = next(pid for pid in family.pids() if b"omnistage.router" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(router, signal.SIGKILL)
        assert server.wait(30) == 1
        assert "the router ended" in server.stderr.read()
    assert family.pids() == []


def test_a_killed_launcher_takes_its_processes_along(family: Family) -> None:
    with serve("toy", "--address", "127.0.0.1:0") as server:
        read_address(server)
        others = [pid for pid in family.pids() if pid != server.pid]
        assert len(others) == 4
        server.kill()
        for pid in others:
            assert wait_end(pid, 30)
    assert family.wait_ended() == []


def test_the_ready_line_and_the_lifeline(family: Family) -> None:
    ready_read, ready_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    words = ["serve", "toy", "--address", "127.0.0.1:0", "--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)]
    with subprocess.Popen([sys.executable, "-m", "omnistage.cli", *words], pass_fds=(ready_write, lifeline_read)) as server:
        os.close(ready_write)
        os.close(lifeline_read)
        with os.fdopen(ready_read) as ready:
            address = json.loads(ready.read())["address"]
        with Omni(address=address) as omni:
            assert omni.models()[0].name == "toy"
        os.close(lifeline_write)
        assert server.wait(30) == 0
    assert family.pids() == []
