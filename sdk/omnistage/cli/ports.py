"""Ports of the loopback address that are kept for the processes of a stack, so that everybody knows them before anybody listens."""

from __future__ import annotations

import socket


class Ports:
    """Addresses that the system gives to nobody else until `close`: a socket is bound to each, and never listens. A server that sets
    SO_REUSEADDR, as gRPC does, can listen there nevertheless, again and again."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self) -> str:
        """One more, as HOST:PORT. Raises OSError where there is no free port."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._held.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        host, port = held.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        """Give them back. Idempotent."""
        while self._held:
            self._held.pop().close()
