"""Starts fork servers: for the process of the tests, and for a fork server that starts further ones."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack


def start(programs: Sequence[str], path: str, variables: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a fork server that listens at a path, or at none if that is empty; returns the connection with which it ends, and it."""
    with ExitStack() as stack:
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = [stack.enter_context(theirs)]
        if path:
            passed.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            passed[1].bind(path)
            passed[1].listen()
        numbers = [one.fileno() for one in passed]
        command = [sys.executable, "-m", "helpers.forkserver", ",".join(map(str, numbers)), *programs]
        return connection, subprocess.Popen(command, pass_fds=numbers, env=variables)
