"""Tasks that must last as long as their process."""

from __future__ import annotations

import asyncio

import pytest

from omnistage.host.background import LastingTasks


async def fail() -> None:
    raise ValueError("why")


async def end() -> None:
    return


@pytest.mark.parametrize("work", [fail, end])
async def test_whatever_ends_one_is_told_by_its_name(work: object):
    tasks = LastingTasks()
    tasks.start("other", asyncio.Event().wait())  # type: ignore[arg-type]
    tasks.start("first", fail() if work is fail else end())
    async with asyncio.timeout(10):
        assert await tasks.broken == "task first ended"
    await tasks.close()


async def test_ending_all_of_them_breaks_nothing():
    tasks = LastingTasks()
    tasks.start("one", asyncio.Event().wait())  # type: ignore[arg-type]
    tasks.start("two", asyncio.Event().wait())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await tasks.close()
    assert tasks.broken.cancelled()
