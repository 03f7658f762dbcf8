"""Files and folders of one process: nobody's after a kill, and gone with the next one; never one that somebody has or wants."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from helpers.processes import open_files
from omnistage.models.fetch.own_files import LOCK, NEW, PREFIX, OwnFile, OwnFolder, sweep


def test_a_folder_that_is_kept_on_purpose_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
from omnistage.models.fetch.own_files import OwnFile, OwnFolder
where = Path(sys.argv[1])
for purpose in ("offload", "ranks", "partial"):
    (OwnFolder(purpose, where).path / "weights").write_text("x")
OwnFile(where, 0o600)
if sys.argv[2] == "in the middle":
    Path.rename = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
    OwnFile(where, 0o600) if sys.argv[3] == "file" else OwnFolder("offload", where)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("moment", ["later", "in the middle"])
def test_what_a_killed_process_leaves_goes_with_the_next_one(moment: str, what: str, tmp_path: Path) -> None:
    """The process may be killed at any moment. A file without a name may belong to a process that lives, so it stays for a minute."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment, what], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 4 + (moment == "in the middle")
    living = OwnFolder("logs", tmp_path)
    file = OwnFile(tmp_path, 0o600)
    unnamed = set(tmp_path.iterdir()) - {living.path, file.path}
    assert len(unnamed) == (moment == "in the middle")
    for path in unnamed:
        os.utime(path, (time.time() - 3600,) * 2)
    another = OwnFolder("logs", tmp_path)
    OwnFile(tmp_path, 0o600).remove()
    assert set(tmp_path.iterdir()) == {living.path, file.path, another.path}
    for folder in (living, another):
        folder.remove()
    file.remove()


def test_a_sweep_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    """A link to somewhere else, a folder whose lock is a link, a file with such a name, and a folder of another user."""
    token = "0123456789ab"
    names = ("elsewhere", f"{PREFIX}my-work", f"{PREFIX}strange-{token}", f"{PREFIX}orphan-{token}")
    elsewhere, alike, strange, orphan = folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
        (folder / LOCK).touch()
    (tmp_path / f"{PREFIX}link-{token}").symlink_to(elsewhere)
    linked = tmp_path / f"{PREFIX}linked-{token}"
    linked.mkdir()
    (linked / LOCK).symlink_to(elsewhere / LOCK)
    (tmp_path / f"{PREFIX}file-{token}").touch()
    if os.geteuid() == 0:
        os.chown(strange, 12345, 12345)
    sweep(tmp_path)
    assert not orphan.exists()
    assert all(path.exists() for path in (elsewhere / LOCK, linked, tmp_path / f"{PREFIX}file-{token}", alike / LOCK))
    assert strange.exists() == (os.geteuid() == 0)


def test_a_sweep_leaves_one_that_is_being_made_as_long_as_its_owner_lives(tmp_path: Path) -> None:
    """However long that takes: its owner may have been stopped, or the machine."""
    made = OwnFolder("logs", tmp_path)
    unnamed = made.path.rename(tmp_path / f"{NEW}0123456789ab")
    os.utime(unnamed, (0, 0))
    sweep(tmp_path)
    assert unnamed.exists()
    made.keep()
    (unnamed / LOCK).touch()
    os.utime(unnamed, (0, 0))
    sweep(tmp_path)
    assert not unnamed.exists()


def no_locks(file: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_where_nothing_can_be_locked_they_are_made_all_the_same_and_nobody_sweeps_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even who can lock something there later."""
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        made: list[OwnFolder | OwnFile] = [OwnFolder("offload", tmp_path), OwnFile(tmp_path, 0o600), OwnFolder("logs", tmp_path)]
        assert {path.name for path in tmp_path.iterdir()} == {one.path.name for one in made}
    sweep(tmp_path)
    for one in made:
        assert one.path.exists()
        one.remove()
    assert (list(tmp_path.iterdir()), open_files() - before) == ([], set())


@pytest.mark.parametrize("step", ["open", "rename"])
def test_nothing_is_left_of_one_that_cannot_be_made(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a name nor a descriptor."""

    def fail(*arguments: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = open_files()
    monkeypatch.setattr(os if step == "open" else Path, step, fail)
    for make in (lambda: OwnFolder("logs", tmp_path), lambda: OwnFile(tmp_path, 0o600)) * 3:
        with pytest.raises(OSError, match="Too many open files"):
            make()
    monkeypatch.undo()
    assert (list(tmp_path.iterdir()), open_files() - before) == ([], set())
