"""Programs that tests fork: as `python -m` would run them, with the same end, and only where that is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import forkserver
from helpers.command import STARTS, omnistage
from helpers.forkserver import ForkedProcess, Program, start
from helpers.processes import wait_end
from helpers.servers import ServerProcess, stage_flags


def program(*words: str, **variables: str) -> Program:
    return Program("omnistage.cli", words, {**forkserver.variables(), **variables}, (0, 1, 2))


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
        forkserver.pytest_runtest_setup()  # Of the next test.
        os.environ["LIBRARY"] = "2"
        assert forkserver.variables()["LIBRARY"] == "2", "what a test sets is"
        os.environ["LIBRARY"] = "1"
        assert "LIBRARY" not in forkserver.variables()
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
OTHERS = [{"PYTHONWARNINGS": "error"}, {"TMPDIR": "/"}]


@pytest.mark.parametrize(("variables", "forked"), [*((one, True) for one in SAME), *((one, False) for one in OTHERS)])
def test_the_variables_decide(variables: dict[str, str], forked: bool) -> None:
    with start(program("--version", **variables), STARTS) as process:
        assert isinstance(process, ForkedProcess) == forked
    assert process.returncode == 0


def test_where_libraries_have_threads_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_state", forkserver._State())
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    forkserver.pytest_configure()
    with start(program("--version"), STARTS) as process:
        assert not isinstance(process, ForkedProcess)


@pytest.mark.parametrize("words", [("--version",), ("ask", "--no-such-option"), ("pipelines",), ("ask", "-")])
def test_it_says_and_ends_as_a_python_of_its_own(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "omnistage.cli", *words]
    own = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    forked = omnistage(*words)
    assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr)


def test_a_program_that_does_not_end_is_given_up() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        omnistage("--version", timeout_s=0.0)
