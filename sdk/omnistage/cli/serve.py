"""`omnistage serve`: a stack in the foreground, and the launcher of private stacks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from omnistage.cli.layout import Layout
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.cli.stack import Stack
from omnistage.cli.starting import started
from omnistage.client.errors import OmniError, StackError


def serve(choice: Choice, log_folder: Path | None, verbose: bool, ready_fd: int, lifeline_fd: int) -> None:
    """Run until SIGTERM, Ctrl-C, or the end of the lifeline. Raises StackError when the last process of a kind has to be given up.

    ready_fd: gets one line of JSON, {"address"} or {"error", "hint", "log"}.
    """
    ready = ReadyLine(ready_fd)
    try:
        asyncio.run(_serve(layout_of(choice), log_folder, verbose, ready, lifeline_fd))
    except OmniError as error:
        ready.tell({"error": error.message, "hint": error.hint, "log": error.log if isinstance(error, StackError) else ""})
        raise


class ReadyLine:
    """The one line that the launcher's owner waits for; what comes after it is nobody's any more."""

    def __init__(self, fd: int) -> None:
        """fd: -1 where nobody waits."""
        self.is_wanted = fd >= 0
        self._fd = fd

    def tell(self, line: dict[str, str]) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with os.fdopen(fd, "w") as pipe:
                pipe.write(json.dumps(line) + "\n")


async def _serve(layout: Layout, log_folder: Path | None, verbose: bool, ready: ReadyLine, lifeline_fd: int) -> None:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("serve runs as a task")
    ended = _call_once_at_end(lifeline_fd, task.cancel)
    try:
        async with started(layout, log_folder, verbose) as stack:
            ready.tell({"address": stack.address})
            if not ready.is_wanted:
                _announce(stack)
            raise await stack.broken()
    except asyncio.CancelledError:
        if not ended():
            raise


def _announce(stack: Stack) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold green]serving[/] on {stack.address}   (Ctrl-C ends it)")
    console.print(f'[dim]ask it:   omnistage ask --address {stack.address} "What is a kite?"[/]')
    if stack.log_folder is not None:
        console.print(f"[dim]logs:     {stack.log_folder}[/]")


def _call_once_at_end(lifeline_fd: int, end: Callable[[], object]) -> Callable[[], bool]:
    """Call `end` at the first SIGTERM, SIGINT, SIGHUP or end of the lifeline; later ones do not disturb the clean-up.

    Returns a function that says whether it came.
    """
    loop = asyncio.get_running_loop()
    came = asyncio.Event()

    def once() -> None:
        if not came.is_set():
            came.set()
            end()

    def lifeline_readable() -> None:
        if os.read(lifeline_fd, 1) == b"":
            loop.remove_reader(lifeline_fd)
            once()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, once)
    if lifeline_fd >= 0:
        loop.add_reader(lifeline_fd, lifeline_readable)
    return came.is_set
