"""`python -m helpers.squatter ADDRESS...`: another user of this host who tries to listen where servers of ours belong.

For every line on stdin one round of tries, each address with each choice of options; then one line on stdout, `took ADDRESS` for each that
worked, separated by blanks, or `refused`. The squatter keeps each address that it took."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from helpers.stranger import NOBODY

OPTIONS: Sequence[Sequence[int]] = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]


def main() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    taken: list[socket.socket] = []
    for _ in sys.stdin:
        told = [f"took {address}" for address in sys.argv[1:] for options in OPTIONS if _listens(address, options, taken)]
        print(*(told or ["refused"]), flush=True)


def _listens(address: str, options: Sequence[int], taken: list[socket.socket]) -> bool:
    host, _, port = address.rpartition(":")
    tried = socket.socket()
    for option in options:
        tried.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        tried.bind((host, int(port)))
        tried.listen()
    except OSError:
        tried.close()
        return False
    taken.append(tried)
    return True


class Squatter:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tries(self) -> str:
        """The line of one more round."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().rstrip("\n")


@contextmanager
def squatter(*addresses: str) -> Iterator[Squatter]:
    """Another user, who is ready to try. Needs root."""
    command = [sys.executable, "-m", "helpers.squatter", *addresses]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Squatter(process)
        finally:
            process.kill()


if __name__ == "__main__":
    main()
