"""The credit that a client of Converse gives for output: chunks of a port, counted over the whole conversation.

    client --credit--> OutputRoom --of()--> Generation --its grant--> link ... producer

For a port without a client's credit the router itself grants chunks as it writes. Checkpoint ports, such as text, need no credit (see
`Run`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from omnistage.v1 import stage_pb2
from omnistage.wire.errors import protocol_error
from omnistage.wire.limits import MAX_PORTS


class OutputRoom:
    """The room in one conversation. Call `give` when credit comes, `begin` with every turn, and `wrote` after each chunk of the turn."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}  # chunks that the client has room for, by port, since the start of the conversation
        self._written: Counter[str] = Counter()  # chunks that went to the client, since the same start
        self._before: dict[str, int] = {}  # the value of `_written` when this turn began
        self._unended: set[str] = set()  # ports of this turn that have not ended
        self._changed = asyncio.Event()
        self._dry = asyncio.Event()  # set while a port has no room left

    def give(self, credit: stage_pb2.Credit) -> None:
        """Note that the client has room for `credit.total` chunks of a port, counted from the start of the conversation. Raises PROTOCOL
        for too many ports."""
        if credit.port not in self._totals and len(self._totals) >= MAX_PORTS:
            raise protocol_error(f"credit for more than {MAX_PORTS} ports")
        self._totals[credit.port] = max(self._totals.get(credit.port, 0), credit.total)
        self._wake()

    def begin(self, ports: Iterable[str]) -> None:
        """Begin a turn. ports: the ports of its answer, without checkpoint ports."""
        self._before = dict(self._written)
        self._unended = set(ports)
        self._wake()

    def of(self, port: str) -> int | None:
        """For how many chunks of a port the client has room, counted from the beginning of this turn; None: the client sets no limit."""
        total = self._totals.get(port)
        return None if total is None or port not in self._unended else max(total - self._before.get(port, 0), 0)

    def wrote(self, port: str, *, last: bool) -> None:
        """Note that a chunk went to the client."""
        self._written[port] += 1
        if last:
            self._unended.discard(port)
        if port in self._totals:
            self._wake()

    @property
    def is_given(self) -> bool:
        """Whether the client gave room for any port."""
        return bool(self._totals)

    @property
    def used_up(self) -> list[str]:
        """Ports of this turn that wait for more room from the client."""
        return sorted(port for port in self._unended if port in self._totals and self._written[port] >= self._totals[port])

    async def changes(self) -> None:
        """Wait until room was given or used, or a turn began, since the last call. Only one task may call this."""
        await self._changed.wait()
        self._changed.clear()

    async def runs_out(self) -> str:
        """Wait until a port needs more room from the client. Returns the port's name."""
        await self._dry.wait()
        return self.used_up[0]

    def _wake(self) -> None:
        """Wake the tasks that wait in `changes` and `runs_out`."""
        self._changed.set()
        if self.used_up:
            self._dry.set()
        else:
            self._dry.clear()
