"""A stack of processes: stages side by side, then the router in front of them; nothing of it is left when the stack ends.

Every process holds the reading end of one pipe, the lifeline, whose writing end is only here: if this process is killed, the pipe closes
and the others drain and exit by themselves.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from omnistage.cli.child import Child, describe_exit
from omnistage.cli.layout import Layout, StageLayout
from omnistage.client.errors import StackError

Report = Callable[[str, float], None]
"""Called with the name of a process and the seconds it took, when it serves."""


class Stack:
    """Between `start` and `stop`, `address` is that of a router that serves.

    log_folder: where the output of the processes goes; None: a temporary folder that is kept only if something fails. verbose: to stderr
    instead.
    """

    def __init__(self, layout: Layout, *, log_folder: Path | None = None, verbose: bool = False, report: Report | None = None) -> None:
        self._layout = layout
        self._verbose = verbose
        self._report = report
        self._own_folder = log_folder is None and not verbose
        self.log_folder = log_folder
        self._stages: dict[str, list[Child]] = {}
        self._router: Child | None = None
        self._lifeline: tuple[int, int] | None = None
        self._failed = False

    async def start(self) -> None:
        """Start everything; on a failure nothing is left running. Raises StackError with the last words of the process that failed."""
        self._lifeline = os.pipe()
        if self._own_folder:
            self.log_folder = Path(tempfile.mkdtemp(prefix="omnistage-logs-"))
        try:
            await self._start()
        except BaseException as error:
            self._failed = isinstance(error, StackError)
            await self.stop()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT of the router."""
        return self._router.address if self._router else ""

    @property
    def children(self) -> list[Child]:
        """Every process, router last."""
        stages = [child for replicas in self._stages.values() for child in replicas]
        return [*stages, self._router] if self._router else stages

    @property
    def names(self) -> list[str]:
        """The names that the report is called with."""
        return [*(_name(stage, index) for stage in self._layout.stages for index in range(stage.replicas)), "router"]

    async def first_end(self) -> str:
        """Wait until a process ends by itself and say which. The stack goes on without it, except without its router."""
        waits = {asyncio.create_task(child.wait()): child for child in self.children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        first = done.pop()
        child = waits[first]
        self._failed = True
        self._forget(child)
        return f"{child.name} (pid {child.pid}) ended with {describe_exit(first.result())}"

    @property
    def has_router(self) -> bool:
        return self._router is not None

    async def stop(self) -> None:
        """End the router first, so that running answers can finish, then all stages; wait for each."""
        grace_s = self._layout.servers.grace_s
        if self._router is not None:
            await self._router.stop(grace_s)
        async with asyncio.TaskGroup() as tasks:
            for child in self.children:
                tasks.create_task(child.stop(grace_s))
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        if self._own_folder and self.log_folder is not None and not self._failed:
            shutil.rmtree(self.log_folder, ignore_errors=True)

    async def _start(self) -> None:
        for stage in self._layout.stages:
            self._stages[stage.kind] = [
                Child(_name(stage, index), f"omnistage.{stage.kind}", self._layout.stage_arguments(stage), self._log(_name(stage, index)))
                for index in range(stage.replicas)
            ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self.children:
                    tasks.create_task(self._start_child(child))
        except ExceptionGroup as group:
            failures = group.subgroup(StackError)
            if failures is None:
                raise
            raise failures.exceptions[0] from None
        addresses = [(kind, child.address) for kind, replicas in self._stages.items() for child in replicas]
        self._router = Child("router", "omnistage.router", self._layout.router_arguments(addresses), self._log("router"))
        await self._start_child(self._router)

    async def _start_child(self, child: Child) -> None:
        if self._lifeline is None:
            raise StackError("the stack was stopped while it started")
        begin = time.perf_counter()
        await child.start(self._lifeline[0])
        if self._report is not None:
            self._report(child.name, time.perf_counter() - begin)

    def _log(self, name: str) -> Path | None:
        return None if self._verbose or self.log_folder is None else self.log_folder / f"{name}.log"

    def _forget(self, child: Child) -> None:
        if child is self._router:
            self._router = None
        for replicas in self._stages.values():
            if child in replicas:
                replicas.remove(child)


def _name(stage: StageLayout, index: int) -> str:
    return stage.kind if stage.replicas == 1 else f"{stage.kind}-{index}"
