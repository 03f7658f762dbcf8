"""Replicas that are found under a name: they come and go with its addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest
from pydantic import ValidationError

from helpers import waiting
from helpers.ask import ask, request
from helpers.servers import local_chain, local_router, omni_stub, stage_stub
from helpers.watching import SETTLE_S, thinker, until, waiting_session, watched
from omnistage.host.addresses import Name, SystemResolver, check_replica_address, name_of
from omnistage.router.placement import DRAINING, SERVING, Placement
from omnistage.router.settings import RouterSettings


class ZoneOfNames:
    """The addresses of every name, as a test sets them; None: no answer. asked: set at every lookup."""

    def __init__(self) -> None:
        self.addresses: Collection[str] | None = None
        self.asked = asyncio.Event()

    async def __call__(self, name: Name) -> Collection[str]:
        self.asked.set()
        if self.addresses is None:
            raise OSError("no such name")
        return self.addresses

    async def looked_up(self) -> None:
        """Return when what is set now was answered and taken in: at the start of the second lookup from now."""
        async with asyncio.timeout(SETTLE_S):
            for _ in range(2):
                self.asked.clear()
                await self.asked.wait()


async def next_report(placement: Placement, address: str) -> None:
    """Return when a replica has reported its load once more."""
    (replica,) = [replica for replica in placement.all() if replica.address == address]
    load = replica.load
    await waiting.until(lambda: replica.load is not load)


def test_an_address_is_plain_or_a_name():
    assert name_of(check_replica_address("dns:///talker:50051")) == Name("talker", 50051)
    assert str(Name("talker", 50051)) == "dns:///talker:50051"
    for plain in ("127.0.0.1:1", "talker:50051", "[::1]:50051"):
        assert name_of(check_replica_address(plain)) is None
    wrong_forms = ("", "talker", "dns:///talker", "dns://zone/talker:50051", "unix:socket", "a:b:1", "dns:///a..b:1", "dns:///a:1/x")
    for wrong in (*wrong_forms, "talker:99999999"):
        with pytest.raises(ValueError, match="dns:///NAME:PORT stands for all addresses"):
            check_replica_address(wrong)
    for wrong in ("dns:///talker:65536", "dns:///talker:99999"):
        with pytest.raises(ValueError, match="no possible port"):
            check_replica_address(wrong)


def test_the_router_refuses_other_addresses():
    assert RouterSettings(stages="talker=dns:///talker:50051").stages == (("talker", "dns:///talker:50051"),)
    with pytest.raises(ValidationError, match="dns:///NAME:PORT stands for all addresses"):
        RouterSettings(stages="talker=unix:socket")


async def test_the_system_knows_this_host():
    assert await SystemResolver()(Name("localhost", 50051)) in (["127.0.0.1:50051"], ["[::1]:50051"])


async def test_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(OSError):  # Its text is the system's.
        await SystemResolver()(Name("name.invalid", 50051))


async def test_replicas_come_and_go_with_the_addresses_of_their_name(tmp_path: Path):
    """DNS decides which replica gets a session; a session runs on where it is; silence of DNS changes nothing."""
    zone = ZoneOfNames()
    with thinker(tmp_path) as one, thinker(tmp_path) as other:
        one.wait_ready()
        other.wait_ready()
        async with watched({"thinker": ["dns:///thinker:50051"]}, zone) as placement:
            await zone.looked_up()
            assert placement.all() == []

            zone.addresses = [one.address]
            await until(placement, {one.address: SERVING})
            zone.addresses = [one.address, other.address]
            await until(placement, {one.address: SERVING, other.address: SERVING})
            assert set(placement.place("thinker")) == {one.address, other.address}

            for silence in (None, ()):
                zone.addresses = silence
                await zone.looked_up()
                await until(placement, {one.address: SERVING, other.address: SERVING})

            async with stage_stub(one.address) as stub:
                caller = await waiting_session(stub)
                zone.addresses = [other.address]
                await until(placement, {one.address: DRAINING, other.address: SERVING})
                changed = placement.changed
                await next_report(placement, one.address)
                assert not changed.is_set()
                assert placement.place("thinker") == [other.address]
                caller.call.cancel()

            zone.addresses = [one.address, other.address]  # it was only slow to get ready
            await until(placement, {one.address: SERVING, other.address: SERVING})

            zone.addresses = [other.address]
            await zone.looked_up()
            one.process.kill()
            await until(placement, {other.address: SERVING})


async def test_a_router_finds_its_stages_under_a_name():
    async with local_chain() as stages:
        names = {kind: f"dns:///localhost:{stage.address.rpartition(':')[2]}" for kind, stage in stages.items()}
        async with local_router(names) as router, omni_stub(router.address) as stub:
            (await ask(stub, request("hello", 1))).check_toy(1, "hello")
