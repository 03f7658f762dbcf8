"""The keeper of one process of a stack: when it ends by itself it is started again, at the same address, where everybody finds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omnistage.cli.child import Child, describe_exit
from omnistage.client.errors import StackError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
HEALTHY_S = 30.0
"""A process that served for so long begins with the first backoff again."""

MAX_FAILED_STARTS = 5
"""In a row; then a process is given up."""

RESTART_LIMIT_S = 900.0
"""Time for one start again; a process that is not ready then hangs, and is killed."""

Tell = Callable[[str, str], None]
"""Called with one of lost, ended, restarted, failed and given up, and with the name of the process and what there is to say of it."""


class Keeper:
    """Watches a child that serves."""

    def __init__(self, child: Child, lifeline_fd: int, tell: Tell) -> None:
        self.child = child
        self._lifeline_fd = lifeline_fd
        self._tell = tell
        self._backoff_s = FIRST_BACKOFF_S

    async def keep(self) -> StackError:
        """Return only when it is given up, with the error of the last of its failed starts.

        Cancelled: a process that is just being started is there for `Child.stop`, or was never there.
        """
        clock = asyncio.get_running_loop().time
        while True:
            serving_since = clock()
            code = await self.child.wait()
            lost_at = clock()
            self._tell_end(code)
            if lost_at - serving_since >= HEALTHY_S:
                self._backoff_s = FIRST_BACKOFF_S
            failure = await self._start_again()
            if failure is not None:
                return failure
            self._tell("restarted", f"{self.child.name} (pid {self.child.pid}) after {clock() - lost_at:.1f} s")

    def _tell_end(self, code: int) -> None:
        who = f"{self.child.name} (pid {self.child.pid})"
        if code:
            self._tell("lost", f"{who} ended with {describe_exit(code)}")
        else:
            self._tell("ended", f"{who} was told to, and let its sessions finish; it is started again")

    async def _start_again(self) -> StackError | None:
        """Start it until it serves; the last failure if it is not to be tried any more."""
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
