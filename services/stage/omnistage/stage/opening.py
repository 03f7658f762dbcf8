"""An Open of a caller, checked before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omnistage.stage.allowlist import AllowList
from omnistage.stage.logic import Start
from omnistage.stage.resumption import Resumption
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError, bad_request
from omnistage.wire.limits import MAX_ADDRESSES

MAX_CLIENT_CHARACTERS = 64

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class CheckedOpen:
    """An Open that was checked. takes: ports of this stage that go to the next hop. checkpoints: its ports whose chunks must reach the
    caller before later stages' output made from them does. unwanted: its ports that go to nobody."""

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
    def ended(self) -> frozenset[str]:
        """Ports on which nothing may come any more, because the caller has all of their items, or nobody wants them."""
        return self.unwanted | self.resumption.ended

    def start(self, needs: Mapping[str, int]) -> Start:
        """Where the outputs go on. needs: as in Resumption.start."""
        return replace(self.resumption.start(needs), ended=self.ended)


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
        raise bad_request("open.route.kind", f"must be one of {stage_pb2.StageKind.keys()[1:]}")
    hop = route[0]
    for name in hop.takes:
        if name not in produced:
            raise bad_request("open.route.takes", f"{name[:32]!r} is not an output port of this stage")
    if not hop.takes:
        raise bad_request("open.route.takes", "the next hop takes no port of this stage")
    if not 1 <= len(hop.addresses) <= MAX_ADDRESSES:
        raise bad_request("open.route.addresses", f"1 to {MAX_ADDRESSES} addresses")
    return frozenset(hop.takes)
