"""One thing is made while another is looked at, never more, and nothing is left when somebody has seen enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from omnistage.models.worker import make_ahead


class NumberSource:
    """Numbers. made: so many were asked for."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.made, self.closed = count, error, 0, False

    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                self.made = number + 1
                await asyncio.sleep(0)
                yield number
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.closed = True


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_gives_what_the_source_gives() -> None:
    for count in (0, 1, 2, 30):
        source = NumberSource(count)
        assert [number async for number in make_ahead(source.numbers())] == list(range(count))
        assert source.closed


async def test_the_next_is_made_while_one_is_looked_at_and_none_behind_it() -> None:
    source = NumberSource(30)
    async with aclosing(make_ahead(source.numbers())) as made:
        for number in range(10):
            assert await anext(made) == number
            await turns()
            assert source.made == number + 2
    assert source.closed and source.made == 11


async def test_an_error_comes_behind_what_was_made() -> None:
    source = NumberSource(3, ArithmeticError("three"))
    seen = list[int]()
    with pytest.raises(ArithmeticError, match="three"):
        async for number in make_ahead(source.numbers()):
            seen.append(number)
            await turns()
    assert seen == [0, 1, 2] and source.closed


async def test_who_leaves_leaves_nothing_behind() -> None:
    source = NumberSource(30)
    async with aclosing(make_ahead(source.numbers())) as made:
        await anext(made)
    assert source.closed and len(asyncio.all_tasks()) == 1


async def test_two_in_a_row_make_two_ahead() -> None:
    source = NumberSource(30)
    async with aclosing(make_ahead(source.numbers())) as one, aclosing(make_ahead(one)) as two:
        assert await anext(two) == 0
        await turns()
        assert source.made == 3


async def test_it_closes_the_source_whatever_is_cancelled() -> None:
    """A source that takes its time to close."""
    closing, may_close, closed = asyncio.Event(), asyncio.Event(), False

    async def slow() -> AsyncGenerator[int, None]:
        nonlocal closed
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closing.set()
            await may_close.wait()
            closed = True

    async def look() -> None:
        async with aclosing(make_ahead(slow())) as made:
            async for _ in made:
                pass

    looking = asyncio.create_task(look())
    await turns()
    for _ in range(3):
        looking.cancel()
        await turns()
    assert closing.is_set() and not looking.done()
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert closed
