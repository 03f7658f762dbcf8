"""Another user of this host, beside a process that holds media and the one that decodes them: he can read none of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import media_files
from helpers.stranger import NOBODY
from helpers.waiting import until
from omnistage.connector.arena import Arena
from omnistage.models.conversation import Streamed
from omnistage.models.interface import Piece
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.spool import Spool
from omnistage.models.media.terms import FilmPreprocessing

LOOK = """
import os, sys
from pathlib import Path
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
spool, arena, *pids = sys.argv[1:]
places = [place for pid in pids for place in (Path("/proc", pid, "fd"), Path("/proc", pid, "map_files"))] + [Path(spool)]
files = [Path("/proc", pid, name) for pid in pids for name in ("mem", "environ", "maps")]
files += [Path("/proc", pid, "fd", str(number)) for pid in pids for number in range(256)]
files += Path("/dev/shm").glob(f"omnistage-{{arena}}-*")
for place in places:
    try:
        print("listed", os.listdir(place))
    except PermissionError:
        pass
for file in files:
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try:
            print("opened", file, os.open(file, flags))
        except PermissionError:
            pass
for pid in pids:
    try:
        print("signalled", pid, os.kill(int(pid), 0))
    except PermissionError:
        pass
print("looked at", len(places) + len(files))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Which everybody may use, as /tmp."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o1777)
        yield Path(made)


async def test_another_user_reads_no_medium(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that was put aside, nor one that is decoded, nor what comes out, nor tensors; whatever the umask is."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    umask = os.umask(0)
    decoder, arena = MediaDecoder(), Arena.create(max_bytes=8 << 20, segment_bytes=4 << 20)
    assert arena is not None
    try:
        arena.allocate(40_000)
        async with Spool().files([Streamed("media0", "video/mp4")], lambda _: 1 << 20) as files:
            await files.take(Piece("media0", 0, False, b"a film"))
            await decoder.picture(media_files.picture(1))
            (pid,) = decoder.pids
            film = media_files.film(4, 250, rate_hz=10)
            work = asyncio.create_task(decoder.film(film, FilmPreprocessing(fps=10, min_pixels=700 * 784, max_pixels=700 * 784)))
            held = Path(f"/proc/{pid}/fd")
            await until(lambda: sum("memfd" in str(one.readlink()) for one in held.iterdir()) == 2)  # The film, and what is made of it.
            os.kill(pid, signal.SIGSTOP)
            command = [sys.executable, "-c", LOOK.format(nobody=NOBODY), str(folder), arena.uuid.hex(), str(os.getpid()), str(pid)]
            told = (await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)).stdout
            os.kill(pid, signal.SIGCONT)
            work.cancel()
            await asyncio.wait({work})
    finally:
        os.umask(umask)
        arena.close()
        await decoder.close()
    *read, last = told.splitlines()
    assert last == f"looked at {5 + 2 * (3 + 256) + 2}"
    assert read == ["listed []"]  # The folder: what was put aside has no name.
