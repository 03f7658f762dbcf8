"""A client of a router that plays what a test says: for tests of what the client makes of answers, refusals and losses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from helpers.peer import Play, PlayingPeer, Wire, listening
from omnistage.client import AsyncOmni


@asynccontextmanager
async def playing(*plays: Play, **options: Any) -> AsyncIterator[tuple[PlayingPeer, Wire, AsyncOmni]]:
    """The peer, the wire to it, and a client at the end of the wire. options: of the client."""
    peer = PlayingPeer(*plays)
    async with listening(peer) as wire, AsyncOmni(address=wire.address, **options) as omni:
        yield peer, wire, omni
