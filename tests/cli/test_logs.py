"""`omnistage logs`: what it prints of a stack that serves, and of files of every kind; and the times in the launcher's own log."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.output import COMMAND, refusal
from helpers.processes import ProcessFamily, StartedProcess
from helpers.serving import TIME
from helpers.terminal import terminal_after
from omnistage.cli.show.logs import MAX_LINE_BYTES, LogFile
from omnistage.cli.stack.served import Served, register_stack
from omnistage.client import AsyncOmni
from omnistage.models.fetch.own_files import OwnFolder

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks and logs of this test, and no others."""
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def event(second: int, name: str, **fields: Any) -> str:
    return json.dumps({**fields, "event": name, "level": "info", "timestamp": f"2026-03-01T12:00:{second:02}.000000Z"})


def folder_of(place: Path, **files: Iterable[str]) -> Path:
    """A folder with these logs."""
    (place / "logs").mkdir()
    for process, lines in files.items():
        (place / "logs" / f"{process.replace('_', '-')}.log").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return place / "logs"


def printed(*words: str | Path) -> list[str]:
    done = omnistage("logs", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


# A stack that serves -------------------------------------------------------------------------------------------------------------------


async def test_the_logs_of_a_stack_tell_a_loss_with_its_time_and_all_about_one_request(family: ProcessFamily) -> None:
    """The request is known by the error of a command. A command that follows ends with the stack."""
    assert omnistage("serve", "toy", "--detach", "--address", "127.0.0.1:0").returncode == 0
    try:
        address = refusal("stop", "127.0.0.1:1")[1].removeprefix("hint: There are: ").removesuffix(".")
        done = omnistage("ask", "Hi", "--voice", "nobody", "--address", address)
        asked = done.stderr.splitlines()[-1].removeprefix("request: ")
        shown = printed("--request", asked)
        assert {line.split()[0] for line in shown} == {"router", "thinker", "talker"}, "stages know the session alone"
        [line] = [line for line in shown if line.startswith("router ")]
        assert "answer.done" in line and f"request_id={asked}" in line and "reason=BAD_REQUEST field=talker.voice" in line
        status = json.loads(omnistage("status", "--address", address, "--json").stdout)
        assert Path(status["logs"]).parent == Path(os.environ["OMNISTAGE_STATE"]) / "logs"
        async with AsyncOmni(address=address) as omni:
            [thinker] = [replica for replica in await omni.replicas() if replica.stage == "thinker"]
        command = [*COMMAND, "logs", "serve", "--follow", "--lines", "1"]
        with StartedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None and following.stderr is not None
            assert "serving on " + address in following.stdout.readline()
            os.kill(thinker.pid, signal.SIGKILL)
            lost, restarted = (following.stdout.readline().removeprefix("serve ") for _ in range(2))
            assert TIME.sub("", lost) == f"lost thinker (pid {thinker.pid}) ended with signal SIGKILL\n" and TIME.match(lost)
            assert TIME.match(restarted) and "restarted thinker" in restarted
            assert omnistage("stop").returncode == 0
            assert "ending on SIGTERM" in following.stdout.read() and following.stderr.read() == "the stack has ended\n"
            assert following.wait(60) == 0
    finally:
        omnistage("stop", "--all")
    done = omnistage("logs", "router", "-n", "1")
    assert done.stderr == f"nothing serves; these logs were kept: {status['logs']}\n" and "server.stopped" in done.stdout
    assert family.pids() == []


def test_where_there_are_no_logs_one_sentence_says_so(tmp_path: Path) -> None:
    assert refusal("logs") == ["error: no stack of yours serves on this machine"]
    assert refusal("logs", "--log-dir", "/no/such")[0] == "error: --log-dir /no/such: No such file or directory"
    with register_stack(Served("127.0.0.1:1", os.getpid(), "toy", "", 5.0)):
        [line] = refusal("logs")
        assert "127.0.0.1:1 write to the output of their launcher" in line and str(os.getpid()) in line
    [line, hint] = refusal("logs", "talkre", "--log-dir", folder_of(tmp_path, talker=[], router=[]))
    assert line.endswith("; did you mean talker?") and hint == "hint: There are: router, talker."
    assert refusal("logs", "--since", "soon", code=2)[-1].endswith("a time such as 2026-03-01T12:00:00Z")


def test_a_folder_that_a_living_stack_still_owns_is_not_what_was_kept(tmp_path: Path) -> None:
    with OwnFolder("logs", tmp_path) as living:
        (living.path / "router.log").write_text("living\n")
        assert refusal("logs") == ["error: no stack of yours serves on this machine"]
        living.keep()
        assert omnistage("logs").stdout == "router living\n"


# Lines ---------------------------------------------------------------------------------------------------------------------------------


def test_lines_of_all_processes_stand_in_the_order_of_their_times(tmp_path: Path) -> None:
    """A line without a time stays behind the one before it, and a time of whole seconds before the fractions of its second."""
    logs = folder_of(
        tmp_path,
        router=[event(1, "a"), event(5, "e")],
        talker_0=["Traceback", event(2, "b"), "  of b", event(4, "d")],
        serve=["2026-03-01T12:00:04Z lost talker-0 (pid 1)"],
    )
    shown = [line.split() for line in printed("--log-dir", logs)]
    assert [(words[0], words[-1]) for words in shown] == [
        ("talker-0", "Traceback"),
        ("router", "a"),
        ("talker-0", "b"),
        ("talker-0", "b"),
        ("serve", "1)"),
        ("talker-0", "d"),
        ("router", "e"),
    ]
    assert [json.loads(line)["process"] for line in printed("--log-dir", logs, "--json")] == [words[0] for words in shown]
    assert printed("--log-dir", logs, "-n", "2") == printed("--log-dir", logs)[-2:]
    assert printed("--log-dir", logs, "--since", "2026-03-01T12:00:05Z") == printed("--log-dir", logs)[-1:]
    assert printed("--log-dir", logs, "-n", "0") == []


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("talker", ["smol-talker-1", "talker-0", "talker-1"]),
        ("talker-1", ["smol-talker-1", "talker-1"]),
        ("smol-talker", ["smol-talker-1"]),
        ("router", ["router"]),
    ],
)
def test_a_stage_names_all_its_replicas(tmp_path: Path, name: str, processes: list[str]) -> None:
    names = ("router", "talker_0", "talker_1", "smol_talker_1", "retalker")
    logs = folder_of(tmp_path, **{one: [event(1, "x")] for one in names})
    assert sorted({line.split()[0] for line in printed(name, "--log-dir", logs)}) == processes


