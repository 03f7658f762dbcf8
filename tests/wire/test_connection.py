"""The end of a connection without a call on it."""

from __future__ import annotations

import asyncio

import grpc.aio

from helpers.ports import take_address
from omnistage.wire.channel import ConnectionWatch, client_options, connect, server_options


async def test_it_is_lost_when_the_server_ends_and_not_before() -> None:
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options()) as channel:
        await connect(channel, 30.0)
        with ConnectionWatch(channel) as connection:
            lost = connection.lost
            assert connection.lost is lost and not connection.is_lost
            await server.stop(0)
            async with asyncio.timeout(30):
                await lost
            assert connection.is_lost


async def test_where_there_is_none_it_is_lost() -> None:
    async with grpc.aio.insecure_channel(take_address(), options=client_options()) as channel:
        with ConnectionWatch(channel) as connection:
            async with asyncio.timeout(30):
                await connection.lost
            assert connection.is_lost
