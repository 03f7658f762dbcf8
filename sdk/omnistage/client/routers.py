"""Chooses a router among those that a client may ask: the first that answers, and the next one when it is lost."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from omnistage.client.address import is_local, is_unknown, split
from omnistage.client.channel import INSECURE, ClientCredentials, wait_for_ends
from omnistage.client.errors import ClosedError, UnavailableError
from omnistage.client.key import ApiKey, UnencryptedKeyWarning
from omnistage.v1 import omni_pb2_grpc

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub

TURN_S = 1.0
"""Seconds that one of several addresses may take to connect before the next one is tried. A host that is down does not even refuse."""

SHORT_S = 1.0
"""If a connection was waited for fewer seconds than this, the error advises a longer time limit: the router may be there."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router that was connected a moment ago. stub: makes calls to it. metadata: to be sent with each call; it has the caller's key."""

    address: str
    stub: OmniServiceAsyncStub
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def warn(message: str) -> None:
    """Warn that a key is sent where others can read it. message: the whole text."""
    warnings.warn(message, UnencryptedKeyWarning, stacklevel=2)


class Routers:
    """The channels to the routers at some addresses, one for each, opened when it is first needed; all on one event loop.

    address: HOST:PORT, or several with commas between them; BadRequestError for any other text. The first that answers is used until it is
    lost, then the next one, and after the last the first.

    is_trusted: for addresses that no person named: called with the address before each use; if it returns False, UnavailableError is
    raised. warn: called once for each address, before a key goes there unencrypted.
    """

    def __init__(
        self,
        address: str,
        is_trusted: Callable[[str], bool] | None = None,
        *,
        credentials: ClientCredentials = INSECURE,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self._addresses = split(address)
        self._is_trusted = is_trusted
        self._credentials = credentials
        self._warn = warn
        self._warned: set[str] = set()
        """Addresses that are local, or that `warn` has been called for."""
        self._resolved: set[str] = set()
        """Addresses whose host name has been resolved before. If it stops resolving, its router is probably starting again: wait for it."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._next = 0  # index in `_addresses` of the address in use
        self._waits: set[asyncio.Timeout] = set()  # one for each caller in `connect`; `close` lets them end
        self._watches: set[asyncio.Task[None]] = set()  # gRPC's watches of the states of channels
        self._closed = False

    @property
    def address(self) -> str:
        """The address in use, or the first to be tried."""
        return self._addresses[self._next]

    async def connect(self, timeout_s: float, key: ApiKey | None = None) -> Router:
        """The first router that is connected, for a caller with this key. Raises UnavailableError if none is connected within
        `timeout_s` seconds, no host is known, or the router is not trusted; ClosedError."""
        try:
            async with asyncio.timeout(timeout_s) as wait:
                self._waits.add(wait)
                try:
                    address = await self._first_connected()
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if self._closed:
                raise ClosedError("the client was closed while it connected") from None
            addresses = ", ".join(self._addresses)
            hint = f"Give more time: {{timeout_s}}. {UnavailableError.ADVICE}" if timeout_s < SHORT_S else ""
            message = f"no server answers at {addresses} (waited {timeout_s:g} s)"
            raise UnavailableError(message, hint=hint, code=grpc.StatusCode.UNAVAILABLE) from None
        # Checked after the connection was made, because meanwhile another process may have begun to listen there.
        if self._is_trusted is not None and not await asyncio.to_thread(self._is_trusted, address):
            hint = f"If you trust it, name it: {{address={address}}}."
            raise UnavailableError(f"who listens at {address} by now is another user of this machine, or nobody", hint=hint)
        stub = omni_pb2_grpc.OmniServiceStub(self._channel(address))
        if key is None:
            return Router(address, stub)
        await self._watch_key(address)
        return Router(address, stub, key.metadata)

    async def _watch_key(self, address: str) -> None:
        """Warn before a key first goes unencrypted to another host. If the program turns the warning into an error, no key is sent."""
        if self._credentials.is_encrypted or address in self._warned:
            return
        if not await is_local(address):
            self._warn(f"the API key goes to {address} unencrypted: whoever is on the way can read it; use a tunnel, or a trusted network")
        self._warned.add(address)

    def lost(self, address: str) -> None:
        """Ask the next address from now on. Several calls to one router may all report its loss."""
        if address == self.address:
            self._next = (self._next + 1) % len(self._addresses)

    async def close(self) -> None:
        """Close all channels. Calls on them are cancelled; callers that wait for a connection get ClosedError."""
        self._closed = True
        for wait in self._waits:
            wait.reschedule(0.0)  # gRPC does not wake callers that wait for the state of a closed channel
        for channel in self._channels.values():
            await channel.close()
        await wait_for_ends(self._watches)

    async def _first_connected(self) -> str:
        """Try the addresses in a circle until one is connected, and return it. Raises UnavailableError if no host is known."""
        while True:
            unknown = 0
            for number in self._circle():
                address = self._addresses[number]
                if await self._is_unknown(address):
                    unknown += 1
                elif await self._is_connected(address):
                    self._next = number
                    return address
            if unknown == len(self._addresses):
                raise UnavailableError(f"no such host: {', '.join(self._addresses)}", hint="Check the spelling of the host name.")

    async def _is_unknown(self, address: str) -> bool:
        """Whether no name service knows the host now, and none knew it before."""
        if address in self._resolved:
            return False
        if await is_unknown(address):
            return True
        self._resolved.add(address)
        return False

    def _circle(self) -> Iterator[int]:
        """Yields the index of every address once, beginning with the address in use."""
        begin = self._next
        for step in range(len(self._addresses)):
            yield (begin + step) % len(self._addresses)

    async def _is_connected(self, address: str) -> bool:
        """Wait for the connection; returns False if it failed, or if it took TURN_S and there are other addresses."""
        channel = self._channel(address)
        is_only = len(self._addresses) == 1
        try:
            async with asyncio.timeout(None if is_only else TURN_S):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    # A failure that is seen here is an old one, and gRPC tries again by itself, so wait for the next state.
                    await self._change_of(channel, state)
                    state = channel.get_state(try_to_connect=True)
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not is_only:
                        return False
        except TimeoutError:
            return False
        return True

    async def _change_of(self, channel: grpc.aio.Channel, state: grpc.ChannelConnectivity) -> None:
        """Wait until the channel leaves the state. gRPC cannot cancel its watch, so that goes on without this caller, and `close` waits
        for its end."""
        watch = asyncio.create_task(channel.wait_for_state_change(state))
        self._watches.add(watch)
        watch.add_done_callback(self._drop_watch)
        await asyncio.shield(watch)

    def _drop_watch(self, watch: asyncio.Task[None]) -> None:
        """Forget a watch that has ended, and read its error, which asyncio logs otherwise."""
        self._watches.discard(watch)
        if not watch.cancelled():
            watch.exception()

    def _channel(self, address: str) -> grpc.aio.Channel:
        """The channel to an address, made when it is first needed. Raises ClosedError."""
        if self._closed:
            raise ClosedError("this client is closed")
        if address not in self._channels:
            self._channels[address] = self._credentials.channel(address)
        return self._channels[address]
