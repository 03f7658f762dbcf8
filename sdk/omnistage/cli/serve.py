"""`omnistage serve`: a stack in the foreground, and the launcher of private stacks."""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from omnistage.cli import interrupt
from omnistage.cli.layout import Layout, flag
from omnistage.cli.notices import Notices
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.cli.stack import Stack
from omnistage.cli.starting import started
from omnistage.client.errors import OmniError, StackError
from omnistage.models.options import GPU_MEMORY


def serve(choice: Choice, log_folder: Path | None, verbose: bool, ready_fd: int, lifeline_fd: int) -> None:
    """Run until SIGTERM, Ctrl-C, or the end of the lifeline. Raises StackError when the last process of a kind has to be given up.

    ready_fd: gets one line of JSON, {"address"} or {"error", "hint", "log"}. Who gets an error there tells it; here typer.Exit is raised.
    """
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

    def end(why: str) -> None:
        task.cancel()
        if not ready.is_wanted:
            notices.say(f"[bold]ending[/] on {why}: answers that run get up to {layout.servers.grace_s:g} s")

    _tell_meaningless(layout, notices)
    ended = _call_once_at_end(lifeline_fd, end)
    try:
        async with started(layout, log_folder, verbose) as stack:
            ready.tell({"address": stack.address})
            if not ready.is_wanted:
                _announce(stack, notices)
            raise await stack.broken()
    except asyncio.CancelledError:
        if not ended():
            raise


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
        notices.say(f"{flag(GPU_MEMORY)} {', '.join(sorted(given))} means nothing on a CPU")


def _announce(stack: Stack, notices: Notices) -> None:
    notices.say(f"[bold green]serving[/] on {stack.address}   (Ctrl-C ends it)")
    notices.say(f'[dim]ask it:   omnistage ask --address {stack.address} "What is a kite?"[/]')
    if stack.log_folder is not None:
        notices.say(f"[dim]logs:     {stack.log_folder}[/]")


def _call_once_at_end(lifeline_fd: int, end: Callable[[str], object]) -> Callable[[], bool]:
    """Call `end` with the reason at the first interrupt or end of the lifeline; later ones do not disturb the clean-up.

    Returns a function that says whether the end came.
    """
    loop = asyncio.get_running_loop()
    came = asyncio.Event()

    def once(why: str) -> None:
        if not came.is_set():
            came.set()
            end(why)

    def lifeline_readable() -> None:
        if os.read(lifeline_fd, 1) == b"":
            loop.remove_reader(lifeline_fd)
            once("the end of its owner")

    for number in interrupt.heeded():
        loop.add_signal_handler(number, once, number.name)
    if lifeline_fd >= 0:
        loop.add_reader(lifeline_fd, lifeline_readable)
    return came.is_set
