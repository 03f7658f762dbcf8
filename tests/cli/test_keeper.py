"""The keeper of a process of a stack starts it again when it has ended, and ends it when it hangs in a way that it cannot notice itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers import lengths
from helpers.busy import busy_cores
from helpers.hanging import ENDING, HOLD
from helpers.ports import take_address
from helpers.servers import stage_stub
from helpers.waiting import until
from omnistage.cli.stack import processes
from omnistage.cli.stack.processes import Child, Keeper
from omnistage.v1 import stage_pb2

QUESTIONS = processes.MAX_UNANSWERED + 2
"""That a sound process is asked: more than would end one that hangs."""


@dataclass
class KeptTalker:
    """A toy Talker with its keeper. told: what the keeper said."""

    child: Child
    told: asyncio.Queue[tuple[str, str]]

    async def described(self) -> int:
        """The pid that answers there."""
        async with stage_stub(self.child.address) as stub:
            return (await stub.Describe(stage_pb2.DescribeRequest(), timeout=60, wait_for_ready=True)).pid


@asynccontextmanager
async def kept(log: Path) -> AsyncIterator[KeptTalker]:
    words, variables = ["omnistage.talker", "--family", "toy"], {**os.environ, **ENDING}
    child = Child("talker", "helpers.hanging", words, take_address(), "127.0.0.1:0", log, variables)
    lifeline = os.pipe()
    told: asyncio.Queue[tuple[str, str]] = asyncio.Queue(100)
    try:
        await child.start(lifeline[0])
        keeping = asyncio.create_task(Keeper(child, lifeline[0], lambda what, text: told.put_nowait((what, text))).keep())
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


async def test_a_process_that_is_stopped_while_it_starts_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@lengths.long_form(
    "cli/test_keeper.py::test_a_keeper_that_was_held_up_itself_blames_nobody", unkept="a process is not ended where all cores are busy"
)
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
        assert server.told.empty()
        assert await server.described() == server.child.pid


def test_without_descriptors_it_says_that_it_cannot_be_started() -> None:
    """Whichever it is that cannot be had: a pipe, the log, or what Python needs for a process."""
    code = """
        import asyncio, os, resource, sys
        from pathlib import Path
        from omnistage.cli.stack.processes import Child
        from omnistage.client import StackError
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        def descriptors():
            return len(os.listdir("/proc/self/fd"))
        async def main():
            before = descriptors()
            for room in range(6):
                child = Child("talker", "omnistage.talker", [], "127.0.0.1:0", "127.0.0.1:0", Path(sys.argv[1]))
                lowest = os.dup(0)
                os.close(lowest)
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + room, hard))
                try:
                    await child.start(0)
                except StackError as error:
                    print(error.message)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await asyncio.sleep(0)
            assert descriptors() == before
        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), "/dev/null"], capture_output=True, text=True, timeout=60)
    told = "talker cannot be started: [Errno 24] Too many open files"
    assert [line.startswith(told) for line in done.stdout.splitlines()] == [True] * 6, done.stdout
    assert done.stderr == ""
