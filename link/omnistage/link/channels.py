"""The channel and the pulse of each address that a process calls."""

from __future__ import annotations

from types import TracebackType

import grpc.aio

from omnistage.link.hedge import Hedges
from omnistage.link.pulse import Pulses
from omnistage.wire.channel import MAX_MESSAGE_BYTES, client_options
from omnistage.wire.credentials import Credentials
from omnistage.wire.token import Token


class Channels:
    """One channel per address, kept for the life of the process or until it is forgotten. Addresses come from a configuration, or from a
    name in it; the code that follows a name forgets the addresses that the name no longer has.

    metadata: sent with every call of a stage, for the stage's guard. token: shown in it; None: the stages need no token.
    """

    def __init__(self, credentials: Credentials, max_message_bytes: int = MAX_MESSAGE_BYTES, token: Token | None = None) -> None:
        self.metadata = token.metadata if token is not None else ()
        self._credentials = credentials
        self._options = client_options(max_message_bytes)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.pulses = Pulses(self.get, self.metadata)
        """Signs of life of the addresses."""
        self.hedges = Hedges()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to an address, made at the first call."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._credentials.channel(address, self._options)
        return channel

    def forget(self, address: str) -> None:
        """Drop the channel of the address: the next `get` makes a new one, and the old one ends with its last user."""
        self._channels.pop(address, None)

    async def close(self) -> None:
        await self.pulses.close()
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> Channels:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
