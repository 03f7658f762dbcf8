"""Programs that tests fork: they run as `python -m` would run them, with the same end, and only if that is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import lengths, surroundings
from helpers import program as programs
from helpers.command import STARTS, omnistage
from helpers.processes import MARK, open_files, wait_end
from helpers.program import ForkedProcess, ForkServer, ForkServerLost, Program, start
from helpers.servers import ServerProcess, stage_flags


def program(*words: str, **variables: str) -> Program:
    return Program("omnistage.cli", words, {**surroundings.usual_variables(), **variables}, (0, 1, 2))


@lengths.long_form(
    "host/test_program.py::test_a_server_is_forked_and_ends_as_one_that_is_not",
    unkept="A server of a real model starts when it is forked with its imports done, again and again.",
)
def test_a_forked_model_has_what_its_imports_set(tmp_path: Path, omni_checkpoint: Path) -> None:
    """The same holds for the second one, for which nothing is imported any more."""
    flags = ["--checkpoint", str(omni_checkpoint), *stage_flags(family="qwen2_5_omni")]
    for _ in range(programs.SEEDS + 1):
        with ServerProcess("omnistage.code2wav", *flags, log_folder=tmp_path) as server:
            server.wait_ready()
            assert isinstance(server.process, ForkedProcess)


def test_a_server_is_forked_and_ends_as_one_that_is_not(tmp_path: Path) -> None:
    with ServerProcess("omnistage.thinker", *stage_flags(), log_folder=tmp_path) as server:
        server.wait_ready()
        assert isinstance(server.process, ForkedProcess)
        os.kill(server.pid, signal.SIGKILL)
        assert (server.wait(), server.process.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
        server.process.send_signal(signal.SIGTERM)


def test_what_libraries_set_in_this_process_is_not_handed_on(tmp_path: Path) -> None:
    os.environ["LIBRARY"] = "1"
    try:
        surroundings.pytest_runtest_setup()  # The setup of the next test.
        os.environ["LIBRARY"] = "2"
        assert surroundings.usual_variables()["LIBRARY"] == "2", "what a test sets is"
        os.environ["LIBRARY"] = "1"
        assert "LIBRARY" not in surroundings.usual_variables()
        with start(program("--version"), STARTS) as process:
            assert isinstance(process, ForkedProcess)
    finally:
        del os.environ["LIBRARY"]


def test_the_number_of_one_that_has_ended_is_nobody_elses_until_it_is_waited_for() -> None:
    with start(program("--version"), STARTS) as process:
        assert wait_end(process.pid, 60)
        os.kill(process.pid, 0)
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


SAME: list[dict[str, str]] = [{}, {"COLUMNS": "30"}, {"OMNISTAGE_SERVE_GRACE": "1"}]
OTHERS = [{"PYTHONWARNINGS": "error"}, {"TMPDIR": "/"}, {"PYTHONPATH": "/of/another/version"}, {MARK: "family"}]


@pytest.mark.parametrize(("variables", "forked"), [*((one, True) for one in SAME), *((one, False) for one in OTHERS)])
def test_the_variables_decide(variables: dict[str, str], forked: bool) -> None:
    with start(program("--version", **variables), STARTS) as process:
        assert isinstance(process, ForkedProcess) == forked
    assert process.returncode == 0


def test_what_a_test_changes_of_this_process_its_programs_have_too() -> None:
    before = os.umask(0o077)
    try:
        with start(program("--version"), STARTS) as process:
            assert not isinstance(process, ForkedProcess)
    finally:
        os.umask(before)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ForkServer]:
    """The fork server that starts the shared ones of a run; this process has no other ones."""
    monkeypatch.setattr(programs, "_servers", {})
    root = programs.begin((), surroundings.usual_variables(), str(tmp_path / "forks"))
    monkeypatch.setattr(surroundings, "_ours", replace(surroundings._ours, shared_path=str(tmp_path / "forks")))
    yield root
    root.close()


def test_a_fork_server_that_is_lost_costs_no_later_program(root: ForkServer) -> None:
    for _ in range(2):  # The shared one is lost, then the one of this process.
        assert omnistage("--version").returncode == 0
        own = {server._process.pid for server in programs._servers.values() if server._process}
        for pid in own or children(root):
            os.kill(pid, signal.SIGKILL)
            assert wait_end(pid, 10)
        assert omnistage("--version").returncode == 0, "by a Python of its own"
    with start(program("--version"), STARTS) as process:
        assert isinstance(process, ForkedProcess)
    assert omnistage("serve", "--family").returncode == 2, "words that the fork server looks for and does not find"


def test_a_worker_that_finds_a_lost_fork_server_starts_its_own(root: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert omnistage("--version").returncode == 0
    for pid in children(root):
        os.kill(pid, signal.SIGKILL)
        assert wait_end(pid, 10)
    monkeypatch.setattr(programs, "_servers", {})  # Those of the next worker.
    with start(program("--version"), STARTS) as process:
        assert isinstance(process, ForkedProcess), "the root started another one"
    assert root._process is not None
    root._process.kill()
    root._process.wait()
    monkeypatch.setattr(programs, "_servers", {})
    with start(program("--version"), STARTS) as process:
        assert isinstance(process, ForkedProcess), "by a fork server of its own"


def test_one_program_that_cannot_be_imported_ends_no_other(root: ForkServer, tmp_path: Path) -> None:
    server = root.share(STARTS, 0)
    with server.fork(program("--version")) as other, pytest.raises(ForkServerLost, match="ModuleNotFoundError"):
        server.fork(replace(program("--version"), imports=["no.such.module"]))
    assert other.returncode == 0
    assert server.reap(other.pid) == 0, "who was interrupted before the answer asks again"
    server.close()


def test_all_workers_of_a_run_have_the_same_fork_server(root: ForkServer, tmp_path: Path) -> None:
    workers = [programs.connect(str(tmp_path / "forks")) for _ in range(2)]
    first, second = (worker.share(STARTS, 0) for worker in workers)
    for worker in workers:
        worker.close()
    assert len(children(root)) == 1
    with first.fork(program("--version")) as one:
        first_parent = parent(one.pid)
    first.close()
    with second.fork(program("--version")) as other:
        assert parent(other.pid) == first_parent
    assert (one.returncode, other.returncode) == (0, 0)
    second.close()


def test_a_forked_program_has_no_file_of_its_fork_server(root: ForkServer, tmp_path: Path) -> None:
    with ServerProcess("omnistage.thinker", *stage_flags(), log_folder=tmp_path) as server:
        server.wait_ready()
        assert isinstance(server.process, ForkedProcess)
        (fork_server,) = children(root)
        theirs = {target for _, target in open_files(fork_server) if target.startswith("socket:")}
        targets = {target for _, target in open_files(server.pid)}
    assert len(theirs) >= 3, "a connection to the root, one to this process, and the listener"
    assert not theirs & targets and not [target for target in targets if "memfd" in target]


def test_workers_in_other_surroundings_start_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_ours", replace(surroundings._ours, shared_path=""))
    here = surroundings.as_begun()
    before = os.umask(0o077)
    try:
        surroundings.set_shared_path("forks", here)
        assert surroundings.shared_path() == ""
    finally:
        os.umask(before)
    surroundings.set_shared_path("forks", here)
    assert surroundings.shared_path() == "forks"


def children(root: ForkServer) -> list[int]:
    """The fork servers that another one has started."""
    assert root._process is not None
    pid = root._process.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_process_with_many_open_files_can_wait_for_its_end() -> None:
    with ExitStack() as files:
        for _ in range(1100):
            files.enter_context(Path(os.devnull).open("rb"))
        assert omnistage("--version").returncode == 0


def test_where_libraries_have_threads_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_ours", surroundings._Surroundings())
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    surroundings.pytest_configure()
    with start(program("--version"), STARTS) as process:
        assert not isinstance(process, ForkedProcess)


@lengths.drawn_cells(2, "words", [("--version",), ("ask", "--no-such-option"), ("pipelines",), ("ask", "-")])
def test_it_says_and_ends_as_a_python_of_its_own(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "omnistage.cli", *words]
    own = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    forked = omnistage(*words)
    assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr)


def test_a_program_that_does_not_end_is_given_up() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        omnistage("--version", timeout_s=0.0)
