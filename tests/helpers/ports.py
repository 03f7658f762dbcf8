"""Loopback addresses that are known before anybody listens there: for the allow-lists of stages that start side by side.

Each is bound, without listening, for the life of this process, so that the system gives it to nobody else. A server that sets
SO_REUSEADDR, as gRPC does, can listen there.
"""

from __future__ import annotations

import itertools
import socket

_COUNT = 64


def _bind() -> tuple[socket.socket, str]:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held, f"127.0.0.1:{held.getsockname()[1]}"


_HELD = [_bind() for _ in range(_COUNT)]
_NEXT = itertools.cycle(address for _, address in _HELD)

NEIGHBOURS = tuple(address for _, address in _HELD)
"""Where servers of tests listen: all that a stage of a test may dial unless it says otherwise."""


def take_address() -> str:
    """HOST:PORT of NEIGHBOURS; one that was taken comes again only after all others."""
    return next(_NEXT)
