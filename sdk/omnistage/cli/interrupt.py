"""Ctrl-C, a hangup and SIGTERM from the first line of the command to its last: what they mean depends on what there is to clean up.

At first there is nothing, and the process just exits. That is no KeyboardInterrupt, because one that is raised in the middle of an import
ends in a traceback, or is taken for a library that cannot be loaded. Then there is work, which is cancelled, once: further ones do not
disturb the clean-up. At the end there is a result, which nobody takes away.

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
    """As shells count: 130 after Ctrl-C."""
    return 128 + number


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that end this command. One that is ignored from the start stays ignored: that is how nohup, and a shell that starts a job
    in the background, say that the job goes on."""
    return tuple(number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN)


def exit_at_once() -> None:
    """From here an interrupt ends the process, without a word and without a clean-up."""
    _handle(lambda number: os._exit(exit_code(number)))


def raise_interrupts() -> None:
    """From here Ctrl-C raises KeyboardInterrupt, for what runs without an event loop or has handlers of its own."""
    for number in heeded():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def first_one_kept() -> Iterator[list[int]]:
    """Meanwhile the first Ctrl-C is only noted, in what is returned; a second one raises KeyboardInterrupt."""
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
    """From here the first interrupt calls `interrupted` with its number, in the main thread between any two instructions."""

    def once(number: int) -> None:
        ignore()
        interrupted(number)

    _handle(once)


def ignore() -> None:
    """From here nothing is left to interrupt, only to put away, and that takes no time that a person would want back."""
    _handle(lambda number: None)


def ignore_to_the_end() -> None:
    """For the last moments of the process, when Python takes its handlers down. What is started from here on would inherit it."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _handle(handle: Callable[[int], None]) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    for number in heeded():
        signal.signal(number, handler)
