"""The folder of logs of a private stack: nobody's after a kill, and gone with the next call; never one that somebody has or wants."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers import lengths
from helpers.command import omnistage
from helpers.processes import ProcessFamily, StartedProcess
from helpers.toy_pipeline import toy_pipeline
from omnistage.models.fetch.disk import PREFIX


def words(folder: Path) -> tuple[str, ...]:
    """The words of a call with a stack of its own, of one stage."""
    return ("ask", "Hi", "--pipeline", toy_pipeline(folder), "--text-only")


def folders() -> list[Path]:
    return sorted(Path(os.environ["TMPDIR"]).glob(f"{PREFIX}*"))


@contextmanager
def answering(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A call with a stack of its own, stopped at its first word."""
    with StartedProcess[bytes](
        [sys.executable, "-m", "omnistage.cli", *words(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as call:
        assert call.stdout is not None
        assert call.stdout.read(1)
        call.send_signal(signal.SIGSTOP)
        yield call
        call.kill()


def ask(folder: Path, *more: str) -> None:
    done = omnistage(*words(folder), *more)
    assert done.returncode == 0, done.stderr


@lengths.long_form(
    "models/test_owned.py::test_what_a_killed_process_leaves_goes_with_the_next_one",
    unkept="the logs of a call are in a folder that goes with the next call",
)
def test_the_logs_of_a_call_stay_while_it_runs_and_go_with_the_next_one_when_it_was_killed(family: ProcessFamily, tmp_path: Path) -> None:
    with answering(tmp_path) as call:
        (mine,) = folders()
        ask(tmp_path)
        assert folders() == [mine]
        assert (mine / "router.log").is_file()
        call.send_signal(signal.SIGKILL)
        call.wait(30)
    assert family.wait_ended() == []
    assert folders() == [mine]
    assert (mine / "router.log").is_file()
    ask(tmp_path, "--verbose")  # It has no folder of its own.
    assert folders() == []
