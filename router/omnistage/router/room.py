"""Room for output that a client of Converse gives itself: chunks of a port, counted over the whole conversation.

    client --credit--> OutputRoom --of()--> Generation --its grant--> link ... producer

A port for which it gave none has what the router grants as it writes. Checkpoint ports, as text, are outside of credit (see `Run`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from omnistage.v1 import stage_pb2
from omnistage.wire.errors import protocol_error
from omnistage.wire.limits import MAX_PORTS


class OutputRoom:
    """Of one conversation. Use: `give` at any time; `begin` with every turn, and `wrote` after each chunk of it."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._written: Counter[str] = Counter()
        self._before: dict[str, int] = {}
        self._unended: set[str] = set()
        self._changed = asyncio.Event()
        self._dry = asyncio.Event()

    def give(self, credit: stage_pb2.Credit) -> None:
        """The client has room for so many chunks of a port. Raises PROTOCOL for too many ports."""
        if credit.port not in self._totals and len(self._totals) >= MAX_PORTS:
            raise protocol_error(f"credit for more than {MAX_PORTS} ports")
        self._totals[credit.port] = max(self._totals.get(credit.port, 0), credit.total)
        self._tell()

    def begin(self, ports: Iterable[str]) -> None:
        """A turn whose answer has these ports, checkpoints left out."""
        self._before = dict(self._written)
        self._unended = set(ports)
        self._tell()

    def of(self, port: str) -> int | None:
        """Chunks of this turn that the client has room for, from its begin; None where the router is to say."""
        total = self._totals.get(port)
        return None if total is None or port not in self._unended else max(total - self._before.get(port, 0), 0)

    def wrote(self, port: str, *, last: bool) -> None:
        """A chunk went to the client."""
        self._written[port] += 1
        if last:
            self._unended.discard(port)
        if port in self._totals:
            self._tell()

    @property
    def is_given(self) -> bool:
        """Whether the client said anything about room."""
        return bool(self._totals)

    @property
    def used_up(self) -> list[str]:
        """Ports of this turn that wait for the client to give more."""
        return sorted(port for port in self._unended if port in self._totals and self._written[port] >= self._totals[port])

    async def changes(self) -> None:
        """Return when room was given, or was used, since this was asked last. Of one task."""
        await self._changed.wait()
        self._changed.clear()

    async def runs_out(self) -> str:
        """Return when a port waits for the client; its name."""
        await self._dry.wait()
        return self.used_up[0]

    def _tell(self) -> None:
        self._changed.set()
        if self.used_up:
            self._dry.set()
        else:
            self._dry.clear()
