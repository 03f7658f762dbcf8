"""Limits of time whose error keeps no objects alive."""

from __future__ import annotations

import asyncio
import time
import weakref

import pytest

from omnistage.wire.calls import within
from omnistage.wire.errors import StageError


class HeldRequest:
    """An object that may be large."""


def late() -> StageError:
    return StageError("DEADLINE", "too late")


async def test_what_takes_longer_ends_with_the_error_that_it_was_given() -> None:
    with pytest.raises(StageError, match="too late"):
        async with within(0.01, late):
            await asyncio.Event().wait()
    async with within(60, late):
        await asyncio.sleep(0)


async def test_time_in_which_the_loop_was_held_up_is_not_the_other_sides() -> None:
    came = asyncio.Event()
    async with within(0.4, late):
        asyncio.get_running_loop().call_soon(time.sleep, 0.6)
        asyncio.get_running_loop().call_later(0.7, came.set)
        await came.wait()
    with pytest.raises(StageError, match="too late"):
        async with within(0.4, late):
            asyncio.get_running_loop().call_soon(time.sleep, 0.6)
            await asyncio.Event().wait()


async def test_a_moment_that_was_agreed_on_stays_where_it_is() -> None:
    came = asyncio.Event()
    with pytest.raises(StageError, match="too late"):
        async with within(0.4, late, counts_all=True):
            asyncio.get_running_loop().call_soon(time.sleep, 0.6)
            asyncio.get_running_loop().call_later(0.7, came.set)
            await came.wait()


async def test_a_timeout_of_something_within_is_not_taken_for_its_own() -> None:
    with pytest.raises(TimeoutError, match="another"):
        async with within(60, late):
            raise TimeoutError("another")


async def test_a_cancelled_task_stays_cancelled() -> None:
    async def wait() -> None:
        async with within(60, late):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.usefixtures("collected_by_hand")
async def test_a_task_that_ends_with_its_error_keeps_no_request() -> None:
    async def serve(request: HeldRequest) -> None:
        async with within(0.01, late):
            await asyncio.Event().wait()

    kept = weakref.ref(request := HeldRequest())
    task = asyncio.create_task(serve(request))
    del request
    await asyncio.wait({task})
    assert kept() is not None, "the error leads to it"
    assert isinstance(task.exception(), StageError)
    del task
    assert kept() is None
