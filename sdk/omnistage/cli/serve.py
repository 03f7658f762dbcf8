"""Runs a stack in the foreground for `omnistage serve`, which is also the launcher of private stacks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer
from rich.markup import escape

from omnistage.cli import interrupt
from omnistage.cli.announcement import announce, warn
from omnistage.cli.ending import Ending
from omnistage.cli.idleness import end_when_idle
from omnistage.cli.layout import Layout, reachable_address
from omnistage.cli.notices import Notices
from omnistage.cli.owner import Owner, error_line
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.cli.served import Served, register_stack
from omnistage.cli.stack import Stack
from omnistage.cli.starting import start_stack
from omnistage.cli.wording import SHELL
from omnistage.client.errors import OmniError, StackError
from omnistage.host.descriptors import raise_limit

FIRST_PAUSE_S = 5.0
"""Pause before a failed pipeline is started again; doubled after each failure, until it serves."""

MAX_PAUSE_S = 300.0


def serve(choice: Choice, log_folder: Path | None, verbose: bool, ready_fd: int, lifeline_fd: int) -> None:
    """Run a stack until SIGTERM, Ctrl-C, or the end of the lifeline. Raises StackError if no pipeline is left.

    ready_fd: a descriptor that gets lines of JSON: {"address", "http", "metrics"} when the first pipeline serves, or {"error", "hint",
    "log"}. The reader of such an error prints it, so typer.Exit is raised here instead of the error. lifeline_fd: a descriptor, for a
    private stack: its owner writes {"start": NAME} there for each further pipeline, and gets over ready_fd {"pipeline"} when it serves, or
    the same with an error. -1: there is none.
    """
    raise_limit()
    owner = Owner(ready_fd, lifeline_fd)
    if log_folder is not None:
        log_folder.mkdir(parents=True, exist_ok=True)
    try:
        with owner.ends_all():
            layout = layout_of(choice)
        asyncio.run(_serve(layout, log_folder, verbose, owner))
    except OmniError as error:
        if owner.tell_first(error_line(error)):
            raise typer.Exit(1) from error
        raise


async def _serve(layout: Layout, log_folder: Path | None, verbose: bool, owner: Owner) -> None:
    """Start the stack, report where it serves, and run until a signal or the owner ends it, or it is broken."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("serve runs as a task")
    notices = Notices()
    # The owner of a private stack gets no notes: they are about pipelines that it did not name.
    warn(replace(layout, notes=()) if owner.is_private else layout, notices)
    ending = Ending(task, layout.servers.grace_s, None if owner.is_private else notices)
    ending.heed()
    begins = Begins(owner, notices)
    owner.listen(begins.asked, partial(ending.begin, "with its owner"))
    limit_s = layout.servers.idle_limit_s
    end_idle = partial(ending.begin, f"as nobody has asked for {limit_s:g} s")
    try:
        async with start_stack(layout, log_folder, verbose, ending.ends) as stack:
            ending.serves = True
            metrics = _show_metrics(layout.servers.metrics, stack)
            address, http, logs = stack.address, stack.http, str(stack.log_folder or "")
            served = Served(reachable_address(address), os.getpid(), layout.names, logs, layout.servers.grace_s, http, limit_s)
            with nullcontext() if owner.is_private else register_stack(served):
                owner.tell_first({"address": address, "http": http, "metrics": metrics})
                if not owner.is_there:
                    announce(notices, address, layout, http=http, metrics=metrics, log_folder=logs)
                async with end_when_idle(limit_s, stack.metrics_addresses, end_idle), begins.of(stack, layout):
                    raise await stack.broken()
    except asyncio.CancelledError:
        if not ending.came:
            raise
    finally:
        await ending.close()
    if ending.is_now:
        raise typer.Exit(interrupt.exit_code(ending.number))


class Begins:
    """Starts pipelines while the stack runs. If there is an owner, these are the pipelines that it asks for. Without an owner they are all
    pipelines of the layout, and each that fails is started again after a pause."""

    def __init__(self, owner: Owner, notices: Notices) -> None:
        self._owner = owner
        self._notices = notices
        self._stack: Stack | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._turn = asyncio.Lock()  # held while a pipeline is started

    @asynccontextmanager
    async def of(self, stack: Stack, layout: Layout) -> AsyncIterator[None]:
        """A context in which pipelines are started, one at a time: those that the owner asks for, or, without an owner, all. The first one
        of the layout serves already."""
        self._stack = stack
        for pipeline in () if self._owner.is_private else layout.pipelines:
            self._add(self._keep(stack, pipeline.name, serves=pipeline is layout.pipelines[0]))
        try:
            yield
        finally:
            self._stack = None
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def asked(self, name: str) -> None:
        """Called when the owner asks for a pipeline: start it, and send the owner the result."""
        if self._stack is None:
            self._owner.tell({"pipeline": name, "error": "the stack does not serve", "hint": "Ask when it has said that it does."})
        else:
            self._add(self._answer(self._stack, name))

    def _add(self, work: Coroutine[None, None, None]) -> None:
        """Run this as a task, which is cancelled when the block of `of` ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, stack: Stack, name: str) -> None:
        """Start a pipeline, and send the owner a line when it serves, or the error."""
        try:
            await stack.begin(name)
        except OmniError as error:
            self._owner.tell({"pipeline": name, **error_line(error)})
        else:
            self._owner.tell({"pipeline": name})

    async def _keep(self, stack: Stack, name: str, *, serves: bool) -> None:
        """Start a pipeline, and start it again whenever it has failed, after a pause. serves: whether it serves already."""
        pause_s = FIRST_PAUSE_S
        while True:
            if serves or await self._serves(stack, name):
                pause_s = FIRST_PAUSE_S
            error = await stack.gone(name)
            hint = f" {SHELL.hint(error.advice)}" if error.advice else ""
            self._notices.tell(f"[bold red]failed[/] {escape(f'{name}: {error.message}.{hint} It is started again in {pause_s:g} s')}")
            await asyncio.sleep(pause_s)
            pause_s, serves = min(2 * pause_s, MAX_PAUSE_S), False

    async def _serves(self, stack: Stack, name: str) -> bool:
        """Start a pipeline when no other is being started; returns whether it serves."""
        try:
            async with self._turn:
                await stack.begin(name)
        except StackError:
            return False  # `_keep` asks `gone` for the reason.
        self._notices.tell(f"[bold green]serving[/] {escape(name)}")
        return True


def _show_metrics(address: str, stack: Stack) -> str:
    """Serve a page with the metrics of all processes. Returns its HOST:PORT; empty if `address` is. Raises StackError."""
    if not address:
        return ""
    from omnistage.cli.stack_metrics import serve_stack_metrics

    return serve_stack_metrics(address, stack.metrics_addresses)
