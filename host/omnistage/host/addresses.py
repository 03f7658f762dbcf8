"""HOST:PORT as people type it: whether a text is one, in words, and whether a server can listen there; if not, which process does.

`dns:///NAME:PORT` stands for one replica at each address that the name has now. docker-compose gives a service's name one address per
container; Kubernetes gives a headless service's name one per ready pod."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omnistage.host.errors import StartError

_HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})", re.ASCII)
_EXAMPLE = "such as 127.0.0.1:50050"
MAX_PORT = 65535

CONNECT_LIMIT_S = 1.0
"""Seconds that a connection within this machine may take. It takes no time unless the listener's queue is full."""


def check_address(text: str) -> str:
    """The text, if it is HOST:PORT; an IPv6 address stands in brackets. Raises ValueError that says what is missing or too much."""
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r} {_fault(text)}")
    try:
        match["host"].encode("idna")
    except UnicodeError:
        raise ValueError(f"{text[:80]!r} names no possible host: between its dots stand 1 to 63 characters") from None
    check_port(int(match["port"]), text)
    return text


def check_port(port: int, address: str) -> None:
    """Raise ValueError for a port that no address can have. address: quoted in the error."""
    if port > MAX_PORT:
        raise ValueError(f"{address!r} has no possible port: a port is 0 to {MAX_PORT}")


def _fault(text: str) -> str:
    """The fault of a text that is not HOST:PORT, and what to write instead, in words."""
    scheme, has_scheme, rest = text.partition("://")
    if has_scheme:
        example = f"such as {rest}" if _HOST_PORT.fullmatch(rest) else _EXAMPLE
        return f"is a URL: leave {scheme}:// out, give HOST:PORT {example}"
    host, colon, port = text.rpartition(":")
    if text.isdecimal():
        return f"has no host: give HOST:PORT such as 127.0.0.1:{text}"
    if colon and not host:
        return f"has no host: give HOST:PORT {f'such as 127.0.0.1:{port}' if port.isdecimal() else _EXAMPLE}"
    if text.count(":") > 1 and "[" not in text:
        return "has more than one colon: an IPv6 address stands in brackets, such as [::1]:50050"
    if re.fullmatch(r"[A-Za-z0-9._-]+:?", text):
        return f"has no port: give HOST:PORT such as {text.rstrip(':')}:50050"
    return f"is not HOST:PORT, {_EXAMPLE}"


def network_of(host: str) -> str:
    """The name of the network whose addresses count as one host: an IPv4 address alone, or the network of 64 bits of an IPv6 address: one
    machine owns all addresses of such a network. A text that is no address is its own name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of a checked address, without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether all addresses of a host are loopback addresses; False for an unknown name. host: without brackets."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in infos)


def check_can_listen(address: str, option: str, *, is_reserved: bool = False) -> None:
    """Bind to a checked address for a moment. Raises StartError, which says why the server cannot listen, and names `option` as the one to
    change.

    is_reserved: another process of the same user has the port bound with SO_REUSEPORT and does not listen there. Then the system lets a
    second listener of that user bind too, so this function looks for a listener by connecting to it. Another process can still take the
    port between this check and the real bind; the check finds mistakes before minutes of loading."""
    host, port = host_and_port(address)
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise StartError(f"cannot listen on {address}: no host {host!r} is known here; choose another {option}") from None
    refusals = [_refusal(family, name, is_reserved) for family, _, _, _, name in candidates]
    # Some addresses of a name may not exist on this machine, such as ::1 without IPv6. One address without a refusal (0) is enough.
    error_number = errno.EADDRINUSE if errno.EADDRINUSE in refusals else min(refusals)
    if error_number:
        raise StartError(f"cannot listen on {address}: {_reason(error_number, host, port)}; choose another {option}")


def _refusal(family: socket.AddressFamily, name: tuple[object, ...], is_reserved: bool) -> int:
    """The error number (errno) that a server would get if it listened at the socket address `name`; 0 for none. is_reserved: as in
    `check_can_listen`."""
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        # Servers set this too, so that ports of connections that ended a minute ago count as free, but ports of listeners do not.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_reserved:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            tried.bind(name)
        except OSError as error:
            return error.errno or errno.EINVAL
    return errno.EADDRINUSE if is_reserved and _is_listened_to(family, name) else 0


def _is_listened_to(family: socket.AddressFamily, name: tuple[object, ...]) -> bool:
    """Whether a process of this machine listens at the socket address `name`, even if its queue of connections is full."""
    with socket.socket(family, socket.SOCK_STREAM) as caller:
        caller.settimeout(CONNECT_LIMIT_S)
        try:
            caller.connect(name)
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


def _reason(number: int, host: str, port: int) -> str:
    """The words for an error number (errno) of listening."""
    if number == errno.EADDRINUSE:
        return f"the port is taken by {listener(port)}"
    if number == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine"
    if number == errno.EACCES:
        return f"port {port} is for root only"
    return errno.errorcode.get(number, str(number))


LOOKUP_TIMEOUT_S = 2.0

_NAME = re.compile(r"dns:///(?P<host>[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,9}\.?):(?P<port>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Name:
    """A host name with a port that is the same at all its addresses."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"dns:///{self.host}:{self.port}"


Resolver = Callable[[Name], Awaitable[Collection[str]]]
"""The addresses, HOST:PORT, that a name has now. Raises OSError, for example TimeoutError, if the lookup fails."""


def check_replica_address(address: str) -> str:
    """Check the address of one replica or of several, and return it. Raises ValueError."""
    name = name_of(address)
    if name is not None:
        check_port(name.port, address)
        return address
    try:
        return check_address(address)
    except ValueError as error:
        raise ValueError(f"{error}; dns:///NAME:PORT stands for all addresses of a name") from None


def name_of(address: str) -> Name | None:
    """The name in a checked address, or None for a plain HOST:PORT."""
    match = _NAME.fullmatch(address)
    return Name(match["host"], int(match["port"])) if match else None


class SystemResolver:
    """Asks the system: hosts file and DNS. It uses at most one thread for a name, however long an answer takes."""

    def __init__(self) -> None:
        self._lookups: dict[Name, asyncio.Task[list[str]]] = {}

    async def __call__(self, name: Name) -> list[str]:
        """The addresses of a name, HOST:PORT. Raises OSError, also if the lookup takes too long. A lookup that takes too long goes on, and
        the next call waits for it, because a thread that waits for DNS cannot be stopped."""
        lookup = self._lookups.get(name) or asyncio.create_task(_look_up(name))
        self._lookups[name] = lookup
        await asyncio.wait({lookup}, timeout=LOOKUP_TIMEOUT_S)
        if not lookup.done():
            raise TimeoutError(f"no answer within {LOOKUP_TIMEOUT_S:g} s")
        if self._lookups.get(name) is lookup:  # Several calls may have waited for it; the first one forgets it.
            del self._lookups[name]
        return lookup.result()


async def _look_up(name: Name) -> list[str]:
    """The addresses of a name, HOST:PORT: its A records, or its AAAA records if it has none. With both, every replica would be listed
    twice."""
    infos = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    ipv4_addresses = [address for family, _, _, _, (address, *_) in infos if family == socket.AF_INET]
    if ipv4_addresses:
        return [f"{address}:{name.port}" for address in ipv4_addresses]
    return [f"[{address}]:{name.port}" for family, _, _, _, (address, *_) in infos if family == socket.AF_INET6]


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
                fields = line.split()  # Number 1 is the local address, 3 the state, 9 the inode.
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
