"""Handles Ctrl-C, a hangup and SIGTERM from the first line of the command to its last; their effect depends on what there is to clean up.

At first there is nothing to clean up, and the process just exits. It raises no KeyboardInterrupt: in the middle of an import that would end
in a traceback, or look like a library that cannot be loaded. Later a signal cancels the work, but only once, so that further signals do not
disturb the clean-up. At the end signals are ignored, so that the result is kept.

This module is the first that the command imports, so it imports next to nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_code(number: int) -> int:
    """The exit code that shells use: 130 after Ctrl-C."""
    return 128 + number


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The signals that end this command. A signal that was ignored when the command started stays ignored: nohup, and a shell that starts a
    job in the background, ignore signals for a job that must go on."""
    return tuple(number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN)


def exit_at_once() -> None:
    """From now on an interrupt ends the process, without a message and without a clean-up."""
    _handle(lambda number: os._exit(exit_code(number)))


def raise_interrupts() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt: for code that has no event loop, or has handlers of its own."""
    for number in heeded_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def first_one_kept() -> Iterator[list[int]]:
    """Inside this block the first Ctrl-C only appends its number to the yielded list; a second one raises KeyboardInterrupt."""
    noted = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def call_once(interrupted: Callable[[int], None]) -> None:
    """From now on the first interrupt calls `interrupted` with its number, in the main thread, between any two instructions."""

    def handle_first(number: int) -> None:
        """Ignore further signals, and call `interrupted`."""
        ignore()
        interrupted(number)

    _handle(handle_first)


def ignore() -> None:
    """Ignore signals from now on: only a short clean-up is left."""
    _handle(lambda number: None)


def ignore_to_the_end() -> None:
    """Ignore signals in the last moments of the process, when Python removes its handlers. Not to be called earlier, because processes that
    are started later would ignore them too."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _handle(handle: Callable[[int], None]) -> None:
    """Call `handle` with the number of each signal that ends this command."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    for number in heeded_signals():
        signal.signal(number, handler)
