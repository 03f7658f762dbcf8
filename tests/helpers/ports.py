"""Loopback addresses that are known before anybody listens there: for the allow-lists of stages that start side by side."""

from __future__ import annotations

import atexit
import itertools
import socket

_COUNT = 64

_HELD: list[socket.socket] = []
"""For the life of this process: a socket is bound to each, and never listens. SO_REUSEADDR lets any server listen there nevertheless."""


def _hold() -> str:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    _HELD.append(held)
    atexit.register(held.close)  # Else each one is warned of, behind pytest's closing line.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    host, port = held.getsockname()
    return f"{host}:{port}"


NEIGHBOURS = tuple(_hold() for _ in range(_COUNT))
"""Where servers of tests listen: all that a stage of a test may dial unless it says otherwise."""

_NEXT = itertools.cycle(NEIGHBOURS)


def take_address() -> str:
    """HOST:PORT of NEIGHBOURS where nobody listens; one that was taken comes again only after all others. Servers of a whole session of
    tests keep theirs for longer than that."""
    return next(address for address in itertools.islice(_NEXT, _COUNT) if _is_free(address))


def _is_free(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, int(port)))
        except OSError:
            return False
    return True
