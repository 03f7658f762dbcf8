"""An Open of a caller, checked before anything is computed, and where its session begins: at the start, or, if a session was lost
elsewhere, after all output that the caller has of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from omnistage.link.replay import merge_chunks
from omnistage.stage.logic import Start
from omnistage.stage.settings import AllowList
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.chunks import PortWriter
from omnistage.wire.errors import StageError, bad_request
from omnistage.wire.limits import MAX_ADDRESSES

MAX_POSITION = 1 << 48
"""Largest position of items and chunks: no session comes near it, and counts that go on from it still fit into 64 bits."""

_PORT = re.compile(r"[a-z][a-z0-9_]{0,31}")
_CONTENT = {stage_pb2.PAYLOAD_TEXT: "text", stage_pb2.PAYLOAD_CODES: "codes"}


@dataclass(frozen=True, slots=True)
class Resumption:
    """The output of a session that the caller already has. positions: of this stage's own ports that go to the caller. history: the output
    of its own checkpoint ports, one chunk for each port. later_resume: the part for later stages. is_resumed: whether the session was
    lost elsewhere and goes on here. It may be True although all other fields are empty: then the lost session had made no output."""

    positions: Mapping[str, stage_pb2.Position] = field(default_factory=dict)
    history: Mapping[str, chunk_pb2.Chunk] = field(default_factory=dict)
    later_resume: stage_pb2.Resume = field(default_factory=stage_pb2.Resume)
    is_resumed: bool = False

    @classmethod
    def of(cls, request: stage_pb2.Open, produced: Mapping[str, stage_pb2.Port]) -> Resumption:
        """Check `Open.resume`, and split it into the part of this stage and the part for later stages. A request without it gives an empty
        Resumption. produced: this stage's own output ports, by name. Raises BAD_REQUEST with the bad field."""
        if not request.HasField("resume"):
            return cls()
        positions = _positions(request.resume)
        history = _history(request.resume)
        for port, chunks in history.items():
            _check_history(port, chunks, positions.get(port))
        own_positions = {port: position for port, position in positions.items() if port in produced}
        for port, position in own_positions.items():
            if produced[port].compact and position.seq and port not in history:
                raise bad_request("resume.history", f"port {port!r} stands at item {position.first}, and nothing of it is given")
        for port in history.keys() & produced.keys():
            fields = {chunk.WhichOneof("payload") for chunk in history[port]}
            if not produced[port].compact or not fields <= {None, _CONTENT.get(produced[port].payload)}:
                raise bad_request("resume.history", f"port {port!r} of this stage is no checkpoint of this content")
        later = stage_pb2.Resume(
            positions=[position for port, position in positions.items() if port not in produced],
            history=[chunk for port, chunks in history.items() if port not in produced for chunk in chunks],
        )
        merged = {port: merge_chunks(list(chunks)) for port, chunks in history.items() if port in produced}
        own_history = {port: chunk for port, chunk in merged.items() if chunk is not None}
        return cls(own_positions, own_history, later, is_resumed=True)

    def start(self, needs: Mapping[str, int]) -> Start:
        """Where the outputs go on. needs: first item that the next hop needs, for each port that goes to the next hop alone."""
        first = {**needs, **{port: position.first for port, position in self.positions.items()}}
        return Start(first, frozenset(self.ended_ports), self.history)

    @property
    def ended_ports(self) -> set[str]:
        return {port for port, position in self.positions.items() if position.ended}

    def writer(self, port: str) -> PortWriter:
        """The writer that numbers a port's chunks to the caller."""
        position = self.positions.get(port)
        return PortWriter(port) if position is None else PortWriter(port, seq=position.seq, first=position.first, is_ended=position.ended)


def _positions(resume: stage_pb2.Resume) -> dict[str, stage_pb2.Position]:
    """The checked positions, by port. Raises BAD_REQUEST."""
    positions = {position.port: position for position in resume.positions}
    if len(positions) != len(resume.positions):
        raise bad_request("resume.positions", "a port is named twice")
    for position in resume.positions:
        if _PORT.fullmatch(position.port) is None:
            raise bad_request("resume.positions", f"{position.port[:32]!r} is no name of a port")
        if max(position.seq, position.first) > MAX_POSITION:
            raise bad_request("resume.positions", f"port {position.port!r} is too far")
        if position.seq == 0 and (position.first or position.ended):
            raise bad_request("resume.positions", f"port {position.port!r} has items and no chunk")
    return positions


def _history(resume: stage_pb2.Resume) -> dict[str, list[chunk_pb2.Chunk]]:
    """The chunks of the history, by port, not checked yet."""
    history: dict[str, list[chunk_pb2.Chunk]] = {}
    for chunk in resume.history:
        history.setdefault(chunk.port, []).append(chunk)
    return history


