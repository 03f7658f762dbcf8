"""A stack of processes: the stages of one pipeline side by side, the router in front of them, then the stages of the other pipelines, as
they are asked for; nothing of it is left when the stack ends.

A process that ends by itself is started again, by a keeper of its own, from the moment it serves until the stack stops, or its pipeline is
out: when the last process of one of its stages is given up. Whoever has the stack may begin that pipeline again.

Every process holds the reading end of one pipe, the lifeline, whose writing end is only here: if this process is killed, the pipe closes
and the others drain and exit by themselves.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from omnistage.cli import bounds
from omnistage.cli.child import Child
from omnistage.cli.environment import with_token
from omnistage.cli.keeper import RESTART_LIMIT_S, Keeper, Tell
from omnistage.cli.layout import ANY_PORT, Group, Layout
from omnistage.cli.pipelines import fetch_own
from omnistage.cli.ports import Ports
from omnistage.client.beside import beside
from omnistage.client.errors import StackError, UnknownModelError
from omnistage.models.common.owned import OwnFolder, sweep

ROUTER = "router"

KEPT_PORT = ("--kept-port", "true")
"""Of a server whose port `Ports` keeps."""

FAILURES = frozenset({"lost", "failed", "given up"})
"""What makes the logs worth keeping."""

Report = Callable[[str], None]
"""Called with the name of a process when it serves for the first time."""


class Servers:
    """The processes of a group, or the router, which is of none. all: as many as there are to be. children: those that are not given up.
    keepers: of those that serve."""

    def __init__(self, group: Group | None, children: Sequence[Child]) -> None:
        self.group = group
        self.all = list(children)
        self.children = list(children)
        self.keepers: list[asyncio.Task[None]] = []
        self.starting: asyncio.Task[None] | None = None
        """Done when all of them served for the first time; whatever pipeline asked first. None: they are not to run."""

    def has(self, pipeline: str) -> bool:
        """Whether they are of this pipeline."""
        return self.group is not None and pipeline in self.group.pipelines


class Stack:
    """Between `start` and `stop`, `address` is that of a router that serves, or is started again. Not every pipeline has been begun then.

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
        self._servers: list[Servers] = []
        self._router: Servers | None = None
        self._begun: dict[str, asyncio.Task[None]] = {}
        """By pipeline: its start, which may be done. One that failed or is out is not in it."""
        self._gone: dict[str, asyncio.Future[StackError]] = {}
        """By pipeline that was begun: why it failed, or is out."""
        self._outs: set[asyncio.Task[None]] = set()
        self._lifeline: tuple[int, int] | None = None
        self._broken: asyncio.Future[StackError] | None = None
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
        return next((child.address for child in self._router.children), "") if self._router is not None else ""

    @property
    def children(self) -> list[Child]:
        """Every process that is to run and is not given up, router last."""
        return [child for servers in self._running for child in servers.children]

    @property
    def names(self) -> list[str]:
        """The processes of the pipelines that were begun; before that, of the first."""
        begun = self._begun or {self._layout.pipelines[0].name}
        return [*(name for group in self._layout.groups if not {*group.pipelines}.isdisjoint(begun) for name in group.names), ROUTER]

    def metrics_addresses(self) -> dict[str, str]:
        """HOST:PORT of every process's metrics, by its name; empty for one that does not serve now. May be called from any thread."""
        serving = {child.name: child.metrics_address for child in self.children if child.serves}
        return {name: serving.get(name, "") for name in self.names}

    async def broken(self) -> StackError:
        """Wait until the stack cannot go on, and say why: no pipeline that was begun is left, or the router was given up."""
        if self._broken is None:
            raise RuntimeError("broken() before start()")
        return await asyncio.shield(self._broken)

    async def begin(self, pipeline: str) -> None:
        """Start a pipeline beside those that serve, and return when its processes do; who asks again waits for the same start. On a failure
        nothing is left of it that no other pipeline has. Raises UnknownModelError and StackError; one that failed may be begun again. The
        start goes on if the caller is cancelled."""
        if pipeline not in {one.name for one in self._layout.pipelines}:
            raise UnknownModelError(f"this stack has no pipeline {pipeline}; it has {self._layout.names}")
        if pipeline not in self._begun:
            self._note_begin(pipeline, asyncio.create_task(self._begin(pipeline)))
        await self._has_begun(pipeline)

    async def gone(self, pipeline: str) -> StackError:
        """Wait until a pipeline that was begun has failed or is out, nothing of it runs, and it may be begun again; and say why. For ever
        where it was the last one: then the stack is broken."""
        return await asyncio.shield(self._gone[pipeline])

    def _note_begin(self, pipeline: str, start: asyncio.Task[None]) -> None:
        self._begun[pipeline] = start
        self._gone[pipeline] = asyncio.get_running_loop().create_future()

    async def _has_begun(self, pipeline: str) -> None:
        start = self._begun[pipeline]
        task = asyncio.current_task()
        try:
            await asyncio.shield(start)
        except asyncio.CancelledError:
            if start.cancelled() and task is not None and not task.cancelling():
                raise StackError(f"a stage of {pipeline} was given up while another one started") from None
            raise

    def kill(self) -> None:
        """End every process now, whatever runs, and start none of them again; `stop` puts the rest away."""
        for task in self._tasks:
            task.cancel()
        for child in self.children:
            child.kill_now()

    async def stop(self) -> None:
        """End the router first, so that running answers can finish, then all stages; wait for each. Nothing is started again from here."""
        tasks = self._tasks
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._router is not None:
            await self._end(self._router)
        async with asyncio.TaskGroup() as ends:
            for servers in self._servers:
                ends.create_task(self._end(servers))
        self._ports.close()
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        if self._own_folder is not None:
            self._own_folder.keep() if self._failed else self._own_folder.remove()

    @property
    def _running(self) -> list[Servers]:
        servers = [*self._servers, *([] if self._router is None else [self._router])]
        return [each for each in servers if each.starting is not None]

    @property
    def _tasks(self) -> set[asyncio.Task[None]]:
        """All that starts processes, or starts them again."""
        tasks = {*self._begun.values(), *self._outs}
        for servers in self._running:
            tasks |= {*servers.keepers, *([] if servers.starting is None else [servers.starting])}
        return tasks

    async def _end(self, servers: Servers) -> None:
        """End its processes, and start none of them again; they may be begun anew."""
        tasks = {*servers.keepers, *([] if servers.starting is None else [servers.starting])}
        for task in tasks:
            task.cancel()
        for task in tasks and (await asyncio.wait(tasks))[0]:
            task.cancelled() or task.exception()  # Which whoever waited for it has been told.
        async with asyncio.TaskGroup() as ends:
            for child in servers.all:
                ends.create_task(child.stop(self._layout.servers.grace_s))
        servers.keepers, servers.starting, servers.children = [], None, list(servers.all)

    # Starting ------------------------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """The router is loaded beside the stages of the first pipeline, and looks for them when all of them serve."""
        self._make_children()
        router, first = self._router, self._layout.pipelines[0].name
        assert router is not None
        wait_fd, go_fd = os.pipe()
        loading = router.starting = asyncio.create_task(self._start_child(router, router.all[0], wait_fd))
        try:
            try:
                self._note_begin(first, asyncio.create_task(self._start_stages(first)))
                await self._has_begun(first)
            finally:
                os.close(go_fd)
            await self._unless_broken(loading)
        finally:
            loading.cancel()
            await asyncio.wait({loading})
            os.close(wait_fd)

    def _make_children(self) -> None:
        """All processes of all pipelines, each with its address; none is started."""
        options = self._layout.servers
        groups = self._layout.groups
        try:
            addresses = [[self._ports.take() for _ in group.names] for group in groups]
            router_address = self._ports.take() if options.address == ANY_PORT else options.address
        except OSError as error:
            raise StackError(f"there is no free port on the loopback address: {error.strerror}") from error
        for group, own in zip(groups, addresses, strict=True):
            beside = [
                address
                for other, those in zip(groups, addresses, strict=True)
                if other is not group and not {*group.pipelines}.isdisjoint(other.pipelines)
                for address in those
            ]
            arguments = [*self._layout.stage_arguments(group.stage, beside), *KEPT_PORT]
            children = [
                self._child(name, group.stage.kind, arguments, address, ANY_PORT, bounds.for_stage())
                for name, address in zip(group.names, own, strict=True)
            ]
            self._servers.append(Servers(group, children))
        placed = [
            (f"{pipeline}/{group.stage.kind}", address)
            for group, own in zip(groups, addresses, strict=True)
            for pipeline in group.pipelines
            for address in own
        ]
        arguments = self._layout.router_arguments(placed)
        if router_address != options.address:
            arguments += KEPT_PORT
        bounded = bounds.for_router(bounds.memory_of_machine())
        self._router = Servers(None, [self._child(ROUTER, ROUTER, arguments, router_address, options.metrics_address, bounded)])

    def _child(self, name: str, kind: str, arguments: Sequence[str], address: str, metrics_address: str, bound: bounds.Bounds) -> Child:
        log, variables = self._log(name), self._environment
        return Child(name, f"omnistage.{kind}", arguments, address, metrics_address, log, variables, self._ports.fds, bound)

    async def _begin(self, pipeline: str) -> None:
        """One that was asked for later: what it has of its own is fetched first."""
        layout = next(one for one in self._layout.pipelines if one.name == pipeline)
        while self._outs:
            await asyncio.wait(self._outs)
        try:
            await beside(lambda: fetch_own(layout), "omnistage-fetch")
            await self._start_in_time(pipeline)
        except StackError as error:
            await asyncio.shield(self._put_out([pipeline], error))
            raise

    async def _start_in_time(self, pipeline: str) -> None:
        """Others wait for their turn behind it. Raises StackError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RESTART_LIMIT_S):
                await self._start_stages(pipeline)
                return
        raise StackError(f"{pipeline} was not ready within {RESTART_LIMIT_S:g} s")

    async def _start_stages(self, pipeline: str) -> None:
        """Raises StackError of the first process that does not start, and waits for no other."""
        starts = set[asyncio.Task[None]]()
        for servers in self._servers:
            if servers.has(pipeline):
                if servers.starting is None:
                    servers.starting = asyncio.create_task(self._start_servers(servers))
                starts.add(servers.starting)
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        for start in starts:
            if start.done():
                start.result()

    async def _start_servers(self, servers: Servers) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in servers.children:
                    tasks.create_task(self._start_child(servers, child))
        except ExceptionGroup as group:
            failures = group.subgroup(StackError)
            if failures is None:
                raise
            raise failures.exceptions[0] from None

    async def _start_child(self, servers: Servers, child: Child, wait_fd: int | None = None) -> None:
        if self._lifeline is None:
            raise StackError("the stack was stopped while it started")
        await child.start(self._lifeline[0], wait_fd)
        if self._report is not None:
            self._report(child.name)
        keeper = asyncio.create_task(self._keep(servers, Keeper(child, self._lifeline[0], self._tell)))
        keeper.add_done_callback(self._kept)
        servers.keepers.append(keeper)

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

    async def _keep(self, servers: Servers, keeper: Keeper) -> None:
        """Give a child up when its keeper does; without the last one of a stage its pipelines are out."""
        error = await keeper.keep()
        self._tell("given up", error.message)
        servers.children.remove(keeper.child)
        if servers.children:
            return
        if servers is self._router:
            self._break(error)
            return
        out = [name for name in self._begun if servers.has(name)]
        for pipeline in out:
            self._begun[pipeline].cancel()
        self._put_out(out, error)

    def _put_out(self, pipelines: Sequence[str], error: StackError) -> asyncio.Task[None]:
        """From now on these may be begun anew, when a task of its own has ended what no other one has."""
        self._failed = True
        for pipeline in pipelines:
            del self._begun[pipeline]
        task = asyncio.create_task(self._end_rest(error, [self._gone[pipeline] for pipeline in pipelines]))
        self._outs.add(task)
        task.add_done_callback(self._outs.discard)
        return task

    async def _end_rest(self, error: StackError, gone: Sequence[asyncio.Future[StackError]]) -> None:
        """The processes that no pipeline has, and then tell it. Without any pipeline the stack is broken."""
        for servers in self._servers:
            if servers.starting is not None and not (servers.children and any(map(servers.has, self._begun))):
                await self._end(servers)
        if not self._begun:
            self._break(error)
            return
        for each in gone:
            each.set_result(error)

    def _break(self, error: StackError) -> None:
        if self._broken is not None and not self._broken.done():
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
