"""Several replicas of every stage, and a router, that can be killed, stopped and started again in any order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from helpers import hanging
from helpers.ports import take_address
from helpers.servers import CHAIN, ServerProcess, stage_flags


class Fleet:
    """Processes by name: `talker-1` is the second Talker. A name keeps its address from one process to the next. All of them end with the
    context, and an error within it has their logs as a note."""

    def __init__(self, log_folder: Path) -> None:
        self._folder = log_folder
        self._flags: dict[str, tuple[str, Sequence[str], Mapping[str, str] | None]] = {}
        self._servers: dict[str, ServerProcess] = {}
        self._addresses: dict[str, str] = {}
        self._all = ExitStack()

    def add(self, name: str, module: str, *flags: str, address: str = "", environment: Mapping[str, str] | None = None) -> None:
        """Start a process under a new name. address: HOST:PORT; empty: a free port, which is kept from then on. environment: further
        variables."""
        self._flags[name] = (module, flags, environment)
        self._addresses[name] = address or take_address()
        self.begin(name)

    def begin(self, name: str) -> None:
        """Start a process under this name; `ready` waits for it."""
        module, flags, environment = self._flags[name]
        self._servers[name] = ServerProcess(
            module, *flags, "--address", self._addresses[name], log_folder=self._folder, environment=environment
        )
        self._all.callback(self._servers[name].stop)

    def ready(self, *names: str) -> None:
        """Wait until these, or all, serve."""
        for name in names or self._servers:
            if not self._servers[name].address:
                self._servers[name].wait_ready()
            self._addresses[name] = self._servers[name].address

    def signal(self, name: str, number: int) -> None:
        os.kill(self._servers[name].pid, number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self._servers[name].wait()

    def server(self, name: str) -> ServerProcess:
        return self._servers[name]

    def address(self, name: str) -> str:
        return self._addresses[name]

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    @property
    def stages(self) -> list[str]:
        """Names of all but the router."""
        return [name for name in self._servers if name != "router"]

    def of(self, kind: str) -> list[str]:
        return [name for name in self._servers if name.partition("-")[0] == kind]

    def logs(self) -> str:
        return "\n".join(f"--- {name} ({server.pid}):\n{server.log()[-3000:]}" for name, server in self._servers.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._all:
            if error is not None:
                error.add_note(self.logs())
            for server in self._servers.values():
                server.terminate()


@contextmanager
def fleet(
    log_folder: Path,
    *,
    replicas: int | Mapping[str, int] = 2,
    kinds: Sequence[str] = CHAIN,
    pipeline: str = "toy",
    family: str = "toy",
    options: Mapping[str, object] | None = None,
    options_of: Mapping[str, Mapping[str, object]] | None = None,
    stage_args: Sequence[str] = (),
    args_of: Mapping[str, Sequence[str]] | None = None,
    router_args: Sequence[str] = (),
    can_hang: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """All of them serving. replicas: of every kind, or by kind. options_of: further options of the models of a kind, or of one name.
    args_of: further arguments of a kind. can_hang: the loop of every stage can be blocked, see helpers.hanging.
    environment: further variables of the stages."""
    with Fleet(log_folder) as running:
        counts = replicas if isinstance(replicas, Mapping) else dict.fromkeys(kinds, replicas)
        for kind in kinds:
            for number in range(counts.get(kind, 1)):
                name = f"{kind}-{number}"
                own = {**(options or {}), **(options_of or {}).get(kind, {}), **(options_of or {}).get(name, {})}
                flags = [*stage_flags(own, family), *stage_args, *(args_of or {}).get(kind, ())]
                if can_hang:
                    running.add(name, "helpers.hanging", f"omnistage.{kind}", *flags, environment=hanging.ENVIRONMENT)
                else:
                    running.add(name, f"omnistage.{kind}", *flags, environment=environment)
        running.ready()
        stages = ",".join(f"{name.partition('-')[0]}={running.address(name)}" for name in running.stages)
        running.add("router", "omnistage.router", "--pipeline", pipeline, "--stages", stages, "--grace", "5", *router_args)
        running.ready("router")
        yield running
