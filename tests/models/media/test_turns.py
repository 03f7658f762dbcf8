"""Places for media, and who waits for one: clients in turn, and no client keeps all of them."""

from __future__ import annotations

import asyncio

import pytest

from helpers.waiting import until
from omnistage.models.media.decoder import media_places
from omnistage.models.media.errors import DecoderFull


async def test_clients_take_turns() -> None:
    turns = media_places(1, 100)
    served: list[str] = []

    async def one(client: str) -> None:
        await turns.enter(client)
        served.append(client)
        await asyncio.sleep(0)
        turns.leave(client)

    await turns.enter("first")
    tasks = [asyncio.create_task(one(client)) for client in "aaaaabbc"]
    await until(lambda: turns.waiting == 8)
    tasks[1].cancel()
    turns.leave("first")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert "".join(served) == "abcabaa"
    assert turns.waiting == 0


async def test_a_client_leaves_a_place_to_whoever_comes() -> None:
    """However many of its media wait, and however long one takes: each of another client's first media begins at once."""
    turns = media_places(3, 2000)
    many = [asyncio.create_task(turns.enter("many")) for _ in range(1000)]
    await until(lambda: turns.waiting == 998)
    await turns.enter("one")
    other = asyncio.create_task(turns.enter("other"))
    await until(lambda: turns.waiting == 999)
    turns.leave("one")
    await other
    turns.leave("many")
    await until(lambda: sum(task.done() for task in many) == 3)
    turns.leave("other")
    assert turns.waiting == 997
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert turns.waiting == 0


async def test_with_one_place_a_client_waits_for_one_medium_of_another() -> None:
    turns = media_places(1, 2000)
    await turns.enter("many")
    many = [asyncio.create_task(turns.enter("many")) for _ in range(1000)]
    await until(lambda: turns.waiting == 1000)
    one = asyncio.create_task(turns.enter("one"))
    await until(lambda: turns.waiting == 1001)
    turns.leave("many")
    await one
    assert not any(task.done() for task in many)
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)


async def test_where_all_wait_that_may_the_longest_line_gives_way() -> None:
    turns = media_places(1, 4)
    await turns.enter("many")
    many = [asyncio.create_task(turns.enter("many")) for _ in range(4)]
    await until(lambda: turns.waiting == 4)
    with pytest.raises(DecoderFull, match="4 media wait to be decoded: ask again later"):
        await turns.enter("many")
    others = [asyncio.create_task(turns.enter(client)) for client in "ab"]
    await asyncio.wait(many[2:])
    assert all(isinstance(task.exception(), DecoderFull) for task in many[2:])
    with pytest.raises(DecoderFull):
        await turns.enter("a")
    for client, following in (("many", others[0]), ("a", others[1]), ("b", many[0]), ("many", many[1])):
        turns.leave(client)
        await asyncio.wait_for(following, 60)
    turns.leave("many")
    assert turns.waiting == 0


async def test_a_line_that_was_cancelled_whole_takes_no_place() -> None:
    turns = media_places(2, 100)
    await turns.enter("a")
    waiting = [asyncio.create_task(turns.enter("a")) for _ in range(3)]
    await until(lambda: turns.waiting == 3)
    turns.leave("a")  # The first gets it, and is cancelled before it knows.
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert turns.waiting == 0
    await asyncio.gather(turns.enter("a"), turns.enter("b"))
