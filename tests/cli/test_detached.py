"""`omnistage serve --detach`, `omnistage stop`, and what `serve` says when it is told to end while answers run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.output import COMMAND
from helpers.processes import ProcessFamily, StartedProcess, wait_end
from helpers.serving import ServeProcess, serving
from helpers.terminal import CTRL_C, Terminal
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.stack.served import Served, StackEnd, all_served, folder, register_stack
from omnistage.client import NotAvailableError, Omni
from omnistage.models.fetch.own_files import NEW


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of this test, and no others."""
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """A stack of one stage, because most tests here have nothing to do with a chain."""
    return toy_pipeline(tmp_path)


@pytest.fixture
def slow(tmp_path: Path) -> str:
    return toy_pipeline(tmp_path, interval_s=0.05)


@contextmanager
def answering(address: str) -> Iterator[StartedProcess[str]]:
    """A client in the middle of an answer that takes minutes."""
    command = [*COMMAND, "ask", "Hi", "--address", address, "--max-tokens", "4000", "--timeout", "600"]
    with StartedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asking:
        assert asking.stdout is not None and asking.stdout.read(1)
        try:
            yield asking
        finally:
            asking.kill()


def read_by_others(folder: Path) -> list[Path]:
    """The files in a folder that other users may read, or enter."""
    return [path for path in folder.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o077]


def test_a_stack_stays_when_its_command_ends(family: ProcessFamily, free_port: int, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port}"
    done = omnistage("serve", "toy", "--detach", "--address", address)
    assert done.returncode == 0, done.stderr
    assert f"serving on {address}" in done.stderr
    try:
        with Omni(address=address) as omni:
            assert omni.generate("Hi").text
        [served] = all_served()
        assert (served.address, served.pipeline) == (address, "toy") and os.getsid(served.pid) == served.pid
        assert {path.name for path in Path(served.log_folder).iterdir()} >= {"serve.log", "router.log", "thinker.log"}
        assert read_by_others(tmp_path / "state") == [] and read_by_others(Path(os.environ["TMPDIR"])) == []
        second = omnistage("serve", "toy", "--detach", "--address", address)
        assert second.returncode == 1 and f"cannot listen on {address}" in second.stderr
    finally:
        stopped = omnistage("stop")
    assert (stopped.returncode, stopped.stderr) == (0, f"ended {address}\n")
    assert all_served() == []
    assert family.pids() == []


def test_what_a_launcher_leaves_that_was_killed_before_it_was_registered_goes_with_the_next_one() -> None:
    old, young = (folder() / f"{NEW}{digit * 12}" for digit in "01")
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    with register_stack(Served("127.0.0.1:1", os.getpid(), "toy", "", 5.0)):
        assert [served.address for served in all_served()] == ["127.0.0.1:1"]
        assert not old.exists() and young.exists()
    assert list(folder().iterdir()) == [young]


def test_what_cannot_be_served_is_told_by_the_command(family: ProcessFamily, tmp_path: Path, slow: str) -> None:
    (tmp_path / "bad.yaml").write_text(Path(slow).read_text().replace("interval_s", "no_such"))
    for name, message in (
        ("nothing", "no pipeline 'nothing', and no folder or model of this name"),
        (str(tmp_path / "bad.yaml"), "no_such"),
    ):
        done = omnistage("serve", name, "--detach", "--address", "127.0.0.1:0")
        assert done.returncode == 1 and message in done.stderr
    assert family.pids() == []


