"""Ends the command if something goes wrong: with one line, a hint and an exit code; with a traceback only if --verbose was typed. Work
on an event loop runs in `Interruptible`: Ctrl-C, a hangup or SIGTERM cancels it, once, and only until it is complete.

Exit codes: 0 done; 1 an error; 2 a wrong command line; 128 + N ended by signal N (129 hangup, 130 Ctrl-C, 141 the reader is gone, 143
terminated)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from omnistage.cli import interrupt

if TYPE_CHECKING:
    from omnistage.client.errors import OmniError
    from omnistage.client.wording import Wording


@contextmanager
def errors_reported(verbose: bool = False) -> Iterator[None]:
    """A context that turns the errors of the client and the launcher into a message on stderr and exit code 1, and signals into their exit
    codes, such as 130 for Ctrl-C."""
    from omnistage.client.errors import OmniError  # Not for a help text: it takes longer than the rest of the command.

    try:
        interrupt.raise_interrupts()
        yield
    except OmniError as error:
        tell(error, verbose)
        raise typer.Exit(1) from error
    except BrokenPipeError as error:
        # The reader of the output is gone, so at the end the rest must not be flushed into the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(interrupt.exit_code(signal.SIGPIPE)) from error
    except OSError as error:
        if verbose:
            traceback.print_exc()
        from omnistage.cli.places import explain

        _line(explain(error), "")
        raise typer.Exit(1) from error
    except Interrupted as error:
        raise typer.Exit(interrupt.exit_code(error.number)) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(interrupt.exit_code(signal.SIGINT)) from error


def tell(error: OmniError, verbose: bool, wording: Wording | None = None) -> None:
    """Print an error. wording: of the place where it is read; None: of a shell."""
    from rich.markup import escape

    from omnistage.cli.console import Console
    from omnistage.cli.wording import SHELL, word_error
    from omnistage.client.errors import StackError, UnavailableError

    if verbose:
        traceback.print_exc()
    if isinstance(error, StackError) and error.log:
        Console(stderr=True, highlight=False, soft_wrap=True).print(escape(error.log), style="dim")
    message, hint = word_error(error, wording or SHELL)
    if isinstance(error, UnavailableError) and error.retry_delay_s is not None:
        message += f" (ask again in {error.retry_delay_s:.1f} s)"
    _line(message, hint, error.request_id)


def _line(message: str, hint: str, request_id: str = "") -> None:
    """Print the line of an error, and a line each for the hint and for the request that it is about, if there are such."""
    from rich.markup import escape

    from omnistage.cli.console import Notices

    notices = Notices()
    notices.tell(f"[bold red]error:[/] {escape(message)}")
    if hint:
        notices.tell(f"[dim]hint:[/] {escape(hint)}")
    if request_id:
        notices.say(f"[dim]request: {escape(request_id)}[/]")


class Interrupted(Exception):
    """The work was interrupted before it was complete, and has cleaned up. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by signal {number}")
        self.number = number


class Interruptible:
    """One piece of work. It calls `complete` when it has its result; from then on an interrupt does not lose the result."""

    def __init__(self) -> None:
        self._is_complete = False

    def run(self, work: Callable[[Interruptible], Coroutine[Any, Any, None]]) -> None:
        """Run `work(self)` to its end on an event loop of its own. Raises Interrupted, and whatever the work raises."""
        asyncio.run(self.unless_interrupted(work(self)))

    def complete(self) -> None:
        """Ignore interrupts from here on, while the result is written and printed."""
        self._is_complete = True
        interrupt.ignore()

    async def unless_interrupted(self, part: Coroutine[Any, Any, None]) -> None:
        """Run a part of the work until the first interrupt, which cancels it. If the work is already complete, the interrupt may end this
        part all the same, such as playing the sound. Raises Interrupted."""
        task, loop = asyncio.create_task(part), asyncio.get_running_loop()
        is_rest, signal_numbers = self._is_complete, list[int]()

        def cancel(number: int) -> None:
            # The work may have become complete between the signal and this call.
            if is_rest or not self._is_complete:
                signal_numbers.append(number)
                task.cancel()

        def interrupted(number: int) -> None:
            loop.call_soon_threadsafe(cancel, number)

        interrupt.call_once(interrupted)
        try:
            await task
        except asyncio.CancelledError:
            if not signal_numbers:
                raise
            raise Interrupted(signal_numbers[0]) from None
        finally:
            task.cancel()
            interrupt.ignore()
