"""Connections of different channels are different connections."""

from __future__ import annotations

import grpc.aio

from helpers.ports import take_address
from omnistage.wire.channel import client_options, connect, server_options


async def test_a_new_channel_does_not_wait_out_the_backoff_of_an_older_one() -> None:
    """If an address was forgotten and is asked again, it is tried at once, whatever happened to an earlier channel there."""
    address = take_address()
    async with (
        grpc.aio.insecure_channel(address, options=client_options()) as before,
        grpc.aio.insecure_channel(address, options=client_options()) as after,
    ):
        state = before.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await before.wait_for_state_change(state)
            state = before.get_state()
        server = grpc.aio.server(options=server_options())
        server.add_insecure_port(address)
        await server.start()
        try:
            await connect(after, 10.0)
        finally:
            await server.stop(0)
