"""How many chunks the later stages of a route may still send to the caller of this stage."""

from __future__ import annotations

from collections.abc import Iterable

from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError

OUT_OF_CREDIT = "the caller half-closed and its credit is used up"


class CreditBehind:
    """The caller's credit for the ports of later stages, and the part of it that is used up. It matters only after the caller's half-close,
    when no more credit can come."""

    def __init__(self, uncredited: Iterable[str] = (), ended_ports: Iterable[str] = ()) -> None:
        """uncredited: checkpoint ports, whose chunks need no credit. ended_ports: ports that had ended before this session began."""
        self._uncredited = frozenset(uncredited)
        self._ended = set(ended_ports)
        self._granted: dict[str, int] = {}  # chunks allowed in all, by port that has not ended
        self._relayed: dict[str, int] = {}  # chunks passed on, by port

    def grant(self, credit: stage_pb2.Credit) -> None:
        """Note credit of the caller; `credit.total` counts chunks since the session began."""
        if credit.port not in self._uncredited and credit.port not in self._ended:
            self._granted[credit.port] = max(credit.total, self._granted.get(credit.port, 0))

    def relayed(self, chunk: chunk_pb2.Chunk) -> None:
        """Count a chunk of a later stage that was passed on to the caller."""
        self._relayed[chunk.port] = self._relayed.get(chunk.port, 0) + 1
        if chunk.last:
            self._granted.pop(chunk.port, None)
            self._ended.add(chunk.port)

    def check(self) -> None:
        """Called after the half-close. Raises HALF_CLOSED if the session can never end without more credit: a port has used up its credit
        and has not ended, or no port was given any, although the last stage has at least one port that needs credit."""
        if not self._granted and not self._ended - self._uncredited:
            raise StageError("HALF_CLOSED", OUT_OF_CREDIT)
        for port, total in self._granted.items():
            if self._relayed.get(port, 0) >= total:
                raise StageError("HALF_CLOSED", OUT_OF_CREDIT, metadata={"port": port})
