"""Programs that tests fork: they run as `python -m` would run them, with the same end, and only if that is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers import lengths, surroundings
from helpers import program as programs
from helpers.command import STARTS, omnistage
from helpers.processes import MARK, wait_end
from helpers.program import ForkedProcess, Program, start
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
        assert server.wait() == -signal.SIGKILL
        assert server.process.poll() == -signal.SIGKILL
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


def test_a_fork_server_that_is_lost_costs_no_later_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_servers", {})  # Not the fork servers of the other tests.
    for _ in range(programs.SEEDS):
        assert omnistage("--version").returncode == 0
    for server in programs._servers.values():
        server._process.kill()
        server._process.wait()
    for _ in range(2 * programs.SEEDS):
        assert omnistage("--version").returncode == 0
    with start(program("--version"), STARTS) as process:
        assert isinstance(process, ForkedProcess)
    assert omnistage("serve", "--family").returncode == 2, "words that the fork server looks for and does not find"


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
