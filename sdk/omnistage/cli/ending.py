"""Ends `omnistage serve`: at the first signal running answers may finish, at the second everything ends at once."""

from __future__ import annotations

import asyncio
import signal

from omnistage.cli import interrupt
from omnistage.cli.layout import ROUTER
from omnistage.cli.notices import Notices
from omnistage.cli.stack import Stack
from omnistage.client.threads import beside

RUNNING = "omnistage_router_inflight"
"""The metric by which a router counts its running answers."""

LOOK_S = 0.5
"""How long the router may take to say how many answers run."""


class Ending:
    """Cancels the task that serves, at the first signal or at a call of `begin`; kills all processes at the second signal.

    task: the task that serves. grace_s: seconds that running answers get. notices: prints what the end waits for; None: print nothing, for
    a private stack, whose owner does not wait. stack: None until `ends` is called.
    """

    def __init__(self, task: asyncio.Task[object], grace_s: float, notices: Notices | None) -> None:
        self.stack: Stack | None = None
        self.number = signal.SIGTERM
        """The last signal that came."""
        self.serves = False
        """Whether the stack has started."""
        self.came = False
        """Whether the end has begun."""
        self._why = ""
        self.is_now = False
        """Whether a second signal came, so that no answer is waited for any more."""
        self._task = task
        self._grace_s = grace_s
        self._notices = notices
        self._is_closed = False  # whether `close` was called
        self._is_cancelled = False
        self._telling: asyncio.Task[None] | None = None

    def ends(self, stack: Stack) -> None:
        """Set the stack that a signal ends."""
        self.stack = stack

    def heed(self) -> None:
        """Handle signals from now on."""
        loop = asyncio.get_running_loop()
        for number in interrupt.heeded_signals():
            loop.add_signal_handler(number, self._signalled, number)

    async def close(self) -> None:
        """Print nothing and cancel nothing from now on."""
        self._is_closed = True
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})

    def _signalled(self, number: signal.Signals) -> None:
        """At the first signal begin the end; at the second end everything at once; ignore further signals."""
        self.number = number
        if not self.came:
            self.begin(f"on {number.name}")
        elif not self.is_now:
            self.is_now = True
            if self._telling is not None:
                self._telling.cancel()
            self._cancel()
            self._say("[bold]ending now[/]")
            if self.stack is not None:
                self.stack.kill()

    def begin(self, reason: str) -> None:
        """Begin the end, as the first signal does. reason: stands after the word "ending" in the printed line."""
        if self.came:
            return
        self.came = True
        self._why = reason
        if self._notices is None or self.stack is None or not self.serves:
            self._say(f"[bold]ending[/] {reason}, before it serves")
            self._cancel()
        else:
            self._telling = asyncio.create_task(self._tell(self.stack.metrics_addresses()[ROUTER]))

    async def _tell(self, address: str) -> None:
        """Print what the end waits for, and cancel the task. address: HOST:PORT of the router's metrics."""
        try:
            running = await _running(address)
            self._say(f"[bold]ending[/] {self._why}{self._waits_for(running)}")
        finally:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the task, but only once: the clean-up of the stack must not be cancelled too."""
        if not self._is_cancelled and not self._is_closed:
            self._is_cancelled = True
            self._task.cancel()

    def _waits_for(self, answers: int | None) -> str:
        """The last part of the printed line: how many running answers the end waits for, and how long; empty if none runs. answers: how
        many run; None: not known."""
        if answers == 0:
            return ""
        text = "answers that run get" if answers is None else "1 answer runs and gets" if answers == 1 else f"{answers} answers run and get"
        signal_text = "Ctrl-C again" if self.number == signal.SIGINT else f"{self.number.name} again"
        return f": {text} up to {self._grace_s:g} s; {signal_text} ends it all now"

    def _say(self, markup: str) -> None:
        if self._notices is not None:
            self._notices.say(markup)


async def _running(address: str) -> int | None:
    """How many answers a router runs; None if it does not say so in time. address: HOST:PORT of its metrics."""

    def look() -> int | None:
        from omnistage.cli.stack_metrics import fetch_page

        samples = (sample for family in fetch_page(address) or () for sample in family.samples)
        return next((int(sample.value) for sample in samples if sample.name == RUNNING), None)

    try:
        async with asyncio.timeout(LOOK_S):
            return await beside(look, "omnistage-last-look")
    except TimeoutError:
        return None
