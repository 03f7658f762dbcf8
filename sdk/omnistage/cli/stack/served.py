"""This user's stacks that serve on this machine, and the lines that tell of one. Each has a file, which its launcher locks for as long as
it lives.

The kernel releases the lock when the launcher ends, in whatever way. So a file that can be locked belongs to no stack any more, and is
removed."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from omnistage.cli.console import Notices
from omnistage.cli.places import state_folder
from omnistage.cli.stack.layout import Layout, flag, reachable_address
from omnistage.client import connection
from omnistage.client.errors import NotAvailableError, RequestError
from omnistage.host.addresses import host_and_port, is_loopback
from omnistage.host.child import can_read
from omnistage.models.fetch.own_files import OwnFile, is_owned
from omnistage.models.options import GPU_MEMORY

SUFFIX = ".json"

LONGEST_S = 86400.0
"""The longest wait for the end of a stack, in seconds, also if its grace is longer."""


@dataclass(frozen=True, slots=True)
class Served:
    """One stack that serves. address: HOST:PORT by which this machine reaches its router. pid: of its launcher. pipeline: names of its
    pipelines, for people. log_folder: of its processes' output; empty: they write to the launcher's output. grace_s: seconds that running
    answers get at the end. http: HOST:PORT of its gateway; empty: it has none. idle_limit_s: it ends by itself after this many seconds
    without a request; 0: never."""

    address: str
    pid: int
    pipeline: str
    log_folder: str
    grace_s: float
    http: str = ""
    idle_limit_s: float = 0.0


def folder() -> Path:
    """This user's folder for the stacks that serve. Raises NotAvailableError if another user may change it."""
    path = state_folder("run")
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotAvailableError(f"{path} is not a folder of yours alone", hint="Remove it, or set OMNISTAGE_STATE to another folder.")
    return path