@lengths.long_form("cli/test_serve.py::test_a_stack_that_others_reach_says_so", unkept="a detached stack warns too, on any terminal")
@lengths.drawn_cells(1, "size", [(80, 24), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_what_serve_warns_of_is_told_with_detach_too(family: ProcessFamily, quick: str, size: tuple[int, int]) -> None:
    """An open address, and a setting without an effect; and what can be asked is an address of this machine."""
    words = ("serve", quick, "--address", "0.0.0.0:0", "--no-http", "--gpu-memory-utilization", "thinker=0.5")
    in_front, detached = Terminal(*size), Terminal(*size)
    assert in_front.run(words, Keys(("ask it:", CTRL_C))) == 0
    assert detached.run((*words, "--detach")) == 0
    try:
        [served] = all_served()
        assert served.address.startswith("127.0.0.1:")
        for terminal in (in_front, detached):
            shown = "".join("".join(terminal.lines).split())  # Wherever a line is broken.
            for told in (
                "0.0.0.0:0 can be reached from other hosts: nothing is encrypted",
                "--gpu-memory-utilization 0.5 means nothing on a CPU",
                'omnistage ask "What is a kite?" --address 127.0.0.1:',
            ):
                assert told.replace(" ", "") in shown
        assert omnistage("status", "--address", served.address.replace("127.0.0.1", "0.0.0.0")).returncode == 0
    finally:
        stopped = omnistage("stop", served.address.replace("127.0.0.1", "0.0.0.0"))
    assert stopped.stderr == f"ended {served.address}\n"
    assert family.pids() == []


@lengths.long_form(
    "cli/test_detached.py::test_a_stack_stays_when_its_command_ends",
    "cli/test_detached.py::test_nothing_to_stop_is_told",
    unkept="of several stacks the one that is named ends",
)
def test_one_of_several_is_named(family: ProcessFamily, quick: str) -> None:
    for _ in range(2):
        assert omnistage("serve", quick, "--detach", "--address", "127.0.0.1:0").returncode == 0
    try:
        first, second = all_served()
        assert first.log_folder != second.log_folder
        done = omnistage("stop")
        assert done.returncode == 1
        assert f"several stacks of yours serve: {first.address}, {second.address}" in done.stderr
        assert omnistage("stop", "127.0.0.1:1").returncode == 1
        assert omnistage("stop", second.address.rpartition(":")[2]).returncode == 0
        assert all_served() == [first]
        assert omnistage("stop", first.address, "--all").returncode == 2
    finally:
        omnistage("stop", "--all", "--now")
    assert family.pids() == []


def test_nothing_to_stop_is_told() -> None:
    for words in (("stop",), ("stop", "--all")):
        done = omnistage(*words)
        assert done.returncode == 1 and "no stack of yours serves on this machine" in done.stderr


class Keys:
    """Pressed one after the other, each when a text is there. steps: those that are to come."""

    def __init__(self, *steps: tuple[str, bytes]) -> None:
        self.steps = list(steps)

    def __call__(self, terminal: Terminal) -> None:
        if self.steps and self.steps[0][0].encode() in terminal.written:
            terminal.press(self.steps.pop(0)[1])


def test_ctrl_c_says_what_it_waits_for_and_a_second_one_ends_it(family: ProcessFamily, slow: str, free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    terminal = Terminal(120)
    keys = Keys(("ask it:", CTRL_C), ("again ends it all now", CTRL_C))
    with ExitStack() as clients:

        def press(terminal: Terminal) -> None:
            if len(keys.steps) == 2 and b"ask it:" in terminal.written:
                clients.enter_context(answering(address))
            keys(terminal)

        assert terminal.run(("serve", slow, "--address", address, "--grace", "600"), press) == 130
    shown = " ".join(terminal.lines)
    assert "ending on SIGINT: 1 answer runs and gets up to 600 s; Ctrl-C again ends it all now" in shown and "ending now" in shown
    assert b"Traceback" not in terminal.written
    assert family.pids() == []


# The files -----------------------------------------------------------------------------------------------------------------------------

HELD = """
import os, sys
from omnistage.cli.stack.served import Served, register_stack
with register_stack(Served("127.0.0.1:5", os.getpid(), "toy", "", 1.0)):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_launcher_serves_nothing() -> None:
    with held(HELD) as launcher:
        [served] = all_served()
        assert served.pid == launcher.pid
        ending = StackEnd(served)
        launcher.kill()
        assert wait_end(launcher.pid, 30)
        assert ending.wait(30)
        ending.close()
        assert all_served() == []
        assert list(folder().iterdir()) == []
        launcher.wait()
    for lost in (served, Served("x:1", os.getppid(), "", "", 1)):  # This pid is another process by now.
        with pytest.raises(ProcessLookupError):
            StackEnd(lost)


HELD_OTHER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(sys.argv[2])
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(*command: str) -> Iterator[StartedProcess[str]]:
    """A Python program that holds a file of a stack until it is killed."""
    with StartedProcess([sys.executable, "-c", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def path_of_stack() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return str(folder() / f"{boot}-1.json")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"address": "x:1"}'])
def test_what_another_version_wrote_is_left_out(content: str) -> None:
    with held(HELD_OTHER, path_of_stack(), content):
        assert all_served() == []
        assert omnistage("stop").returncode == 1


def test_what_a_newer_version_says_beside_is_no_matter() -> None:
    content = json.dumps({"address": "x:1", "pid": 1, "pipeline": "toy", "log_folder": "", "grace_s": 2, "since": 7})
    with held(HELD_OTHER, path_of_stack(), content):
        assert all_served() == [Served("x:1", 1, "toy", "", 2.0)]


def test_a_folder_that_others_may_change_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(NotAvailableError, match="not a folder of yours alone"):
        all_served()
    with register_stack(Served("x:1", 1, "", "", 1)):  # It serves all the same.
        assert list((tmp_path / "run").iterdir()) == []


def test_a_full_disk_costs_only_the_file(tmp_path: Path) -> None:
    """It serves all the same."""
    code = (
        "import os, resource, signal, sys\nfrom omnistage.cli.stack.served import Served, all_served, register_stack\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with register_stack(Served('x:1', os.getpid(), 'toy', '', 1.0)):\n    print('serves', all_served())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "serves []\n"), done.stderr
    assert list(folder().iterdir()) == []


@lengths.rounds(1, 10)
def test_two_signals_at_once_end_it_without_a_word_of_crashes(family: ProcessFamily, quick: str, rounds: int) -> None:
    for _ in range(rounds):
        with serving(family, quick) as server:
            assert server.stderr is not None and server.line().startswith("serving on")
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGTERM)
            end = server.stderr.read()
            assert server.wait(60) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        assert "ending now" in end and "lost" not in end


def test_a_second_signal_ends_a_start_that_hangs(family: ProcessFamily, quick: str) -> None:
    """A stage that heeds no signal, as one in the middle of native code."""
    with ServeProcess(quick, "--grace", "600") as server:
        deadline = time.monotonic() + 60
        while not (stages := [pid for pid in family.pids() if b"omnistage.thinker" in Path(f"/proc/{pid}/cmdline").read_bytes()]):
            assert time.monotonic() < deadline
        os.kill(stages[0], signal.SIGSTOP)
        server.send_signal(signal.SIGINT)
        assert server.line() == "ending on SIGINT, before it serves\n"
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
    assert family.pids() == []


def test_stop_now_ends_one_that_was_started_in_the_background(family: ProcessFamily, slow: str) -> None:
    """A shell has a job in the background ignore SIGINT."""
    script = '"$@" >/dev/null 2>&1 &'
    command = ["sh", "-c", script, "sh", *COMMAND, "serve", slow, "--address", "127.0.0.1:0", "--grace", "600"]
    subprocess.run(command, timeout=60, check=True)
    deadline = time.monotonic() + 60
    while not (stacks := all_served()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with answering(stacks[0].address):
        assert omnistage("stop", "--now").returncode == 0
    assert all_served() == []
