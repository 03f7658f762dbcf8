"""Keeps one process of a stack running: starts it again, at the same address, when it has ended by itself. A process that no longer answers
is killed first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omnistage.cli.child import Child
from omnistage.cli.liveness import wait_until_silent
from omnistage.client.errors import StackError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
HEALTHY_S = 30.0
"""If a process has served for this many seconds, the next pause before a restart is FIRST_BACKOFF_S."""

MAX_FAILED_STARTS = 5
"""After this many failed starts in a row a process is given up."""

RESTART_LIMIT_S = 900.0
"""Time limit of one restart; a process that is not ready then counts as hung, and is killed."""

Tell = Callable[[str, str], None]
"""Called with an event of a process, which is lost, ended, restarted, failed or given up, and a text that begins with the name of the
process."""


class Keeper:
    """Watches a child that serves, and starts it again when it has ended. lifeline_fd: see `Child.start`."""

    def __init__(self, child: Child, lifeline_fd: int, tell: Tell) -> None:
        self.child = child
        self._lifeline_fd = lifeline_fd
        self._tell = tell
        self._backoff_s = FIRST_BACKOFF_S

    async def keep(self) -> StackError:
        """Keep the process running; return only when it is given up, with the error of its last failed start.

        If this is cancelled while a process is being started, `Child.stop` can end that process.
        """
        clock = asyncio.get_running_loop().time
        while True:
            serving_since = clock()
            report = await self._end()
            lost_at = clock()
            self._tell(*report)
            if lost_at - serving_since >= HEALTHY_S:
                self._backoff_s = FIRST_BACKOFF_S
            failure = await self._start_again()
            if failure is not None:
                return failure
            self._tell("restarted", f"{self.child.name} (pid {self.child.pid}) after {clock() - lost_at:.1f} s")

    async def _end(self) -> tuple[str, str]:
        """Wait until the process has ended; kill it if it does not answer. Returns the event and the text for `tell`."""
        label = f"{self.child.name} (pid {self.child.pid})"
        ending, hanging = asyncio.create_task(self.child.wait()), asyncio.create_task(wait_until_silent(self.child.asking))
        tasks: set[asyncio.Task[int] | asyncio.Task[str]] = {ending, hanging}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                reason = hanging.result()
                await self.child.kill()
                return "lost", f"{label} {reason} and was killed"
            code = ending.result()
        finally:
            ending.cancel()
            hanging.cancel()
            await asyncio.wait(tasks)
        if code:
            return "lost", f"{label} ended with {self.child.told_end(code)}"
        return "ended", f"{label} was told to, and let its sessions finish; it is started again"

    async def _start_again(self) -> StackError | None:
        """Start the process again and again, after pauses that grow, until it serves; then return None. After MAX_FAILED_STARTS failures
        return the error of the last one."""
        failures = 0
        while True:
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            failure = await self._try_start()
            failures += 1
            if failure is None or failures == MAX_FAILED_STARTS:
                return failure
            self._tell("failed", failure.message)

    async def _try_start(self) -> StackError | None:
        """Start the process once; returns the error if it does not serve, None if it does."""
        try:
            async with asyncio.timeout(RESTART_LIMIT_S):
                await self.child.start(self._lifeline_fd)
        except TimeoutError:
            await self.child.kill()
            failure = StackError(f"{self.child.name} was not ready within {RESTART_LIMIT_S:g} s")
            failure.log = self.child.last_lines()
            return failure
        except StackError as error:
            return error
        return None
