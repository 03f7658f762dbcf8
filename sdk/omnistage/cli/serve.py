"""`omnistage serve`: a stack in the foreground, and the launcher of private stacks."""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import typer
from rich.markup import escape

from omnistage.cli import interrupt
from omnistage.cli.ending import Ending
from omnistage.cli.layout import Layout, flag
from omnistage.cli.notices import Notices
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.cli.served import Served, registered
from omnistage.cli.stack import Stack
from omnistage.cli.starting import started
from omnistage.client.errors import OmniError, StackError
from omnistage.host.addresses import host_and_port, is_loopback
from omnistage.host.descriptors import raise_limit
from omnistage.models.options import GPU_MEMORY


def serve(choice: Choice, log_folder: Path | None, verbose: bool, ready_fd: int, lifeline_fd: int) -> None:
    """Run until SIGTERM, Ctrl-C, or the end of the lifeline. Raises StackError when the last process of a kind has to be given up.

    ready_fd: gets one line of JSON, {"address", "metrics"} or {"error", "hint", "log"}. Who gets an error there tells it; here typer.Exit
    is raised.
    """
    raise_limit()
    ready = ReadyLine(ready_fd)
    if log_folder is not None:
        log_folder.mkdir(parents=True, exist_ok=True)
    try:
        with _ending_with_owner(lifeline_fd):
            layout = layout_of(choice)
        asyncio.run(_serve(layout, log_folder, verbose, ready, lifeline_fd))
    except OmniError as error:
        line = {"error": error.message, "hint": error.hint, "log": error.log if isinstance(error, StackError) else ""}
        if ready.tell(line):
            raise typer.Exit(1) from error
        raise


class ReadyLine:
    """The one line that the launcher's owner waits for; what comes after it is nobody's any more."""

    def __init__(self, fd: int) -> None:
        """fd: -1 where nobody waits."""
        self.is_wanted = fd >= 0
        self._fd = fd

    def tell(self, line: dict[str, str]) -> bool:
        """True if it was this line that the owner waited for."""
        if self._fd < 0:
            return False
        fd, self._fd = self._fd, -1
        with os.fdopen(fd, "w") as pipe:
            pipe.write(json.dumps(line) + "\n")
        return True


async def _serve(layout: Layout, log_folder: Path | None, verbose: bool, ready: ReadyLine, lifeline_fd: int) -> None:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("serve runs as a task")
    notices = Notices()
    is_private = lifeline_fd >= 0
    _tell_meaningless(layout, notices)
    _warn_of_others(layout.servers.address, notices)
    ending = Ending(task, layout.servers.grace_s, None if is_private else notices)
    ending.heed(lifeline_fd)
    try:
        async with started(layout, log_folder, verbose, ending.ends) as stack:
            ending.serves = True
            metrics = _show_metrics(layout.servers.metrics, stack)
            served = Served(stack.address, os.getpid(), layout.pipeline, str(stack.log_folder or ""), layout.servers.grace_s)
            with nullcontext() if is_private else registered(served):
                ready.tell({"address": stack.address, "metrics": metrics})
                if not ready.is_wanted:
                    _announce(stack, metrics, notices)
                raise await stack.broken()
    except asyncio.CancelledError:
        if not ending.came:
            raise
    finally:
        await ending.close()
    if ending.is_now:
        raise typer.Exit(interrupt.exit_code(ending.number))


@contextmanager
def _ending_with_owner(lifeline_fd: int) -> Iterator[None]:
    """Meanwhile the end of the lifeline is the end of this process, at once: it may fetch gigabytes that nobody waits for any more, and
    whoever asks for them again goes on there. There is nothing else to put away."""
    if lifeline_fd < 0:
        yield
        return
    over, end = os.pipe()

    def watch() -> None:
        if lifeline_fd in select.select([lifeline_fd, over], [], [])[0]:
            os._exit(1)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.close(end)
        watching.join()
        os.close(over)


def _tell_meaningless(layout: Layout, notices: Notices) -> None:
    given = {stage.settings[GPU_MEMORY] for stage in layout.stages if stage.device == "cpu" and GPU_MEMORY in stage.settings}
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
