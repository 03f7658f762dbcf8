"""Makes things before they are requested: while the caller works with one thing, the next thing is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


async def make_ahead(source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yields the items of `source`. The source runs in a task of its own: it makes the next item while the caller works with an item, then
    waits. When this generator is closed, it closes the source first. Raises the source's error after all items that the source yielded."""
    items: list[T] = []
    item_ready, item_taken = asyncio.Event(), asyncio.Event()

    async def make() -> None:
        try:
            async for thing in source:
                items.append(thing)
                del thing
                item_ready.set()
                while items:
                    item_taken.clear()
                    await item_taken.wait()
        finally:
            await source.aclose()

    making = asyncio.create_task(make())
    making.add_done_callback(lambda _: item_ready.set())
    try:
        while True:
            while not items and not making.done():
                item_ready.clear()
                await item_ready.wait()
            if not items:
                making.result()
                return
            thing = items.pop()
            item_taken.set()
            yield thing
            del thing
    finally:
        await _end_task(making)
        del making  # Its error refers to this frame, which would be a cycle.


async def _end_task(task: asyncio.Task[None]) -> None:
    """Cancel `task` and wait for its end. If the caller is cancelled meanwhile, it waits all the same, and raises CancelledError at the
    end. The error of `task` is dropped, because the caller has seen it, or does not need it any more."""
    task.cancel()
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if not task.cancelled():
        task.exception()
    if cancelled:
        raise asyncio.CancelledError
