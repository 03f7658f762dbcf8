"""Keeps ports for the processes of a stack, so that all addresses are known before any server listens."""

from __future__ import annotations

import socket


class Ports:
    """Keeps addresses from other users of the host, whether or not a server listens there: a socket is bound to each, and never listens.
    They are kept until `close`, and until the end of every process that inherits `fds`.

    The socket has SO_REUSEPORT and no other option: the system lets a second socket share the port only if it has that option too and
    belongs to the same user. With SO_REUSEADDR any user could listen there while none of our servers does. An argument says to a server
    that its port is kept.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, host: str = "127.0.0.1") -> str:
        """Keep one more free port of a host; returns HOST:PORT. host: without brackets. Raises OSError if there is no free port."""
        family, kind, protocol, _, name = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        port_socket = socket.socket(family, kind, protocol)
        self._held.append(port_socket)
        port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port_socket.bind(name)
        return f"{f'[{host}]' if ':' in host else host}:{port_socket.getsockname()[1]}"

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors of all kept addresses, for processes that are to keep them too."""
        return tuple(port_socket.fileno() for port_socket in self._held)

    def close(self) -> None:
        """Give the addresses back; further calls do nothing."""
        while self._held:
            self._held.pop().close()