def _boot() -> str:
    """The id that this machine got when it was last booted. The names of files begin with it, because the folder may have older files, or
    be on a disk that several machines share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def register_stack(served: Served) -> Iterator[None]:
    """A context in which other commands of this user can find the stack. If its file cannot be made, they do not find it; it serves
    anyway."""
    try:
        file = OwnFile(folder(), 0o600, name=f"{_boot()}-{served.pid}{SUFFIX}", content=json.dumps(asdict(served)).encode())
    except (OSError, NotAvailableError):
        file = None
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                file.remove()


def all_served() -> list[Served]:
    """The stacks that serve now, ordered by their addresses. Files of launchers that have ended are removed; a file that cannot be read,
    such as one of another version, is left out."""
    stacks = []
    for path in folder().glob(f"{_boot()}-*{SUFFIX}"):
        with suppress(OSError), path.open() as file:
            if not is_owned(file.fileno()):
                path.unlink()
                continue
            with suppress(ValueError, TypeError, KeyError):
                stacks.append(_served_of(json.load(file)))
    return sorted(stacks, key=lambda served: served.address)


def served_here() -> list[Served]:
    """The stacks that serve now; an empty list if their folder cannot be read."""
    try:
        return all_served()
    except (NotAvailableError, OSError):
        return []


def _served_of(record: dict[str, Any]) -> Served:
    """The stack that a file describes. Raises KeyError, TypeError or ValueError for other contents."""
    return Served(
        str(record["address"]),
        int(record["pid"]),
        str(record["pipeline"]),
        str(record.get("log_folder", "")),
        float(record.get("grace_s", 5.0)),
        str(record.get("http", "")),
        float(record.get("idle_limit_s", 0.0)),
    )


def choose_stack(stacks: list[Served], address: str | None) -> Served:
    """The stack that a user means. address: HOST:PORT, or the port alone; None: the only stack. Raises RequestError if there is none, or
    several might be meant."""
    if not stacks:
        raise RequestError("no stack of yours serves on this machine")
    addresses = ", ".join(served.address for served in stacks)
    target = reachable_address(address) if address and ":" in address else address
    matching = [served for served in stacks if target in (None, served.address, served.address.rpartition(":")[2])]
    if not matching:
        raise RequestError(f"no stack of yours serves at {address}", hint=f"There are: {addresses}.")
    if len(matching) > 1:
        raise RequestError(f"several stacks of yours serve: {addresses}", hint="Name one, or --all.")
    return matching[0]


class StackEnd:
    """Ends a stack by signals to its launcher, and waits for the end of the launcher, the stack's last process."""

    def __init__(self, served: Served) -> None:
        """Raises ProcessLookupError if it has ended already."""
        self._served = served
        self._pidfd = os.pidfd_open(served.pid)
        # The launcher may have ended, and its pid may be another process's, since `served` was read.
        if served not in all_served():
            os.close(self._pidfd)
            raise ProcessLookupError(served.pid)

    def signal(self) -> None:
        """Send SIGTERM: the first one lets running answers finish, the second one ends the stack at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def wait(self, limit_s: float) -> bool:
        """Wait until the stack has ended, at most limit_s; returns whether it has."""
        return can_read(self._pidfd, min(limit_s, LONGEST_S))

    def close(self) -> None:
        os.close(self._pidfd)


CONNECT_LIMIT_S = 1.0


def warn(layout: Layout, notices: Notices) -> None:
    """Print all warnings about a stack before it starts."""
    for note in layout.notes:
        notices.tell(escape(note))
    stages = [group.stage for group in layout.groups]
    shares = {stage.settings[GPU_MEMORY] for stage in stages if stage.device == "cpu" and GPU_MEMORY in stage.settings}
    if shares:
        notices.tell(f"{flag(GPU_MEMORY)} {escape(', '.join(sorted(shares)))} means nothing on a CPU")
    addresses = dict.fromkeys(filter(None, (layout.servers.address, layout.servers.http)))
    open_ones = [address for address in addresses if not is_loopback(host_and_port(address)[0])]
    if open_ones:
        notices.tell(
            f"[yellow]{escape(' and '.join(open_ones))} can be reached from other hosts: nothing is encrypted, and nobody is asked for a "
            "key; see docs/security.md[/]"
        )


def announce(
    notices: Notices, address: str, layout: Layout, *, pid: int = 0, http: str = "", metrics: str = "", log_folder: str = ""
) -> None:
    """Print where a stack serves. layout: its first pipeline serves, and its others are starting. pid: of the launcher; 0: this process is
    it. http: HOST:PORT of the gateway. metrics: HOST:PORT of the metrics of all processes. log_folder: where the processes' output goes;
    empty: to the terminal."""
    router_address = reachable_address(address)
    is_found = router_address == connection.LOCAL_ADDRESS  # Other commands look for a router at this address by themselves.
    stop_text = "omnistage stop" if is_found else f"omnistage stop {router_address}"
    end = f"pid {pid}; `{stop_text}` ends it" if pid else "Ctrl-C ends it"
    notices.tell(f"[bold green]serving[/] on {escape(address)}", f"({escape(end)})")
    option = "" if is_found else f" --address {router_address}"
    if http:
        notices.tell(f"page:     [bold]{page(http)}[/]", f"[dim]({escape(_about_http(layout.servers.http, http))})[/]")
    for name, text, *remark in _further_lines(option, layout, metrics, log_folder):
        notices.tell(*(f"[dim]{escape(part)}[/]" for part in (f"{f'{name}:':<10}{text}", *remark)))
    if layout.servers.idle_limit_s:
        notices.tell(f"[dim]idle:     it ends by itself when nobody has asked for {layout.servers.idle_limit_s:g} s[/]")


def page(http: str) -> str:
    """The URL of a gateway for a browser on this machine."""
    return f"http://{reachable_address(http)}"


def open_page(served: Served) -> str:
    """The URL of a stack's page; empty if no process listens there, because the stack has no gateway, or has given it up."""
    if not served.http:
        return ""
    try:
        with socket.create_connection(host_and_port(reachable_address(served.http)), CONNECT_LIMIT_S):
            return page(served.http)
    except OSError:
        return ""


def _about_http(configured_http: str, http: str) -> str:
    """A text about the gateway. configured_http: HOST:PORT where it should listen. http: HOST:PORT where it listens."""
    moved = f"the port of {configured_http} is taken; " if configured_http != http and not configured_http.endswith(":0") else ""
    return f"{moved}OpenAI's interface is below /v1; any key is taken"


def _further_lines(option: str, layout: Layout, metrics: str, log_folder: str) -> Iterator[tuple[str, ...]]:
    """Yields further lines as (name, text), some with a remark. option: that names the router; empty if commands find it by themselves."""
    if layout.only_draws:  # The example is no question, which would be drawn; only the checkpoint says what it can draw.
        yield "ask it", f'omnistage draw "A hill in the rain."{option}', f"(or film, or sound: `omnistage pipelines{option}` shows which)"
    else:
        yield "ask it", f'omnistage ask "What is a kite?"{option}'
    if starting := [pipeline.name for pipeline in layout.pipelines[1:]]:
        yield "starting", f"{', '.join(starting)}; `omnistage status{option}` shows how far"
    if metrics:
        yield "metrics", f"http://{reachable_address(metrics)}/metrics"
    if log_folder:
        yield "logs", log_folder