def test_a_request_is_found_by_its_whole_name_and_by_its_session(tmp_path: Path) -> None:
    logs = folder_of(
        tmp_path,
        router=[event(3, "answer.done", request_id="r-1", session_id=SECRET), event(4, "answer.done", request_id="r-10", session_id="f")],
        thinker=[event(1, "session.ended", session_id=SECRET), event(2, "session.ended", session_id="f")],
        gateway=[event(5, "http.done", request_id="r-1"), event(6, "answer.done", request_id="r-1-0"), event(7, "http.done", path='"r-2"')],
    )
    seconds = [line.split(":")[2][:2] for line in printed("--log-dir", logs, "--request", "r-1")]
    assert seconds == ["01", "03", "05", "06"]
    assert len(printed("--log-dir", logs, "--request", SECRET)) == 2
    assert len(printed("thinker", "--log-dir", logs, "--request", "r-1")) == 1, "the router's log says which session it is"
    for name in ("r-", ".*"):
        result = omnistage("logs", "--log-dir", logs, "--request", name)
        assert result.returncode == 1 and result.stdout == "" and f"no line of these logs is about {name}" in result.stderr


def test_a_traceback_has_a_line_for_each_of_its_lines_and_steers_no_terminal(tmp_path: Path) -> None:
    logs = folder_of(tmp_path, router=[event(1, "request.bug", exception="Trace\n  it", what="\x1b[2J[bold]"), "\x1b[2J\u202eplain"])
    first, *rest = printed("--log-dir", logs)
    assert first == 'router 2026-03-01T12:00:01.000000Z info     request.bug what="\\u001b[2J[bold]"'
    assert rest == ["router Trace", "router   it", "router \x1b[2J\u202eplain"]
    shown = terminal_after("logs", "--log-dir", str(logs), size=(120, 24))
    assert b"\x1b[2J" not in shown.written and any(r"\x1b[2J\u202eplain" in line for line in shown.lines)


# Files ---------------------------------------------------------------------------------------------------------------------------------


@lengths.rounds(50, 2000)
def test_the_last_lines_of_a_file_are_those_that_a_reader_of_the_whole_finds(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "x.log"
    for _ in range(rounds):
        texts = [b"x" * random.choice([0, 1, 600, 70_000, 140_000]) for _ in range(random.randrange(6))]
        data = b"\n".join(texts) + random.choice([b"", b"\n"])
        path.write_bytes(data)
        lines = data.split(b"\n")[: None if not data.endswith(b"\n") else -1] if data else []
        wanted = random.randrange(8)
        file = LogFile(path)
        assert file.seek_last(wanted) == min(wanted, len(lines))
        read = [line.text for line in file.read(is_whole=True)]
        expected = lines[len(lines) - min(wanted, len(lines)) :]
        assert [text.removesuffix(b" ...") for text in read] == [text[:MAX_LINE_BYTES] for text in expected]
        assert [text.endswith(b" ...") for text in read] == [len(text) >= MAX_LINE_BYTES for text in expected]


def test_a_file_that_grows_is_cut_or_is_replaced_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = LogFile(path)

    def read() -> list[bytes]:
        return [line.text for line in file.read(is_whole=False)]

    assert read() == []
    path.write_bytes(b"one\ntw")
    assert read() == [b"one"]
    with path.open("ab") as growing:
        growing.write(b"o\n")
    assert read() == [b"two"] and read() == []
    with path.open("r+b") as cut:  # As logrotate does it with copytruncate.
        cut.truncate(0)
    assert read() == []
    path.write_bytes(b"a\n")
    assert read() == [b"a"]
    path.rename(tmp_path / "x.1")
    path.write_bytes(b"new and longer\n")
    assert read() == [b"new and longer"]
    path.unlink()
    assert read() == []


def test_a_large_log_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    with path.open("w") as file:
        for number in range(40_000):
            file.write(event(number % 60, "answer.done", request_id=f"r-{number}", session_id=f"{number:032x}", rest="x" * 300) + "\n")
    size = path.stat().st_size
    tracemalloc.start()
    try:
        count = sum(1 for _ in LogFile(path).read(is_whole=True))
        assert LogFile(path).seek_last(100) == 100 and count == 40_000
        assert tracemalloc.get_traced_memory()[1] < size / 20
    finally:
        tracemalloc.stop()
    assert len(printed("--log-dir", tmp_path, "--request", "r-39999")) == 1
