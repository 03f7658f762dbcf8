"""Places for media, and who waits for one: clients in turn, and no client keeps all of them."""

from __future__ import annotations

import asyncio

import pytest

from helpers.waiting import until
from omnistage.models.media.decoder import media_places
from omnistage.models.media.terms import DecoderFull
from omnistage.models.turns import WaitingPlaces, has_room


async def serve(turns: WaitingPlaces, client: str, served: list[str]) -> None:
    """Wait for a place, note the client in `served`, and give the place back in the next turn of the loop."""
    await turns.enter(client)
    served.append(client)
    await asyncio.sleep(0)
    turns.leave(client)


async def test_clients_take_turns() -> None:
    turns, served = media_places(1, 100), list[str]()
    await turns.enter("first")
    tasks = [asyncio.create_task(serve(turns, client, served)) for client in "aaaaabbc"]
    await until(lambda: turns.waiting == 8)
    tasks[1].cancel()
    turns.leave("first")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert "".join(served) == "abcabaa"
    assert turns.waiting == 0


async def test_hosts_take_turns_and_the_clients_of_a_host_do() -> None:
    turns, served = media_places(1, 5), list[str]()
    await turns.enter("first")
    tasks = [asyncio.create_task(serve(turns, client, served)) for client in ("x/a", "x/a", "x/b", "x/c", "y/d")]
    await until(lambda: turns.waiting == 5)
    late = [asyncio.create_task(serve(turns, client, served)) for client in ("z/e", "y/f")]
    await until(lambda: tasks[1].done() and tasks[3].done())
    with pytest.raises(DecoderFull):
        await turns.enter("x/g")
    turns.leave("first")
    ended = await asyncio.gather(*tasks, *late, return_exceptions=True)
    assert served == ["x/a", "y/d", "z/e", "x/b", "y/f"]
    assert [type(end) for end in ended] == [type(None), DecoderFull, type(None), DecoderFull] + 3 * [type(None)]
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


def test_a_host_without_bytes_may_take_all_that_is_free_and_another_only_its_share() -> None:
    assert has_room(10, 0, 0, 10) and has_room(4, 6, 0, 10) and not has_room(5, 6, 0, 10)
    assert has_room(6, 1, 1, 10) and not has_room(9, 1, 1, 10)
