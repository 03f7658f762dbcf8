"""A child process: its end comes to all who wait, in words; one that hangs is waited for only so long, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from helpers.processes import open_files, wait_end
from omnistage.host.child import ChildProcess, ConnectedChild, describe_end

SAYS = "import os, signal, sys\nos.write(int(sys.argv[1]), sys.argv[2].encode())\n"
STARTS_ANOTHER = """
import subprocess
other = subprocess.Popen(["sleep", "300"])
os.write(int(sys.argv[1]), b"%d\\n" % other.pid)
other.wait()
"""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() - before == set()


def saying(words: str, code: str = "") -> ConnectedChild:
    """A process that writes some words into its socket and then runs code."""
    return ConnectedChild(lambda fd: [sys.executable, "-c", SAYS + code, str(fd), words])


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("sys.exit(3)", "status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", f"signal {signal.SIGRTMIN + 3}"),
    ],
)
async def test_all_who_wait_are_told_of_the_end(code: str, end: str) -> None:
    with closing(saying("", code)) as child:
        one, other, on_thread = await asyncio.gather(child.wait_on_loop(), child.wait_on_loop(), asyncio.to_thread(child.wait))
        assert one == other == on_thread == child.wait(0) == await child.wait_on_loop()
        assert describe_end(one) == end


async def test_one_that_hangs_is_waited_for_only_so_long_and_ends_with_what_it_started() -> None:
    with closing(saying("", STARTS_ANOTHER)) as child:
        other = int(await child.first_line())
        os.kill(child.pid, signal.SIGSTOP)
        assert child.wait(0.01) is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await child.wait_on_loop()
    assert child.wait(0) == -signal.SIGKILL and wait_end(other, 30)


@pytest.mark.parametrize(("words", "lines", "first"), [("one\ntwo\nth", [b"one", b"two"], b"one\ntwo\nth"), ("o", [], b"o"), ("", [], b"")])
async def test_a_line_counts_when_it_is_whole(words: str, lines: list[bytes], first: bytes) -> None:
    with closing(saying(words)) as child:
        assert list(child.lines()) == lines
    with closing(saying(words)) as child:
        assert await child.first_line() == first


def test_a_connection_that_is_cut_ends_for_both(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(saying("ready\n", "sys.exit(len(os.read(int(sys.argv[1]), 1)))")) as child:
        lines = child.lines()
        assert next(lines) == b"ready"
        child.disconnect()
        assert (list(lines), child.wait(30)) == ([], 0)
    child.disconnect()


def test_a_program_that_is_not_there_is_an_error_and_leaves_nothing() -> None:
    with pytest.raises(FileNotFoundError):
        ChildProcess(["no-such-program"])
    with pytest.raises(FileNotFoundError):
        ConnectedChild(lambda fd: ["no-such-program"])
