"""Turns at reading large requests: nobody waits behind all that another client sent, or for ever, and nothing is left of who went away."""

from __future__ import annotations

import asyncio

import pytest

from omnistage.host.places import Client
from omnistage.router.admission import MAX_LARGE, Turns
from omnistage.wire.errors import StageError


class Line:
    """Callers that want a turn each, and the order in which they had it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.had: list[str] = []
        self.go = asyncio.Event()

    def want(self, host: str, name: str = "") -> asyncio.Task[None]:
        return asyncio.create_task(self._have(Client(host, name)))

    async def _have(self, client: Client) -> None:
        async with self._turns.turn(client):
            self.had.append(client.host)
            await self.go.wait()


async def settle() -> None:
    """Let every task come to where it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_clients_take_turns_however_much_each_of_them_wants():
    line = Line(Turns())
    tasks = [line.want(client) for client in ("a",) * 20 + ("b", "b", "c")]
    await settle()
    assert line.had == ["a"]
    line.go.set()
    await asyncio.gather(*tasks)
    assert line.had[:3] == ["a", "b", "c"] and line.had[3:6].count("b") == 1
    assert len(line.had) == 23


async def test_hosts_take_turns_however_many_keys_each_of_them_invents():
    line = Line(Turns())
    tasks = [line.want("a", f"key:{number}") for number in range(20)] + [line.want("b", "key:mine"), line.want("a"), line.want("b")]
    await settle()
    line.go.set()
    await asyncio.gather(*tasks)
    assert line.had[:4] in (["a", "b", "a", "b"], ["a", "b", "b", "a"]) and len(line.had) == 23


async def test_what_waits_is_bounded_and_one_client_leaves_room_for_others():
    line = Line(Turns())
    tasks = [line.want("greedy") for _ in range(MAX_LARGE)]
    await settle()
    other = line.want("other")
    await settle()
    refused = [task for task in tasks if task.done()]
    assert refused and not other.done()
    for task in refused:
        error = task.exception()
        assert isinstance(error, StageError) and (error.reason, bool(error.retry_delay_s)) == ("OVERLOADED", True)
    line.go.set()
    await asyncio.wait([*tasks, other])
    assert "other" in line.had and len(line.had) == MAX_LARGE - len(refused) + 1


@pytest.mark.parametrize("client", ["same", "other"])
async def test_a_wait_has_an_end(client: str):
    line = Line(Turns(limit_s=0.01))
    holding = line.want("same")
    await settle()
    with pytest.raises(StageError, match="OVERLOADED"):
        await line.want(client)
    line.go.set()
    await holding
    await line.want(client)
    assert line.had == ["same", client]


async def test_nothing_is_left_of_who_goes_away():
    line = Line(Turns())
    tasks = [line.want(client) for client in ("a", "a", "b", "b", "c")]
    await settle()
    for task in tasks[:4]:
        task.cancel()
    await asyncio.wait(tasks[:4])
    await settle()
    assert line.had == ["a", "c"]
    line.go.set()
    await asyncio.gather(*[line.want("a") for _ in range(3)], tasks[4])
    assert line.had == ["a", "c", "a", "a", "a"]
