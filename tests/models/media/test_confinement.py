"""A process that has read a medium and been taken over by it can do nothing that others notice; and another user of this host, beside a
process that holds media and the one that decodes them, can read none of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
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
from omnistage.models.media.terms import FilmPreprocessing, MediaLimits

WAYS = """
import os, socket, sys
from omnistage.models.media.confinement import confine
ways = [
    lambda: open("/proc/version"), lambda: os.open("x", os.O_CREAT | os.O_WRONLY), lambda: os.listdir("/"), lambda: os.stat("/"),
    lambda: socket.socket(), lambda: os.fork(), lambda: os.execv(sys.executable, ["python"]), lambda: os.kill(os.getppid(), 0),
    lambda: os.unlink("x"), lambda: os.setuid(0), lambda: os.pidfd_open(os.getppid()), lambda: os.pipe(), lambda: os.memfd_create("x"),
]
assert confine()
for number, way in enumerate(ways):
    try:
        way()
    except PermissionError:
        continue
    print(number)
print("all tried")
"""

CALLS = """
import ctypes, errno, mmap, os, socket, sys
from omnistage.models.media import confinement
libc = ctypes.CDLL(None, use_errno=True)
ours, theirs = socket.socketpair()
channel, memory = ours.fileno(), mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
parent, write, code, high = os.getppid(), 3, 7, 1 << 32

def tried(name, number, *arguments):
    ctypes.set_errno(0)
    done = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(one) for one in arguments))
    if done != -1 or ctypes.get_errno() != errno.EACCES:
        print("not refused:", name, arguments, done, ctypes.get_errno())

let_through = {*confinement.CALLS, *(one.call for one in confinement.LIMITED)}
probes = {335, 336}  # which newer kernels take from a trampoline of their own only, filter or not, and end the process otherwise
assert confinement.confine()
for command in [*range(64), *range(1024, 1056), high + 8, 8 - high]:  # F_SETOWN is 8
    tried("fcntl", 72, channel, command, parent)
for command in (0x5452, 0x8901, 0x8902, 0x5401, 0x5412, 0x5451, 0x541B, high + 0x5452):  # FIOASYNC, FIOSETOWN, SIOCSPGRP, TIOCSTI ...
    tried("ioctl", 16, channel, command, at)
for name, number in {"sendmsg": 46, "sendto": 44, "sendmmsg": 307, "memfd": 319, "stat by name": 262, "ftruncate": 77}.items():
    tried(name, number, channel, at, 0, 0, 0, 0)
for flags in (0x22, 0x22 + high, 0x62):
    tried("mmap to be run", 9, 0, 4096, code, flags, -1, 0)
for flags in (0x21, 0x23, 1, 3, 0x21 + high):
    tried("mmap to be shared", 9, 0, 4096, write, flags, -1 if flags & 0x20 else channel, 0)
tried("mprotect to be run", 10, at, 4096, 5)
for advice in (12, 21, 100, 101, high + 100):
    tried("madvise", 28, at, 4096, advice)
for timer in (0, 1):
    tried("setitimer", 38, timer, at, 0)
for operation in (3, 4, 5, 6, 8, 11, 12, 13, 128 + 12, 256 + 11):
    tried("futex", 202, at, operation, 0, 0, at + 64, 0)
for number in range(600):
    for bit in (0, 0x40000000):  # of x32
        if number not in (probes if bit else probes | let_through):
            tried("call", bit | number, 0, 0, 0, 0, 0, 0)
print("all tried")
"""


@pytest.mark.parametrize("code", [WAYS, CALLS], ids=["files, sockets, processes and signals", "every command of every call"])
def test_the_kernel_refuses_what_reaches_beyond_the_process(code: str, tmp_path: Path) -> None:
    """The second program tries all commands of each call that has commands, and each call that is not on the list, also by its number in
    the x32 ABI."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert ran.stdout == "all tried\n"


TAKEN_OVER = """
import errno, json, mmap, os, socket, sys
from omnistage.models.media import child

def serve(channel, limits, *, confined):
    _, (file, result), _, _ = socket.recv_fds(channel, 100, 2)
    told = {"written": 0, "mapped": 0}
    block = bytes(1 << 20)
    try:
        while True:
            told["written"] += os.write(result, block)
    except OSError as error:
        told["write"] = errno.errorcode[error.errno]
    held = []
    try:
        while True:
            held.append(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            told["mapped"] += 64 << 20
    except OSError as error:
        told["map"] = errno.errorcode[error.errno]
    try:
        os.write(file, block)
    except OSError as error:
        told["the file"] = errno.errorcode[error.errno]
    os.write(channel.fileno(), json.dumps(told).encode())

child.serve = serve
child.main()
"""


def test_memory_is_bounded_by_addresses_and_the_one_result(tmp_path: Path) -> None:
    limits = MediaLimits(result_bytes=3 << 20, memory_bytes=700 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    result = os.memfd_create("result")
    medium = tmp_path / "medium"
    medium.write_bytes(b"a medium")
    file = os.open(medium, os.O_RDONLY)
    try:
        words = [str(theirs.fileno()), str(os.getpid()), json.dumps(asdict(limits))]
        with ours, theirs, subprocess.Popen([sys.executable, "-c", TAKEN_OVER, *words], pass_fds=(theirs.fileno(),)) as process:
            theirs.close()
            socket.send_fds(ours, [b"take"], [file, result])
            ours.settimeout(60)
            told = json.loads(ours.recv(1000))
            assert process.wait(60) == 0
        assert os.fstat(result).st_size == limits.result_bytes
    finally:
        os.close(file)
        os.close(result)
    assert told.pop("mapped") < limits.memory_bytes
    assert told == {"written": limits.result_bytes, "write": "EFBIG", "map": "ENOMEM", "the file": "EBADF"}
    assert medium.read_bytes() == b"a medium"


# Another user ---------------------------------------------------------------------------------------------------------------------------


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
