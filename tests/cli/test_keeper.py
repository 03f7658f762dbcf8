"""The keeper of a process of `omnistage serve`: it starts the process again, and first ends one that answers no more."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers import lengths
from helpers.hanging import BURN, ENDING, HOLD
from helpers.ports import take_address
from helpers.processes import busy_cores
from helpers.servers import stage_stub
from helpers.waiting import until
from omnistage.cli.stack import processes
from omnistage.cli.stack.processes import StackProcess, keep
from omnistage.v1 import stage_pb2

QUESTIONS = processes.MAX_UNANSWERED + 2
"""That a sound process is asked: more than would end one that hangs."""


@dataclass
class KeptTalker:
    """A toy Talker with its keeper. told: what the keeper said."""

    child: StackProcess
    told: asyncio.Queue[tuple[str, str]]

    async def described(self) -> int:
        """The pid that answers there."""
        async with stage_stub(self.child.address) as stub:
            return (await stub.Describe(stage_pb2.DescribeRequest(), timeout=60, wait_for_ready=True)).pid


@asynccontextmanager
async def kept(log: Path) -> AsyncIterator[KeptTalker]:
    words, variables = ["omnistage.talker", "--family", "toy"], {**os.environ, **ENDING}
    child = StackProcess("talker", "helpers.hanging", words, take_address(), "127.0.0.1:0", log, variables)
    lifeline = os.pipe()
    told: asyncio.Queue[tuple[str, str]] = asyncio.Queue(100)
    try:
        await child.start(lifeline[0])
        keeping = asyncio.create_task(keep(child, lifeline[0], lambda what, text: told.put_nowait((what, text))))
        try:
            yield KeptTalker(child, told)
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
    finally:
        await child.stop(5.0)
        for fd in lifeline:
            os.close(fd)


async def test_a_process_whose_python_stands_still_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own watchdog stands still too, and gRPC's threads keep its connections: nobody else would ever end it."""
    monkeypatch.setattr(processes, "PERIOD_S", 0.5)
    async with kept(tmp_path / "log") as server, asyncio.timeout(90):
        held = server.child.pid
        assert await server.described() == held
        os.kill(held, HOLD)
        assert await server.told.get() == ("lost", f"talker (pid {held}) did not answer for 3 s and was killed")
        what, _ = await server.told.get()
        assert what == "restarted"
        assert await server.described() == server.child.pid != held
        events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
        assert "thread.wedged" not in events and events.count("server.ready") == 2


async def test_a_process_that_is_stopped_while_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is continued soon is left alone."""
    monkeypatch.setattr(processes, "PERIOD_S", 0.2)
    async with kept(tmp_path / "log") as server, asyncio.timeout(90):
        for is_continued in (False, True):
            running = server.child.pid
            os.kill(running, signal.SIGKILL)
            assert (await server.told.get())[0] == "lost"
            await until(lambda running=running: server.child.pid != running)  # type: ignore[misc]
            os.kill(server.child.pid, signal.SIGSTOP)
            if is_continued:
                await asyncio.sleep(2 * processes.PERIOD_S)
                os.kill(server.child.pid, signal.SIGCONT)
            else:
                end = "talker was stopped by a signal for 1.2 s while it started and was killed"
                assert await server.told.get() == ("failed", end)
            assert (await server.told.get())[0] == "restarted"
            assert await server.described() == server.child.pid


@lengths.long_form("cli/test_keeper.py::test_a_keeper_that_was_held_up_itself_blames_nobody", unkept="busy cores end no process")
@pytest.mark.serial
async def test_a_busy_machine_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PERIOD_S", 0.5)
    async with kept(tmp_path / "log") as server:
        with busy_cores():
            await asyncio.sleep(QUESTIONS * processes.PERIOD_S)
            assert await server.described() == server.child.pid
        assert server.told.empty()


async def test_a_keeper_that_was_held_up_itself_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PERIOD_S", 0.25)
    async with kept(tmp_path / "log") as server:
        await asyncio.sleep(processes.PERIOD_S)
        time.sleep(2 * processes.MAX_UNANSWERED * processes.PERIOD_S)  # noqa: ASYNC251
        await asyncio.sleep(2 * processes.PERIOD_S)
        assert server.told.empty() and await server.described() == server.child.pid


@contextmanager
def starving(pid: int) -> Iterator[None]:
    """A process of a higher class has a core, the process `pid` runs on that core alone and so gets 5 % of it, all at once and once in a
    second. Skips the test without the right to do so."""
    if len(cores := os.sched_getaffinity(0)) == 1:
        pytest.skip("the test needs a core of its own")
    core = max(cores)
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{code}\nwhile True: pass"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as hog:
        try:
            assert hog.stdout is not None
            if not hog.stdout.readline():
                pytest.skip("no right to a higher class of processes")
            os.sched_setaffinity(0, cores - {core})
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), {core})
            yield
        finally:
            hog.kill()
            os.sched_setaffinity(0, cores)


@pytest.mark.serial
@pytest.mark.parametrize("max_excused", [processes.MAX_EXCUSED, 0])
async def test_a_starved_process_is_not_blamed(max_excused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be if nothing excused it."""
    monkeypatch.setattr(processes, "PERIOD_S", 0.1)
    monkeypatch.setattr(processes, "MAX_EXCUSED", max_excused)
    async with kept(tmp_path / "log") as server:
        with starving(server.child.pid):
            if max_excused:
                await asyncio.sleep(5.0)
                assert server.told.empty()
            else:
                async with asyncio.timeout(30):
                    assert (await server.told.get())[0] == "lost"
        if max_excused:
            assert await server.described() == server.child.pid


@pytest.mark.serial
@pytest.mark.parametrize(("number", "period_s", "max_s"), [(HOLD, 0.1, 3.0), (BURN, 1.0, 20.0), (signal.SIGSTOP, 0.1, 0.6)])
async def test_a_process_that_hangs_on_a_starved_machine_is_killed(
    number: int, period_s: float, max_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_s: it is killed after so long, or sooner. One that uses the CPU, or was stopped, is not excused at all."""
    monkeypatch.setattr(processes, "PERIOD_S", period_s)
    async with kept(tmp_path / "log") as server, asyncio.timeout(90):
        pid = server.child.pid
        os.kill(pid, number)
        with starving(pid):
            event, text = await server.told.get()
            assert event == "lost"
            silent = re.fullmatch(rf"talker \(pid {pid}\) did not answer for (\S+) s and was killed", text)
            assert silent is not None and float(silent[1]) <= max_s
        assert (await server.told.get())[0] == "restarted"
