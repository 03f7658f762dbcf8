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
    """Run until SIGTERM, Ctrl-C, the end of the lifeline, or the end of the router. ready_fd: gets one line of JSON, {"address"} or
    {"error", "hint", "log"}."""
    try:
        asyncio.run(_serve(layout_of(choice), log_folder, verbose, ready_fd, lifeline_fd))
    except OmniError as error:
        _tell(ready_fd, {"error": error.message, "hint": error.hint, "log": error.log if isinstance(error, StackError) else ""})
        raise


async def _serve(layout: Layout, log_folder: Path | None, verbose: bool, ready_fd: int, lifeline_fd: int) -> None:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("serve runs as a task")
    ended = _call_once_at_end(lifeline_fd, task.cancel)
    try:
        async with started(layout, log_folder, verbose) as stack:
            _tell(ready_fd, {"address": stack.address})
            await _watch(stack, announce=ready_fd < 0)
    except asyncio.CancelledError:
        if not ended():
            raise


async def _watch(stack: Stack, announce: bool) -> None:
    """Tell of every process that ends by itself; the stack ends with its router."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if announce:
        console.print(f"[bold green]serving[/] on {stack.address}   (Ctrl-C ends it)")
        console.print(f'[dim]ask it:   omnistage ask --address {stack.address} "What is a kite?"[/]')
        if stack.log_folder is not None:
            console.print(f"[dim]logs:     {stack.log_folder}[/]")
    while stack.has_router:
        console.print(f"[bold red]lost[/] {await stack.first_end()}")
    raise StackError("the router ended", hint=f"Its log is in {stack.log_folder}." if stack.log_folder else "")


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


def _tell(ready_fd: int, line: dict[str, str]) -> None:
    if ready_fd >= 0:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(line) + "\n")