def _check_history(port: str, chunks: Sequence[chunk_pb2.Chunk], position: stage_pb2.Position | None) -> None:
    """Raises BAD_REQUEST unless the chunks hold all items of a port from item 0 to its position. The last chunk must end the port exactly
    if the position says that the port has ended."""
    if position is None:
        raise bad_request("resume.history", f"port {port[:32]!r} has a history and no position")
    next_item = 0
    for number, chunk in enumerate(chunks):
        if chunk.first != next_item or (chunk.last and number < len(chunks) - 1):
            raise bad_request("resume.history", f"port {port!r}: a gap or repeat at item {chunk.first}, after item {next_item}")
        codes = chunk.codes
        item_count = len(chunk.text.token_ids) if chunk.HasField("text") else len(codes.codes) // max(codes.codebook_count, 1)
        if item_count != chunk.count:
            raise bad_request("resume.history", f"port {port!r}: a chunk says it has {chunk.count} items and has {item_count}")
        next_item += chunk.count
    if next_item != position.first or chunks[-1].last != position.ended:
        raise bad_request("resume.history", f"port {port!r}: {next_item} items are given, its position is {position.first}")


MAX_CLIENT_CHARACTERS = 64

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class CheckedOpen:
    """An Open that was checked. takes: ports of this stage that go to the next hop. checkpoints: its ports whose chunks must reach the
    caller before any output that later stages make from them. unwanted: its ports that go to nobody."""

    request: stage_pb2.Open
    takes: frozenset[str]
    checkpoints: frozenset[str]
    unwanted: frozenset[str]
    resumption: Resumption

    @property
    def attempts(self) -> tuple[int, ...]:
        """A value that orders the Opens of one session: a newer Open has a greater value."""
        return tuple(self.request.attempts)

    @property
    def ended_ports(self) -> frozenset[str]:
        """Ports on which nothing may come any more, because the caller has all of their items, or nobody wants them."""
        return self.unwanted | self.resumption.ended_ports

    def start(self, needs: Mapping[str, int]) -> Start:
        """Where the outputs go on. needs: as in Resumption.start."""
        return replace(self.resumption.start(needs), ended_ports=self.ended_ports)


async def check_open(request: stage_pb2.Open, description: stage_pb2.DescribeResponse, allow_list: AllowList) -> CheckedOpen:
    """Check an Open. Raises UNKNOWN_MODEL, REVISION_MISMATCH, or BAD_REQUEST with the bad field."""
    if _SESSION_ID.fullmatch(request.session_id) is None:
        raise bad_request("open.session_id", "must be 1 to 64 characters of A-Z a-z 0-9 _ -")
    if request.model != description.model:
        raise StageError("UNKNOWN_MODEL", f"this stage runs {description.model!r}, not {request.model[:64]!r}")
    if request.revision and request.revision != description.revision:
        raise StageError("REVISION_MISMATCH", f"this replica has revision {description.revision!r}")
    produced = {port.name: port for port in description.produces}
    for name in request.checkpoints:
        if name not in produced or not produced[name].compact:
            raise bad_request("open.checkpoints", f"{name[:32]!r} is not a compact output port of this stage")
    for name in ("client", "scope"):
        if len(getattr(request, name)) > MAX_CLIENT_CHARACTERS:
            raise bad_request(f"open.{name}", f"at most {MAX_CLIENT_CHARACTERS} characters")
    takes = _taken_by_next(request.route, produced)
    for name in request.unwanted:
        if name not in produced or name in takes or name in request.checkpoints:
            raise bad_request("open.unwanted", f"{name[:32]!r} is not an output port of this stage that goes to nobody")
    opening = CheckedOpen(
        request,
        takes=takes,
        checkpoints=frozenset(request.checkpoints),
        unwanted=frozenset(request.unwanted),
        resumption=Resumption.of(request, produced),
    )
    for name in (opening.takes - opening.checkpoints) & opening.resumption.positions.keys():
        raise bad_request("resume.positions", f"port {name!r} goes to the next hop only, which says where it goes on")
    for address in request.route[0].addresses if request.route else ():
        if not await allow_list.allows(address):
            raise bad_request("open.route.addresses", f"{address[:64]!r} is not on this stage's allow-list (--allow)")
    return opening


def _taken_by_next(route: Sequence[stage_pb2.Hop], produced: Mapping[str, stage_pb2.Port]) -> frozenset[str]:
    """The ports of this stage that the next hop takes; none if the route ends here. Raises BAD_REQUEST for an impossible route."""
    if not route:
        return frozenset()
    if any(hop.kind not in stage_pb2.StageKind.values() for hop in route):
        raise bad_request("open.route.kind", f"must be one of {stage_pb2.StageKind.keys()[1:]}")  # Without UNSPECIFIED.
    hop = route[0]
    for name in hop.takes:
        if name not in produced:
            raise bad_request("open.route.takes", f"{name[:32]!r} is not an output port of this stage")
    if not hop.takes:
        raise bad_request("open.route.takes", "the next hop takes no port of this stage")
    if not 1 <= len(hop.addresses) <= MAX_ADDRESSES:
        raise bad_request("open.route.addresses", f"1 to {MAX_ADDRESSES} addresses")
    return frozenset(hop.takes)
