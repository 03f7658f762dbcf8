"""The things that the processes of a stack get from the launcher: bounds on their memory, because other programs run on the machine too; an
environment without keys of clients, and with a token that only they know; and ports, so that all addresses are known before any server
listens."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omnistage.client.routers import KEY_VARIABLE as KEY_VARIABLE
from omnistage.host.child import count_mapped
from omnistage.host.token import FILE_VARIABLE, GATEWAY_VARIABLE, VARIABLE, new_token, read_token

MEMORY_SHARE = 0.75
"""The part of a machine's memory that one server may map: a router of all of it, a stage of what it leaves when its model is loaded."""

ROUTER_BYTES = 12 << 30
"""Memory that a router may map at most. Headers of a few KiB that name each other on the wire become gigabytes before any check
(docs/security.md): a server that needs more than its bound is killed, alone, and is started again."""

MIN_ROUTER_BYTES = 2 << 30
"""A router gets no lower bound than this: it maps 1.1 GiB before its first request, most of which it never touches."""

MIN_ROOM_BYTES = 2 << 30
"""A stage may map so much more than when its model was loaded, however little the model leaves: what is mapped is mostly not touched."""

OOM_SCORE = 500
"""Written to /proc/PID/oom_score_adj. When memory runs out, the kernel kills a server, or its child that decodes, before a shell or a
desktop: the server is started again while others go on."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one server process. memory_bytes: the memory that it may map from its start on; None: all of it, until it serves.
    rest_share: from the moment when it serves, it may map more than it has mapped by then: this share of the machine's other memory; None:
    the bound stays as it was."""

    memory_bytes: int | None = None
    rest_share: float | None = None

    def put_on(self, pid: int) -> int | None:
        """Apply the bounds to a process that starts; nothing happens if it has ended. Returns its bound on memory. If this process may not
        set bounds, as in some sandboxes, there is none, and the kernel chooses by size what it kills."""
        with suppress(OSError):
            score = Path(f"/proc/{pid}/oom_score_adj")
            score.write_text(str(max(int(score.read_text()), OOM_SCORE)))
        return None if self.memory_bytes is None else _bound_memory(pid, self.memory_bytes)

    def put_on_serving(self, pid: int, machine_bytes: int) -> int | None:
        """Apply the bounds to a process that serves, on a machine with so much memory. Returns its bound on memory; None: as before."""
        if self.rest_share is None:
            return None
        with suppress(OSError):
            mapped_bytes = count_mapped(pid)
            if mapped_bytes < machine_bytes:  # A driver of a GPU maps more than there is.
                room_bytes = max(int(self.rest_share * (machine_bytes - mapped_bytes)), MIN_ROOM_BYTES)
                return _bound_memory(pid, mapped_bytes + room_bytes)
        return None


def _bound_memory(pid: int, memory_bytes: int) -> int | None:
    """Set the memory that a process may map. Returns it; None if it cannot be set."""
    with suppress(OSError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))
        return soft
    return None


def memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def router_bounds(machine_bytes: int) -> Bounds:
    """The bounds of a router, and of a gateway, on a machine with so much memory."""
    return Bounds(memory_bytes=max(min(ROUTER_BYTES, int(MEMORY_SHARE * machine_bytes)), MIN_ROUTER_BYTES))


def stage_bounds() -> Bounds:
    return Bounds(rest_share=MEMORY_SHARE)


def bound_text(memory_bytes: int | None) -> str:
    """The end of a message about a process that ended by itself: its bound on memory, which may be the cause; empty: it has none."""
    if memory_bytes is None:
        return ""
    return f"; it may map {memory_bytes / (1 << 30):.1f} GiB of memory, and ends so when it needs more"


def with_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the key of a client, and with a new token unless it has one. The token is not on the command line, because
    all users of a host can read that."""
    theirs = {name: value for name, value in environment.items() if name != KEY_VARIABLE}
    if theirs.get(VARIABLE) or theirs.get(FILE_VARIABLE):
        return theirs
    return {**theirs, VARIABLE: new_token().secret}


def gateway_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the gateway, which calls no stage: in place of the token of the stack it has its own. Raises StartError if the
    token cannot be read."""
    token = read_token(environment.get(FILE_VARIABLE, ""), environment)
    secrets = {VARIABLE, FILE_VARIABLE, GATEWAY_VARIABLE, f"{GATEWAY_VARIABLE}_FILE"}
    theirs = {name: value for name, value in environment.items() if name not in secrets}
    return {**theirs, GATEWAY_VARIABLE: token.for_gateway().secret} if token else theirs


class Ports:
    """Keeps addresses from other users of the host, whether or not a server listens there: a socket is bound to each, and never listens.
    They are kept until `close`, and until the end of every process that inherits `fds`.

    The socket has SO_REUSEPORT and no other option: the system lets a second socket share the port only if it has that option too and
    belongs to the same user. With SO_REUSEADDR any user could listen there while none of our servers does. An argument says to a server
    that its port is kept.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, host: str = "127.0.0.1") -> str:
        """Keep one more free port of a host; returns HOST:PORT. host: without brackets. Raises OSError if there is no free port."""
        family, kind, protocol, _, name = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        port_socket = socket.socket(family, kind, protocol)
        self._sockets.append(port_socket)
        port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port_socket.bind(name)
        return f"{f'[{host}]' if ':' in host else host}:{port_socket.getsockname()[1]}"

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors of all kept addresses, for processes that are to keep them too."""
        return tuple(port_socket.fileno() for port_socket in self._sockets)

    def close(self) -> None:
        """Give the addresses back; further calls do nothing."""
        while self._sockets:
            self._sockets.pop().close()
