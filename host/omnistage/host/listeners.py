"""Finds the process that listens on a port of this machine, as far as the kernel lets this user see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"
MAX_COMMAND = 60
"""Largest number of characters of a command line that are shown."""


def listener(port: int) -> str:
    """The program that listens on a port, with its pid, in words; "another program" if the kernel does not show it, for example because the
    process belongs to another user."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and not sockets.isdisjoint(_open_files(process)):
            return f"{_command(process)} (pid {process.name})"
    return "another program"


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port. The format of the table: proc_net_tcp.txt of the kernel."""
    for table in _TABLES:
        with suppress(OSError):  # no IPv6, or no proc of this network
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _open_files(process: Path) -> Iterator[str]:
    """The targets of a process's descriptors, such as socket:[1234]; none if this user may not see them."""
    with suppress(OSError):  # of another user, or it ended meanwhile
        for file in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(file.readlink())


def _command(process: Path) -> str:
    """The name of a process: `python -m MODULE` without further words; for other programs the beginning of the command line."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return "another program"
    if "-m" in words[:-1]:
        return f"python -m {words[words.index('-m') + 1]}"
    return " ".join(words)[:MAX_COMMAND] or "another program"
