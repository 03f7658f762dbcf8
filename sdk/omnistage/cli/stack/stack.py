"""Runs the processes of a stack: the stages of the first pipeline, the router and the gateway, and later the stages of each other pipeline,
when it is asked for. No process is left when the stack ends.

Each process that serves has a keeper, which starts it again if it ends by itself, and gives it up after too many failed starts. A pipeline
is out when the last process of one of its stages is given up; the owner of the stack may begin it anew. If the router is given up, the
stack is broken, because nothing can be asked; without a gateway it goes on.

Every process holds the reading end of one pipe, the lifeline, and only this process has the writing end: if this process is killed, the
pipe closes, and the others drain and exit by themselves."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from omnistage.cli.stack.layout import ANY_PORT, GATEWAY, ROUTER, Layout, move_port, room
from omnistage.cli.stack.pipelines import fetch_own
from omnistage.cli.stack.processes import StackProcess, Tell, in_time, keep
from omnistage.cli.stack.resources import Bounds, Ports, gateway_environment, memory_of_machine, router_bounds, stage_bounds, with_token
from omnistage.client.errors import StackError, UnknownModelError
from omnistage.client.threads import run_on_thread
from omnistage.host.addresses import host_and_port
from omnistage.host.background import end_tasks, first_of
from omnistage.host.notes import NoteSocket
from omnistage.models.fetch.own_files import OwnFolder, sweep

KEPT_PORT = ("--kept-port", "true")
"""Arguments by which a server knows that `Ports` keeps its port."""

VIDEO_FOLDER = "OMNISTAGE_VIDEO_FOLDER"
"""The variable with the folder in which a gateway keeps films."""
HTTP_PORT_TRIES = 20
"""How many ports the gateway tries, from its own on, if they are taken. After a restart it listens at the same port as before."""

FAILURES = frozenset({"lost", "failed", "given up"})
"""Events of a process (`Tell`) that make the logs worth keeping."""

Report = Callable[[str], None]
"""Called with the name of a process when the process serves for the first time."""


class Servers:
    """Processes that do the same work: the replicas of a stage, the router, or the gateway. pipelines: names of the pipelines with this
    stage; empty for router and gateway. is_vital: when the last of the processes is given up, the stack is broken. all: every planned
    process. children: the processes that were not given up. keepers: a task for each process that serves."""

    def __init__(self, children: Sequence[StackProcess], pipelines: Collection[str] = (), *, is_vital: bool = False) -> None:
        self.pipelines = frozenset(pipelines)
        self.is_vital = is_vital
        self.all = list(children)
        self.children = list(children)
        self.keepers: list[asyncio.Task[None]] = []
        self.starting: asyncio.Task[None] | None = None
        """The task that starts all of them, whichever pipeline asked first; done when each has served once. None: they need not run."""

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """All tasks that start these processes, or start them again."""
        return {*self.keepers, *(() if self.starting is None else (self.starting,))}


class Stack:
    """The processes of a layout, from `start` to `stop`. In between, `address` is HOST:PORT of a router that serves or is just being
    started again; pipelines other than the first run only if they were begun.

    log_folder: gets the output of the processes; None: a temporary folder, which is kept only after a failure. verbose: the output goes to
    stderr instead. report: called with the name of each process when it serves for the first time. tell: called with events of the
    processes, see `Tell`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        log_folder: Path | None = None,
        verbose: bool = False,
        report: Report = lambda name: None,
        tell: Tell = lambda event, text: None,
    ) -> None:
        """Make it on the event loop on which it runs."""
        self._layout = layout
        self._verbose = verbose
        self._report = report
        self._tell_owner = tell
        self._exits = ExitStack()
        """The things that are closed or removed at the end: the lifeline, the ports and the stack's own folders."""
        self.log_folder = log_folder
        self._stages: list[Servers] = []
        self._fronts: list[Servers] = []
        """The processes that clients ask, in the order in which `stop` ends them: the gateway, while the router still answers, and the
        router. All of them end before any stage."""
        self._starts: dict[str, asyncio.Task[None]] = {}
        """By pipeline: the task that starts it, which stays here when it is done. A pipeline that failed or is out has none."""
        self._gone: dict[str, asyncio.Future[StackError]] = {}
        """For each pipeline that was begun: a future, which gets the error when the pipeline has failed or is out."""
        self._outs: set[asyncio.Task[None]] = set()
        """Tasks that end the processes of pipelines that are out."""
        self._lifeline_fd = -1  # the reading end of the lifeline
        self._broken: asyncio.Future[StackError] = asyncio.get_running_loop().create_future()
        self._failed = False  # whether to keep the logs
        self._unloaded = set[str]()  # pipelines that are not begun because the router does not want them
        self.on_wish: Callable[[str, bool], object] = lambda pipeline, is_wanted: None
        """Called with the name of a pipeline when the router wants it, and when the router wants it no more."""
        self._ends = False  # whether `stop` was called
        self._notes: NoteSocket | None = None  # to the router that runs now
        self._environment = with_token(os.environ)
        self._ports = Ports()

    async def start(self) -> None:
        """Start the first pipeline, the router and the gateway. After a failure nothing is left running. Raises StackError with the last
        words of the process that failed."""
        self._lifeline_fd, writing_fd = os.pipe()
        for fd in (self._lifeline_fd, writing_fd):
            self._exits.callback(os.close, fd)
        self._exits.callback(self._ports.close)
        try:
            if self.log_folder is None and not self._verbose:
                own_folder = OwnFolder("logs")
                self.log_folder = own_folder.path
                self._exits.callback(lambda: own_folder.keep() if self._failed else own_folder.remove())
            else:
                sweep(Path(tempfile.gettempdir()))  # Removes folders that killed stacks left behind, as making an OwnFolder does.
            await self._start()
        except BaseException as error:
            self._failed = self._failed or isinstance(error, StackError)
            await self.stop()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT of the router."""
        return self._address_of(ROUTER)

    @property
    def http(self) -> str:
        """HOST:PORT of the gateway; empty: there is none, or it was given up."""
        return self._address_of(GATEWAY)

    def _address_of(self, front: str) -> str:
        return next((child.address for servers in self._fronts for child in servers.children if child.name == front), "")

    @property
    def children(self) -> list[StackProcess]:
        """All processes that are to run and were not given up; the router is the last."""
        return [child for servers in self._all if servers.starting is not None for child in servers.children]

    @property
    def names(self) -> list[str]:
        """The names of all processes of the begun pipelines, or of the first pipeline if none was begun and none is unloaded, and of the
        gateway and the router."""
        pipeline_names = {*self._starts} or ({self._layout.pipelines[0].name} if not self._unloaded else set())
        stages = [name for group in self._layout.groups if not {*group.pipelines}.isdisjoint(pipeline_names) for name in group.names]
        return [*stages, *self._layout.fronts]

    def metrics_addresses(self) -> dict[str, str]:
        """HOST:PORT of every process's metrics, by its name; empty for a process that does not serve now. May be called from any thread."""
        serving = {child.name: child.metrics_address for child in self.children if child.serves}
        return {name: serving.get(name, "") for name in self.names}

    async def broken(self) -> StackError:
        """Wait until the stack cannot go on, and return the error that says why: no begun pipeline is left, and none is ever unloaded; or
        the router was given up."""
        return await asyncio.shield(self._broken)

    async def begin(self, pipeline: str) -> None:
        """Start a pipeline while others serve, and return when all its processes serve; a second caller waits for the same start. If the
        pipeline fails, it may be begun anew, after those of its processes have ended that no other pipeline uses. If the caller is
        cancelled, the start goes on. Raises UnknownModelError and StackError."""
        if pipeline not in {one.name for one in self._layout.pipelines}:
            raise UnknownModelError(f"this stack has no pipeline {pipeline}; it has {self._layout.names}")
        if pipeline not in self._starts:
            self._note_begin(pipeline, asyncio.create_task(self._begin(pipeline)))
        await self._has_begun(pipeline)

    async def unload(self, pipeline: str) -> None:
        """End those processes of a pipeline that no other begun pipeline uses. It may be begun anew at any time."""
        self._unloaded.add(pipeline)
        if (start := self._starts.pop(pipeline, None)) is not None:
            start.cancel()
        self._tell_router()
        await asyncio.shield(self._out(self._end_unused()))

    async def gone(self, pipeline: str) -> StackError:
        """Wait until a begun pipeline has failed or is out and its own processes have ended, so that it may be begun anew; returns the
        error that says why. If it was the last pipeline, this waits for ever, because then the stack is broken."""
        return await asyncio.shield(self._gone[pipeline])

    def _note_begin(self, pipeline: str, start: asyncio.Task[None]) -> None:
        """Note that a pipeline is begun, by the task that starts it."""
        self._unloaded.discard(pipeline)
        self._starts[pipeline] = start
        self._gone[pipeline] = asyncio.get_running_loop().create_future()
        self._tell_router()

    async def _has_begun(self, pipeline: str) -> None:
        """Wait until a begun pipeline serves. Raises StackError if it fails, also if its start was cancelled, because one of its stages was
        given up."""
        start = self._starts[pipeline]
        task = asyncio.current_task()
        try:
            await asyncio.shield(start)
        except asyncio.CancelledError:
            # The start was cancelled, and not the caller of this.
            if start.cancelled() and task is not None and not task.cancelling():
                raise StackError(f"a stage of {pipeline} was given up while another one started") from None
            raise

    def kill(self) -> None:
        """End every process at once, whatever it does, and start none of them again; `stop` cleans up the rest."""
        for task in self._tasks:
            task.cancel()
        for child in self.children:
            child.kill_now()

    async def stop(self) -> None:
        """First end the processes that clients ask, so that running answers can finish, then all stages; wait for each. From now on nothing
        is started again."""
        self._ends = True
        self._tell_router()  # Answers that wait for a lost stage end now.
        await end_tasks(self._tasks)
        for servers in self._fronts:
            await self._end(servers)
        if self._notes is not None:
            self._notes.close()
        async with asyncio.TaskGroup() as ends:
            for servers in self._stages:
                ends.create_task(self._end(servers))
        self._exits.close()

    @property
    def _all(self) -> list[Servers]:
        return [*self._stages, *self._fronts]

    @property
    def _tasks(self) -> set[asyncio.Task[None]]:
        """All tasks that start or end processes."""
        return {*self._starts.values(), *self._outs}.union(*(servers.tasks for servers in self._all))

    async def _end(self, servers: Servers) -> None:
        """End these processes, and the tasks that would start them again. Afterwards all of them may be started anew, also those that were
        given up."""
        await end_tasks(servers.tasks)
        async with asyncio.TaskGroup() as ends:
            for child in servers.all:
                ends.create_task(child.stop(self._layout.servers.grace_s))
        servers.keepers, servers.starting, servers.children = [], None, list(servers.all)
        self._tell_router()

    # Starting ------------------------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start the first pipeline, the router and the gateway at the same time. The router loads its code meanwhile, but looks for the
        stages only when all of them serve; the end of a pipe is the sign for it. The gateway asks nothing before its first request."""
        self._make_children()
        first = self._layout.pipelines[0].name
        wait_fd, go_fd = os.pipe()
        starts = list[asyncio.Task[None]]()
        for servers in reversed(self._fronts):  # The router first.
            child = servers.all[0]
            start = self._start_child(servers, child, wait_fd) if servers.is_vital else self._start_gateway(servers, child)
            servers.starting = asyncio.create_task(start)
            starts.append(servers.starting)
        try:
            try:
                self._note_begin(first, asyncio.create_task(self._start_stages(first)))
                await self._has_begun(first)
            finally:
                os.close(go_fd)
            for task in starts:
                # If the stack breaks first: a router whose stages are gone would never be ready.
                if error := await first_of(asyncio.shield(task), self.broken()):
                    raise error
        finally:
            await end_tasks(starts[:1])
            os.close(wait_fd)

    def _make_children(self) -> None:
        """Make the objects of all processes of all pipelines, each with its address; no process is started. Raises StackError."""
        options, groups = self._layout.servers, self._layout.groups
        try:
            places = [(group, [self._ports.take() for _ in group.names]) for group in groups]
            host, port = host_and_port(options.address)
            router = options.address if port else self._ports.take(host)
        except OSError as error:
            raise StackError(f"there is no free port to listen on: {error.strerror}") from error
        for group, addresses in places:
            shares = [others for other, others in places if other is not group and not {*group.pipelines}.isdisjoint(other.pipelines)]
            arguments = [*self._layout.stage_arguments(group.stage, [*chain(*shares)]), *KEPT_PORT]
            names = zip(group.names, addresses, strict=True)
            children = [self._child(name, group.stage.kind, arguments, address, stage_bounds()) for name, address in names]
            self._stages.append(Servers(children, group.pipelines))
        stage_addresses = [
            (f"{pipeline}/{group.stage.kind}", address)
            for group, addresses in places
            for pipeline in group.pipelines
            for address in addresses
        ]
        bounded = router_bounds(memory_of_machine())
        if options.http:
            http = move_port(options.http, self._own_addresses(router))
            gateway = self._child(GATEWAY, GATEWAY, self._layout.gateway_arguments(router), http, bounded, variables=self._for_gateway())
            self._fronts.append(Servers([gateway]))
        arguments = [*self._layout.router_arguments(stage_addresses), *(() if port else KEPT_PORT)]
        child = self._child(ROUTER, ROUTER, arguments, router, bounded, options.metrics_address)
        child.connect = self._connect
        self._fronts.append(Servers([child], is_vital=True))

    def _own_addresses(self, router: str) -> tuple[str, ...]:
        """Addresses that the gateway must not take, because other processes of the stack have them, or will have them."""
        return router, self._layout.servers.metrics_address, self._layout.servers.metrics

    def _child(
        self,
        name: str,
        kind: str,
        arguments: Sequence[str],
        address: str,
        bound: Bounds,
        metrics_address: str = ANY_PORT,
        variables: Mapping[str, str] | None = None,
    ) -> StackProcess:
        """The object of one process. variables: its environment; None: that of the stages."""
        log = None if self._verbose or self.log_folder is None else self.log_folder / f"{name}.log"
        environment = variables or self._environment
        return StackProcess(name, f"omnistage.{kind}", arguments, address, metrics_address, log, environment, self._ports.fds, bound)

    def _for_gateway(self) -> dict[str, str]:
        """The variables of the gateway. It calls no stage, so it does not get their token. Its films are in a folder of the stack, unless
        the user names one: if it is killed, the next one goes on with them."""
        variables = gateway_environment(self._environment)
        if not variables.get(VIDEO_FOLDER):
            variables[VIDEO_FOLDER] = str(self._exits.enter_context(OwnFolder("films")).path)
        return variables

    async def _begin(self, pipeline: str) -> None:
        """Start a pipeline while the stack runs: wait until the processes of pipelines that are out have ended, fetch the models, and start
        the stages. If the pipeline does not start, it is put out, and StackError is raised."""
        layout = next(one for one in self._layout.pipelines if one.name == pipeline)
        while self._outs:
            await asyncio.wait(self._outs)
        try:
            await run_on_thread(lambda: fetch_own(layout), "omnistage-fetch")
            async with in_time(pipeline):  # Other pipelines may wait for their start.
                await self._start_stages(pipeline)
        except StackError as error:
            await asyncio.shield(self._put_out([pipeline], error))
            raise

    async def _start_stages(self, pipeline: str) -> None:
        """Start those stages of a pipeline that do not run yet, and wait until all its stages serve. As soon as a process does not start,
        raises its StackError."""
        starts = set[asyncio.Task[None]]()
        for servers in self._stages:
            if pipeline in servers.pipelines:
                if servers.starting is None:
                    servers.starting = asyncio.create_task(self._start_servers(servers))
                starts.add(servers.starting)
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        for start in starts:
            if start.done():
                start.result()

    async def _start_servers(self, servers: Servers) -> None:
        """Start all processes that do the same work. Raises the StackError of one that does not start."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in servers.children:
                    tasks.create_task(self._start_child(servers, child))
        except ExceptionGroup as group:
            failures = group.subgroup(StackError)
            if failures is None:
                raise
            raise failures.exceptions[0] from None

    async def _start_child(self, servers: Servers, child: StackProcess, wait_fd: int | None = None, words: Sequence[str] = ()) -> None:
        """Start a process, wait until it serves, and have it kept from then on. wait_fd, words: `start_fd` and `words` of its `start`."""
        await child.start(self._lifeline_fd, wait_fd, words)
        self._report(child.name)
        keeper = asyncio.create_task(self._keep(servers, child))
        keeper.add_done_callback(self._note_keeper_end)
        servers.keepers.append(keeper)

    async def _start_gateway(self, servers: Servers, child: StackProcess) -> None:
        """Start the gateway. If it does not start, it is given up, and the stack goes on without it."""
        max_tries = HTTP_PORT_TRIES if self._layout.servers.http_may_move else 1
        tries = room(child.address, self._own_addresses(self.address), max_tries)
        try:
            async with in_time(child.name):
                await self._start_child(servers, child, words=("--port-tries", str(tries)))
        except StackError as error:
            await child.kill()
            self._give_up(servers, child, error)

    # Notes to the router -------------------------------------------------------------------------------------------------------------

    def _connect(self, connection: socket.socket) -> None:
        """Take the socket to a router that is just being started, and tell it what the stack keeps."""
        if self._notes is not None:
            self._notes.close()
        self._notes = NoteSocket(connection, lambda note: self.on_wish(note["pipeline"], note["is_wanted"]))
        self._tell_router()

    def _tell_router(self) -> None:
        """Tell the router which stage servers are started again whenever they end: those of begun pipelines that were not given up. Answers
        wait for these. Tell it also which pipelines are unloaded."""
        if self._notes is not None:
            servers_to_run = [] if self._ends else [servers for servers in self._stages if not servers.pipelines.isdisjoint(self._starts)]
            addresses = [child.address for servers in servers_to_run for child in servers.children]
            self._notes.send("kept", {"kept": addresses, "unloaded": sorted(self._unloaded)})

    # Keeping -------------------------------------------------------------------------------------------------------------------------

    async def _keep(self, servers: Servers, child: StackProcess) -> None:
        """Keep a process running, and give it up when that fails."""
        self._give_up(servers, child, await keep(child, self._lifeline_fd, self._tell))

    def _give_up(self, servers: Servers, child: StackProcess, error: StackError) -> None:
        """Give a process up: nothing starts it again. If no other does the same work, the pipelines that need it are out; if it was the
        router, the stack is broken."""
        self._tell("given up", error.message)
        servers.children.remove(child)
        self._tell_router()
        if servers.children:
            return
        if servers.is_vital:
            self._break(error)
        if out := [name for name in self._starts if name in servers.pipelines]:
            for pipeline in out:
                self._starts[pipeline].cancel()
            self._put_out(out, error)

    def _put_out(self, pipelines: Sequence[str], error: StackError) -> asyncio.Task[None]:
        """Put pipelines out. The returned task ends the processes that no other pipeline uses; when it is done, they may be begun anew."""
        self._failed = True
        for pipeline in pipelines:
            del self._starts[pipeline]
        self._tell_router()
        return self._out(self._end_rest(error, [self._gone[pipeline] for pipeline in pipelines]))

    def _out(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run this as a task, for whose end every pipeline waits that is begun meanwhile."""
        task = asyncio.create_task(work)
        self._outs.add(task)
        task.add_done_callback(self._outs.discard)
        return task

    async def _end_rest(self, error: StackError, gone: Sequence[asyncio.Future[StackError]]) -> None:
        """End the stages that are not used; then report the error to the callers that wait in `gone`. If no pipeline is left, the stack is
        broken, unless its pipelines may be unloaded: such a stack lives without one, and tries to load them again."""
        await self._end_unused()
        if not self._starts and not any(self._layout.servers.idle_unload_s.values()):
            self._break(error)
            return
        for future in gone:
            future.set_result(error)

    async def _end_unused(self) -> None:
        """End the stages that no begun pipeline uses, or that have no process left."""
        for servers in self._stages:
            is_used = not servers.pipelines.isdisjoint(self._starts)
            if servers.starting is not None and not (is_used and servers.children):
                await self._end(servers)

    def _break(self, error: StackError) -> None:
        """Have `broken` return this error, unless it has one already."""
        if not self._broken.done():
            self._broken.set_result(error)

    def _note_keeper_end(self, keeper: asyncio.Task[None]) -> None:
        """Handle the end of a keeper's task. If a bug ended it, nothing watches its process any more, so the stack ends with that error."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _tell(self, event: str, text: str) -> None:
        """Report an event of a process to the caller of the stack; after a failure the logs are kept."""
        self._failed = self._failed or event in FAILURES
        self._tell_owner(event, text)
