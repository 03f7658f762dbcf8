"""A stack of processes: stages side by side, then the router in front of them; nothing of it is left when the stack ends.

A process that ends by itself is started again, by a keeper of its own, from the moment it serves until the stack stops.

Every process holds the reading end of one pipe, the lifeline, whose writing end is only here: if this process is killed, the pipe closes
and the others drain and exit by themselves.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from omnistage.cli import bounds
from omnistage.cli.child import Child
from omnistage.cli.environment import with_token
from omnistage.cli.keeper import Keeper, Tell
from omnistage.cli.layout import ANY_PORT, Layout, StageLayout
from omnistage.cli.ports import Ports
from omnistage.client.errors import StackError
from omnistage.models.common.owned import OwnFolder, sweep

ROUTER = "router"

KEPT_PORT = ("--kept-port", "true")
"""Of a server whose port `Ports` keeps."""

FAILURES = frozenset({"lost", "failed", "given up"})
"""What makes the logs worth keeping."""

Report = Callable[[str, float], None]
"""Called with the name of a process and the seconds it took, when it serves for the first time."""


class Stack:
    """Between `start` and `stop`, `address` is that of a router that serves, or is started again.

    log_folder: where the output of the processes goes; None: a temporary folder that is kept only if something fails. verbose: to stderr
    instead. tell: called for what happens to the processes.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        log_folder: Path | None = None,
        verbose: bool = False,
        report: Report | None = None,
        tell: Tell | None = None,
    ) -> None:
        self._layout = layout
        self._verbose = verbose
        self._report = report
        self._tell_owner = tell
        self._owns_folder = log_folder is None and not verbose
        self._own_folder: OwnFolder | None = None
        self.log_folder = log_folder
        self._children: dict[str, list[Child]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._lifeline: tuple[int, int] | None = None
        self._broken: asyncio.Future[StackError] | None = None
        self._stages_serve_at = 0.0
        self._failed = False
        self._environment = with_token(os.environ)
        self._ports = Ports()

    async def start(self) -> None:
        """Start everything; on a failure nothing is left running. Raises StackError with the last words of the process that failed."""
        self._lifeline = os.pipe()
        self._broken = asyncio.get_running_loop().create_future()
        if self._owns_folder:
            self._own_folder = OwnFolder("logs")
            self.log_folder = self._own_folder.path
        else:
            sweep(Path(tempfile.gettempdir()))  # Of stacks that were killed: this one makes no folder there, which would do it.
        try:
            await self._start()
        except BaseException as error:
            self._failed = self._failed or isinstance(error, StackError)
            await self.stop()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT of the router."""
        return next((child.address for child in self._children.get(ROUTER, [])), "")

    @property
    def children(self) -> list[Child]:
        """Every process that is not given up, router last."""
        return [child for children in self._children.values() for child in children]

    @property
    def names(self) -> list[str]:
        """The names that the report is called with."""
        return [*(_name(stage, index) for stage in self._layout.stages for index in range(stage.replicas)), ROUTER]

    def metrics_addresses(self) -> dict[str, str]:
        """HOST:PORT of every process's metrics, by its name; empty for one that does not serve now. May be called from any thread."""
        serving = {child.name: child.metrics_address for child in self.children if child.serves}
        return {name: serving.get(name, "") for name in self.names}

    async def broken(self) -> StackError:
        """Wait until the stack cannot go on, and say why: the last process of a kind was given up."""
        if self._broken is None:
            raise RuntimeError("broken() before start()")
        return await asyncio.shield(self._broken)

    def kill(self) -> None:
        """End every process now, whatever runs, and start none of them again; `stop` puts the rest away."""
        for keeper in self._keepers:
            keeper.cancel()
        for child in self.children:
            child.kill_now()

    async def stop(self) -> None:
        """End the router first, so that running answers can finish, then all stages; wait for each. Nothing is started again from here."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        grace_s = self._layout.servers.grace_s
        for child in self._children.get(ROUTER, []):
            await child.stop(grace_s)
        async with asyncio.TaskGroup() as tasks:
            for child in self.children:
                tasks.create_task(child.stop(grace_s))
        self._ports.close()
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        if self._own_folder is not None:
            self._own_folder.keep() if self._failed else self._own_folder.remove()

    # Starting ------------------------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        servers = self._layout.servers
        try:
            addresses = {stage.kind: [self._ports.take() for _ in range(stage.replicas)] for stage in self._layout.stages}
            router_address = self._ports.take() if servers.address == ANY_PORT else servers.address
        except OSError as error:
            raise StackError(f"there is no free port on the loopback address: {error.strerror}") from error
        for stage in self._layout.stages:
            neighbours = [address for kind, others in addresses.items() if kind != stage.kind for address in others]
            arguments = [*self._layout.stage_arguments(stage, neighbours), *KEPT_PORT]
            self._children[stage.kind] = [
                self._child(name, stage.kind, arguments, address, ANY_PORT, bounds.for_stage())
                for index, address in enumerate(addresses[stage.kind])
                for name in [_name(stage, index)]
            ]
        stages = [(kind, child) for kind, children in self._children.items() for child in children]
        arguments = self._layout.router_arguments([(kind, child.address) for kind, child in stages])
        if router_address != servers.address:
            arguments += KEPT_PORT
        bounded = bounds.for_router(bounds.memory_of_machine())
        router = self._child(ROUTER, ROUTER, arguments, router_address, servers.metrics_address, bounded)
        self._children[ROUTER] = [router]
        await self._start_in_order(stages, router)

    def _child(self, name: str, kind: str, arguments: Sequence[str], address: str, metrics_address: str, bound: bounds.Bounds) -> Child:
        log, variables = self._log(name), self._environment
        return Child(name, f"omnistage.{kind}", arguments, address, metrics_address, log, variables, self._ports.fds, bound)

    async def _start_in_order(self, stages: Sequence[tuple[str, Child]], router: Child) -> None:
        """The router is loaded beside the stages, and looks for them when all of them serve."""
        wait_fd, go_fd = os.pipe()
        loading = asyncio.create_task(self._start_child(ROUTER, router, wait_fd))
        try:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for kind, child in stages:
                        tasks.create_task(self._start_child(kind, child))
            finally:
                os.close(go_fd)
                self._stages_serve_at = time.perf_counter()
            await self._unless_broken(loading)
        except ExceptionGroup as group:
            failures = group.subgroup(StackError)
            if failures is None:
                raise
            raise failures.exceptions[0] from None
        finally:
            loading.cancel()
            await asyncio.wait({loading})
            os.close(wait_fd)

    async def _start_child(self, kind: str, child: Child, wait_fd: int | None = None) -> None:
        if self._lifeline is None:
            raise StackError("the stack was stopped while it started")
        begin = time.perf_counter()
        await child.start(self._lifeline[0], wait_fd)
        if self._report is not None:
            self._report(child.name, time.perf_counter() - (begin if wait_fd is None else self._stages_serve_at))
        keeper = asyncio.create_task(self._keep(kind, Keeper(child, self._lifeline[0], self._tell)))
        keeper.add_done_callback(self._kept)
        self._keepers.append(keeper)

    async def _unless_broken(self, starting: asyncio.Task[None]) -> None:
        """The router is ready when its stages are: without one of them it would wait for ever."""
        breaking = asyncio.create_task(self.broken())
        either: set[asyncio.Task[None] | asyncio.Task[StackError]] = {starting, breaking}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise breaking.result()
            starting.result()
        finally:
            breaking.cancel()
            await asyncio.wait({breaking})

    # Keeping -------------------------------------------------------------------------------------------------------------------------

    async def _keep(self, kind: str, keeper: Keeper) -> None:
        """Give a child up when its keeper does; without the last one of a kind the stack is broken."""
        error = await keeper.keep()
        self._tell("given up", error.message)
        siblings = self._children[kind]
        siblings.remove(keeper.child)
        if not siblings and self._broken is not None and not self._broken.done():
            self._broken.set_result(error)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """A keeper that ended by a bug keeps nobody: the stack ends, with that error."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _tell(self, what: str, text: str) -> None:
        self._failed = self._failed or what in FAILURES
        if self._tell_owner is not None:
            self._tell_owner(what, text)

    def _log(self, name: str) -> Path | None:
        return None if self._verbose or self.log_folder is None else self.log_folder / f"{name}.log"


def _name(stage: StageLayout, index: int) -> str:
    return stage.kind if stage.replicas == 1 else f"{stage.kind}-{index}"
