"""The folder of logs of a private stack: nobody's after a kill, and gone with the next call; never one that somebody has or wants."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.command import omnistage
from helpers.processes import Family, Started
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.draft import Draft
from omnistage.models.common.own_folder import LOCK, PREFIX, OwnFolder, sweep


def words(folder: Path) -> tuple[str, ...]:
    """Of a call with a stack of its own, of one stage."""
    return ("ask", "Hi", "--pipeline", toy_pipeline(folder), "--text-only")


def folders() -> list[Path]:
    return sorted(Path(os.environ["TMPDIR"]).glob(f"{PREFIX}*"))


@contextmanager
def answering(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A call with a stack of its own, stopped at its first word."""
    with Started[bytes]([sys.executable, "-m", "omnistage.cli", *words(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as call:
        assert call.stdout is not None
        assert call.stdout.read(1)
        call.send_signal(signal.SIGSTOP)
        yield call
        call.kill()


def ask(folder: Path, *more: str) -> None:
    done = omnistage(*words(folder), *more)
    assert done.returncode == 0, done.stderr


def test_the_logs_of_a_call_stay_while_it_runs_and_go_with_the_next_one_when_it_was_killed(family: Family, tmp_path: Path) -> None:
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


def test_logs_that_are_kept_on_purpose_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept, removed = OwnFolder("logs"), OwnFolder("logs")
    for folder in (kept, removed):
        (folder.path / "talker.log").write_text("words")
    kept.keep()
    removed.remove()
    another = OwnFolder("logs")
    assert (kept.path / "talker.log").read_text() == "words"
    assert not removed.path.exists()
    assert sorted(path.name for path in another.path.iterdir()) == [LOCK]
    another.remove()


KILLED = """
import os, signal, sys
from pathlib import Path
from omnistage.cli.draft import Draft
from omnistage.models.common.own_folder import OwnFolder
where = Path(sys.argv[1])
for purpose in ("offload", "ranks", "partial"):
    (OwnFolder(purpose, where).path / "weights").write_text("x")
Draft(where, 0o600)
if sys.argv[2] == "in the middle":
    Path.rename = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
    Draft(where, 0o600) if sys.argv[3] == "draft" else OwnFolder("offload", where)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("what", ["draft", "folder"])
@pytest.mark.parametrize("moment", ["later", "in the middle"])
def test_what_a_killed_process_leaves_goes_with_the_next_one(moment: str, what: str, tmp_path: Path) -> None:
    """Whenever it was killed. What has no name yet may be of one that lives, so it stays for a minute."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment, what], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 4 + (moment == "in the middle")
    living = OwnFolder("logs", tmp_path)
    draft = Draft(tmp_path, 0o600)
    unnamed = set(tmp_path.iterdir()) - {living.path, draft.path}
    assert len(unnamed) == (moment == "in the middle")
    for path in unnamed:
        os.utime(path, (time.time() - 3600,) * 2)
    another = OwnFolder("logs", tmp_path)
    Draft(tmp_path, 0o600).discard()
    assert set(tmp_path.iterdir()) == {living.path, draft.path, another.path}
    for folder in (living, another):
        folder.remove()
    draft.discard()


def test_a_sweep_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    """A link to somewhere else, a folder whose lock is a link, a file with such a name, and a folder of another user."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    linked = tmp_path / f"{PREFIX}linked"
    linked.mkdir()
    (linked / LOCK).symlink_to(elsewhere / LOCK)
    (tmp_path / f"{PREFIX}file").touch()
    strange = tmp_path / f"{PREFIX}strange"
    strange.mkdir()
    (strange / LOCK).touch()
    if os.geteuid() == 0:
        os.chown(strange, 12345, 12345)
    orphan = tmp_path / f"{PREFIX}orphan"
    orphan.mkdir()
    (orphan / LOCK).touch()
    sweep(tmp_path)
    assert not orphan.exists()
    assert (elsewhere / LOCK).exists()
    assert linked.exists()
    assert (tmp_path / f"{PREFIX}file").exists()
    assert strange.exists() == (os.geteuid() == 0)
