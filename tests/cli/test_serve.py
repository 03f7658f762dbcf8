"""`omnistage serve` from start to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.output import COMMAND
from helpers.processes import ProcessFamily, StartedProcess, few_descriptors, open_files, wait_end
from helpers.serving import ServeProcess, pid_of, serving, take_over
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.stack.processes import StackProcess
from omnistage.cli.stack.resources import OOM_SCORE, bound_text, memory_of_machine, router_bounds, stage_bounds
from omnistage.client import Omni
from omnistage.client.connection import Replica
from omnistage.client.errors import StackError
from omnistage.client.private_stack import StackPlan
from omnistage.gateway import film_store
from omnistage.host.child import count_mapped

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, END_HEADERS = 4, 1, 4
NAMED_BEFORE = b"\xbe"
"""The header that was put into the table last."""
REPEATS = 4000
GENERATE = "/omnistage.v1.OmniService/Generate"
ASKED = {":method": "POST", ":scheme": "http", ":path": GENERATE, ":authority": "x", "te": "trailers", "content-type": "application/grpc"}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(text: str) -> bytes:
    """Its length, with 7 bits of the first byte, and its bytes (RFC 7541, 5.1 and 5.2)."""
    data, rest = text.encode(), len(text) - 127
    if rest < 0:
        return bytes([len(data)]) + data
    length = bytearray([127])
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + data


def _header(name: str, value: str, kind: int) -> bytes:
    """kind: 0: not kept; 0x40: kept in the table."""
    return bytes([kind]) + _text(name) + _text(value)


def header_bomb(address: str, calls: int) -> None:
    """As many calls as the server takes, each with 14 MB of headers in 4 KB; ends early where the connection is cut."""
    host, _, port = address.rpartition(":")
    asked = b"".join(_header(name, value, 0) for name, value in ASKED.items())
    with socket.create_connection((host, int(port)), timeout=30) as connection, suppress(OSError):
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, asked + _header("big", "b" * 3500, 0x40)))
        for call in range(1, calls):
            connection.sendall(frame(HEADERS, END_HEADERS, 2 * call + 1, asked + NAMED_BEFORE * REPEATS))
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.recv(1 << 16)
            connection.settimeout(30)


@pytest.fixture
def alone(tmp_path: Path) -> str:
    """A pipeline of one stage: its stack starts in half of the time of a chain."""
    return toy_pipeline(tmp_path)


def answers(address: str) -> str:
    with Omni(address=address) as omni:
        return omni.generate("Hi").text


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def replicas_once_serving(address: str, without: int = 0) -> list[Replica]:
    """The replicas when the router has found all of them, which takes it about a second after a start. without: pid of one that is gone."""
    deadline = time.monotonic() + 30
    with Omni(address=address) as omni:
        while True:
            replicas = omni.replicas()
            if {replica.state for replica in replicas} == {"serving"} and without not in {replica.pid for replica in replicas}:
                return replicas
            assert time.monotonic() < deadline, replicas
            time.sleep(0.05)


@lengths.one_or_all("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_it_serves_until_it_is_told_to_end(family: ProcessFamily, alone: str, name: str, seed: int) -> None:
    number = signal.Signals[lengths.draw(name, ["SIGTERM", "SIGINT", "SIGHUP"], seed)]
    with serving(family, alone) as server:
        first = server.line()
        assert first.startswith("serving on ")
        assert answers(first.split()[2])
        server.send_signal(number)
        # The answer may still count as running: the client has all of it a moment before the router has closed its account.
        assert server.report("ending ").partition(":")[0] == f"on {number.name}"
        assert server.wait(30) == 0


@lengths.long_form("cli/test_serve.py::test_it_serves_until_it_is_told_to_end", unkept="a signal that was ignored before stays ignored")
@lengths.one_or_all("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_was_ignored_before_stays_ignored(family: ProcessFamily, alone: str, name: str, seed: int) -> None:
    """So nohup says that a job outlives its terminal, and a shell that a job in the background outlives Ctrl-C."""
    number = signal.Signals[lengths.draw(name, ["SIGHUP", "SIGINT"], seed)]
    ignoring = ["sh", "-c", f'trap "" {number.name.removeprefix("SIG")}; exec "$@"', "sh"]
    with serving(family, alone, through=ignoring) as server:
        address = server.address()
        server.send_signal(number)
        assert answers(address)
        server.terminate()
        assert server.report("ending ").partition(":")[0] == "on SIGTERM"
        assert server.wait(30) == 0


@lengths.long_form("cli/test_serve.py::test_what_dies_is_started_again_at_its_address", unkept="nobody needs to read its output")
def test_a_stack_outlives_whoever_read_its_output(family: ProcessFamily, alone: str) -> None:
    with serving(family, alone, "--replicas", "thinker=2") as server:
        address = server.address()
        assert server.stderr is not None
        server.stderr.close()
        before = replicas_once_serving(address)
        os.kill(before[1].pid, signal.SIGKILL)
        assert wait_end(before[1].pid, 30)
        after = replicas_once_serving(address, without=before[1].pid)
        assert [replica.address for replica in after] == [replica.address for replica in before]


@lengths.long_form(
    "host/test_addresses.py::test_who_is_in_the_way_is_told", "cli/test_detached.py::test_a_stack_stays_when_its_command_ends"
)
def test_a_second_server_on_the_same_port_says_who_has_it(family: ProcessFamily, alone: str, free_port: int, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port}"
    logs = tmp_path / "not" / "yet"
    with serving(family, alone, "--address", address) as first:
        assert first.address() == address
        taken = f"the port is taken by python -m omnistage.router (pid {pid_of('omnistage.router', family)})"
        for option in ("--address", "--metrics-address"):
            with ServeProcess(alone, option, address, "--log-dir", str(logs)) as second:
                assert second.stderr is not None
                assert second.stderr.read() == f"error: cannot listen on {address}: {taken}; choose another {option}\n"
                assert second.wait(30) == 1
        assert list(logs.iterdir()) == [], "no process was started that would write there"


def test_what_dies_is_started_again_at_its_address(family: ProcessFamily, tmp_path: Path) -> None:
    """One of two replicas. Each has a log of its own."""
    with serving(family, "toy", "--replicas", "talker=2", "--log-dir", str(tmp_path / "logs")) as server:
        address = server.address()
        before = replicas_once_serving(address)
        assert [replica.stage for replica in before] == ["thinker", "talker", "talker", "code2wav"]
        one = next(replica for replica in before if replica.stage == "talker")
        os.kill(one.pid, signal.SIGKILL)
        assert server.report("lost ") == f"talker-0 (pid {one.pid}) ended with signal SIGKILL"
        assert re.fullmatch(r"talker-0 \(pid \d+\) after \d+\.\d s", server.report("restarted "))
        after = replicas_once_serving(address)
        assert [replica.address for replica in after] == [replica.address for replica in before]
        assert [now.pid == then.pid for now, then in zip(after, before, strict=True)] == [True, False, True, True]
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["code2wav.log", "router.log", "talker-0.log", "talker-1.log", "thinker.log"]


def test_what_drains_is_not_called_lost(family: ProcessFamily, alone: str) -> None:
    """An operator ends a stage with SIGTERM, which is how it is told to finish what runs."""
    with serving(family, alone) as server:
        [thinker] = replicas_once_serving(server.address())
        for _ in range(2):  # what the start had to say
            server.line()
        os.kill(thinker.pid, signal.SIGTERM)
        end = "was told to, and let its sessions finish; it is started again"
        assert server.line() == f"ended thinker (pid {thinker.pid}) {end}\n"
        assert server.line().startswith("restarted thinker (pid ")


def test_a_router_that_dies_is_started_again_at_its_port(family: ProcessFamily, alone: str) -> None:
    with serving(family, alone) as server:
        address = server.address()
        for _ in range(2):
            router = pid_of("omnistage.router", family)
            os.kill(router, signal.SIGKILL)
            assert server.report("lost ") == f"router (pid {router}) ended with signal SIGKILL"
            assert server.report("restarted ").startswith("router (pid ")
            assert answers(address)


@pytest.mark.parametrize(("gib", "bound_gib"), [(1, 2), (2, 2), (4, 3), (8, 6), (15, 11.25), (16, 12), (1024, 12)])
def test_a_router_has_a_bound_on_every_machine(gib: float, bound_gib: float) -> None:
    assert router_bounds(int(gib * (1 << 30))).memory_bytes == bound_gib * (1 << 30)


def test_a_stage_leaves_a_part_of_the_memory_that_its_model_left() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started: its memory is counted several times below, and must not grow meanwhile
        assert stage_bounds().put_on(process.pid) is None
        machine_bytes, mapped_bytes = 64 << 30, count_mapped(process.pid)
        expected = mapped_bytes + int(0.75 * (machine_bytes - mapped_bytes))
        assert stage_bounds().put_on_serving(process.pid, machine_bytes) == expected
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA)[0] == expected
        assert stage_bounds().put_on_serving(process.pid, mapped_bytes + 1) == mapped_bytes + (2 << 30)
        assert oom_score(process.pid) == max(OOM_SCORE, oom_score(os.getpid()))
        assert stage_bounds().put_on_serving(process.pid, mapped_bytes) is None
        process.communicate(b"\n")
    assert stage_bounds().put_on_serving(process.pid, machine_bytes) is None


@lengths.long_form(
    "cli/test_serve.py::test_a_router_has_a_bound_on_every_machine",
    "cli/test_serve.py::test_a_stage_leaves_a_part_of_the_memory_that_its_model_left",
    "cli/test_serve.py::test_a_router_that_dies_is_started_again_at_its_port",
    unkept="the bound holds in the process, and its end is told with it",
)
def test_a_server_that_needs_more_memory_than_it_may_have_ends_alone(family: ProcessFamily, alone: str) -> None:
    """By headers that grow in it a thousandfold. The others stay, who started it is told why, and it is there again."""
    with serving(family, alone) as server:
        address = server.address()
        [thinker] = replicas_once_serving(address)
        router = pid_of("omnistage.router", family)
        bound = router_bounds(memory_of_machine()).memory_bytes
        assert resource.prlimit(router, resource.RLIMIT_DATA)[0] == bound
        of_thinker, _ = resource.prlimit(thinker.pid, resource.RLIMIT_DATA)
        assert 0.75 * memory_of_machine() <= of_thinker < memory_of_machine()
        for pid, name, target, memory_bytes in ((router, "router", address, bound), (thinker.pid, "thinker", thinker.address, of_thinker)):
            assert oom_score(pid) == max(OOM_SCORE, oom_score(os.getpid()))
            # The memory that it has mapped by now and 128 MiB: no test should fill gigabytes.
            resource.prlimit(pid, resource.RLIMIT_DATA, (count_mapped(pid) + (128 << 20), resource.RLIM_INFINITY))
            header_bomb(target, 1000)
            assert server.report("lost ") == f"{name} (pid {pid}) ended with signal SIGABRT{bound_text(memory_bytes)}"
            assert server.report("restarted ").startswith(f"{name} (pid ")
            assert answers(address)
        assert resource.prlimit(pid_of("omnistage.router", family), resource.RLIMIT_DATA)[0] == bound


@lengths.long_form("cli/test_several.py::test_the_end_takes_a_pipeline_along_that_is_starting", unkept="all of it is being started again")
@lengths.one_or_all("delay", ["0", "0.05", "0.15", "0.4"])
def test_the_end_wins_over_a_start(family: ProcessFamily, alone: str, delay: str, seed: int) -> None:
    """Whatever is being started again when the stack is told to end: nothing is left."""
    delay_s = float(lengths.draw(delay, ["0", "0.05", "0.15", "0.4"], seed))
    with serving(family, alone) as server:
        server.address()
        for pid in [pid for pid in family.pids() if pid != server.pid]:
            os.kill(pid, signal.SIGKILL)
        time.sleep(delay_s)


@lengths.long_form("cli/test_several.py::test_one_that_cannot_start_is_told_and_the_others_go_on", unkept="it ends with the last replica")
def test_a_process_that_cannot_start_again_is_given_up(family: ProcessFamily, alone: str) -> None:
    """Its port is taken by another one. The stack goes on with the second replica of its kind, and ends with the last one."""
    cannot_start = "{} cannot start: cannot listen on {}: the port is taken by "
    with serving(family, alone, "--replicas", "thinker=2") as server, ExitStack() as taken:
        address = server.address()
        thinkers = [replica for replica in replicas_once_serving(address) if replica.stage == "thinker"]
        take_over(thinkers[0], taken)
        assert server.report("given up ").startswith(cannot_start.format("thinker-0", thinkers[0].address))
        with Omni(address=address) as omni:
            assert omni.generate("Hi").text
            assert [replica.state for replica in omni.replicas()] == ["lost", "serving"]
        table, _, _ = omnistage("status", "--address", address).stdout.partition("\n\n")
        rows = [line.split()[1:] for line in table.splitlines()[1:]]
        assert [row[0] for row in rows] == ["thinker", "thinker"]
        assert rows[0][2:7] == [thinkers[0].address, "-", "lost", "-", "-"]
        assert rows[1][2:5] == [thinkers[1].address, str(thinkers[1].pid), "serving"]
        take_over(thinkers[1], taken)
        assert server.report("given up ").startswith(cannot_start.format("thinker-1", thinkers[1].address))
        assert server.wait(30) == 1
        assert server.stderr is not None and "error: thinker-1 cannot start" in server.stderr.read()


def test_a_killed_launcher_takes_its_processes_along(family: ProcessFamily, alone: str) -> None:
    with ServeProcess(alone) as server:
        server.address()
        others = [pid for pid in family.pids() if pid != server.pid]
        assert len(others) == 2
        server.kill()
        for pid in others:
            assert wait_end(pid, 30)
    assert family.wait_ended() == []


def test_an_owner_orders_a_stack_that_ends_with_it(family: ProcessFamily, alone: str) -> None:
    ours, theirs = socket.socketpair()
    with StartedProcess([*COMMAND, "launch", str(theirs.fileno())], pass_fds=(theirs.fileno(),)) as server:
        theirs.close()
        with ours, ours.makefile("rw", encoding="utf-8") as owner:
            print(json.dumps(StackPlan({"pipeline": alone}).order), file=owner, flush=True)
            address = json.loads(owner.readline())["address"]
            with Omni(address=address) as omni:
                assert omni.pipelines()[0].name == Path(alone).stem
        assert server.wait(30) == 0
    assert family.pids() == []


@pytest.mark.parametrize("line", ["", "no JSON\n", '{"is_private": true}\n', '{"pipelines": []', "[" * (2 << 20)])
def test_an_owner_that_orders_nothing_is_told(line: str) -> None:
    ours, theirs = socket.socketpair()
    with StartedProcess(
        [*COMMAND, "launch", str(theirs.fileno())], pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True
    ) as server:
        theirs.close()
        with suppress(BrokenPipeError):  # Nobody reads the rest of an order that is too long.
            ours.sendall(line.encode())
        ours.shutdown(socket.SHUT_WR)
        assert server.stderr is not None and "error: no stack was ordered: " in server.stderr.read()
        assert server.wait(30) == 1
    ours.close()


def test_a_stack_that_others_reach_says_so(family: ProcessFamily, alone: str) -> None:
    """Its page is told by its address on this machine."""
    with serving(family, alone, "--address", "0.0.0.0:0", "--http", "0.0.0.0:0") as server:
        assert "0.0.0.0:0 can be reached from other hosts: nothing is encrypted" in server.line()
        assert server.line().startswith("serving on 0.0.0.0:")
        page = server.report("page:").split()[0]
        with build_opener(ProxyHandler({})).open(f"{page}/ready", timeout=60) as ready:
            assert ready.status == 200 and "//127.0.0.1:" in page


@pytest.mark.parametrize("room", range(6))
async def test_without_descriptors_it_says_that_it_cannot_be_started(room: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Whichever it is that cannot be had: a pipe, the log, or what Python needs for a process."""
    child = StackProcess("talker", "omnistage.talker", [], "127.0.0.1:0", "127.0.0.1:0", Path(os.devnull))
    before = open_files()
    with few_descriptors(room), pytest.raises(StackError, match=r"^talker cannot be started: (/dev/null: )?Too many open files"):
        await child.start(0)
    await asyncio.sleep(0)
    assert open_files() - before == set() and capfd.readouterr() == ("", "")


async def test_the_reason_of_a_server_that_cannot_start_is_told_also_when_it_has_begun_to_answer(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / film_store.DATABASE)) as films:
        films.execute(f"PRAGMA user_version={film_store.VERSION}")
        films.execute("CREATE TABLE secret(value)")
        films.execute("INSERT INTO secret VALUES(zeroblob(32))")
        films.commit()
    words = ["--video-folder", str(tmp_path), "--router", "127.0.0.1:1"]
    server = StackProcess("gateway", "omnistage.gateway", words, "127.0.0.1:0", "127.0.0.1:0", tmp_path / "log")
    lifeline, end = os.pipe()
    try:
        with pytest.raises(StackError, match=r"^gateway cannot start: .* is damaged"):
            await server.start(lifeline)
    finally:
        await server.kill()
        os.close(lifeline)
        os.close(end)
