"""`omnistage serve`: a stack in the foreground, and the launcher of private stacks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import typer
from rich.markup import escape

from omnistage.cli import interrupt
from omnistage.cli.ending import Ending
from omnistage.cli.layout import Layout, flag
from omnistage.cli.notices import Notices
from omnistage.cli.owner import Owner, told
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.cli.served import Served, registered
from omnistage.cli.stack import Stack
from omnistage.cli.starting import started
from omnistage.client.errors import OmniError
from omnistage.host.addresses import host_and_port, is_loopback
from omnistage.host.descriptors import raise_limit
from omnistage.models.options import GPU_MEMORY


def serve(choice: Choice, log_folder: Path | None, verbose: bool, ready_fd: int, lifeline_fd: int) -> None:
    """Run until SIGTERM, Ctrl-C, or the end of the lifeline. Raises StackError where no pipeline is left.

    ready_fd: gets lines of JSON: {"address", "metrics"} when the first pipeline serves, or {"error", "hint", "log"}. Who gets an error
    there tells it; here typer.Exit is raised. lifeline_fd: of a private stack: a pipeline starts when its owner writes {"start": NAME}
    there; each is answered with {"pipeline"} when it serves, or with the same and an error.
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
        if owner.tell_first(told(error)):
            raise typer.Exit(1) from error
        raise


async def _serve(layout: Layout, log_folder: Path | None, verbose: bool, owner: Owner) -> None:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("serve runs as a task")
    notices = Notices()
    _tell_notes(layout, notices, is_private=owner.is_private)
    _warn_of_others(layout.servers.address, notices)
    ending = Ending(task, layout.servers.grace_s, None if owner.is_private else notices)
    ending.heed()
    begins = Begins(owner, notices)
    owner.listen(begins.asked, ending.begin)
    try:
        async with started(layout, log_folder, verbose, ending.ends) as stack:
            ending.serves = True
            metrics = _show_metrics(layout.servers.metrics, stack)
            served = Served(stack.address, os.getpid(), layout.names, str(stack.log_folder or ""), layout.servers.grace_s)
            with nullcontext() if owner.is_private else registered(served):
                owner.tell_first({"address": stack.address, "metrics": metrics})
                if not owner.is_there:
                    _announce(stack, metrics, notices)
                async with begins.of(stack, () if owner.is_private else [one.name for one in layout.pipelines[1:]]):
                    raise await stack.broken()
    except asyncio.CancelledError:
        if not ending.came:
            raise
    finally:
        await ending.close()
    if ending.is_now:
        raise typer.Exit(interrupt.exit_code(ending.number))


class Begins:
    """Starts pipelines beside those that serve."""

    def __init__(self, owner: Owner, notices: Notices) -> None:
        self._owner = owner
        self._notices = notices
        self._stack: Stack | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def of(self, stack: Stack, names: Sequence[str]) -> AsyncIterator[None]:
        """Meanwhile they are started: these one after the other, and each that is asked for."""
        self._stack = stack
        one_by_one = asyncio.create_task(self._start_all(stack, names))
        try:
            yield
        finally:
            self._stack = None
            tasks = {one_by_one, *self._tasks.values()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def asked(self, name: str) -> None:
        """The owner wants a pipeline; it is told once, however often it asks meanwhile."""
        if self._stack is None:
            self._owner.tell({"pipeline": name, "error": "the stack does not serve", "hint": "Ask when it has said that it does."})
        elif name not in self._tasks:
            task = self._tasks[name] = asyncio.create_task(self._answer(self._stack, name))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _answer(self, stack: Stack, name: str) -> None:
        try:
            await stack.begin(name)
        except OmniError as error:
            self._owner.tell({"pipeline": name, **told(error)})
        else:
            self._owner.tell({"pipeline": name})

    async def _start_all(self, stack: Stack, names: Sequence[str]) -> None:
        for name in names:
            try:
                await stack.begin(name)
            except OmniError as error:
                place = f" {error.hint}" if error.hint else ""
                self._notices.say(f"[bold red]failed[/] {escape(f'{name}: {error.message}.{place}')}")
            else:
                self._notices.say(f"[bold green]serving[/] {escape(name)}")


def _tell_notes(layout: Layout, notices: Notices, *, is_private: bool) -> None:
    """is_private: who started it is told nothing of the pipelines that it did not name."""
    for note in () if is_private else layout.notes:
        notices.say(escape(note))
    stages = [group.stage for group in layout.groups]
    given = {stage.settings[GPU_MEMORY] for stage in stages if stage.device == "cpu" and GPU_MEMORY in stage.settings}
    if given:
        notices.say(f"{flag(GPU_MEMORY)} {escape(', '.join(sorted(given)))} means nothing on a CPU")


def _warn_of_others(address: str, notices: Notices) -> None:
    """A router that others reach."""
    if not is_loopback(host_and_port(address)[0]):
        notices.say(
            f"[yellow]{escape(address)} can be reached from other hosts: nothing is encrypted, and nobody is asked for a key; "
            "see docs/security.md[/]"
        )


def _show_metrics(address: str, stack: Stack) -> str:
    """Where the metrics of all processes are from now on; empty where nobody asked for them. Raises StackError."""
    if not address:
        return ""
    from omnistage.cli.stack_metrics import serve_stack_metrics

    return serve_stack_metrics(address, stack.metrics_addresses)


def _announce(stack: Stack, metrics: str, notices: Notices) -> None:
    notices.say(f"[bold green]serving[/] on {escape(stack.address)}   (Ctrl-C ends it)")
    notices.say(f'[dim]ask it:   omnistage ask --address {escape(stack.address)} "What is a kite?"[/]')
    if metrics:
        notices.say(f"[dim]metrics:  http://{escape(metrics)}/metrics[/]")
    if stack.log_folder is not None:
        notices.say(f"[dim]logs:     {escape(str(stack.log_folder))}[/]")
