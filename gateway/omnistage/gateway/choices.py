"""Makes several answers to one request at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from omnistage.client.answer import Answer, collect
from omnistage.client.events import Event

Events = AsyncGenerator[Event, None]
Numbered = AsyncGenerator[tuple[int, Event], None]

MOST_WAITING = 16
"""The most events that wait to be sent to the client; when so many wait, the answers pause."""


async def collect_all(answers: Sequence[Events]) -> list[Answer]:
    """All answers, in order. If one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.create_task(collect_whole(events)) for events in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def merge_events(answers: Sequence[Events]) -> Numbered:
    """Yield (number of its answer, event) for the events of all answers, as they come. If one answer fails, the others are cancelled and
    its error is raised."""
    if len(answers) == 1:
        async with aclosing(answers[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(MOST_WAITING)
    tasks = [asyncio.create_task(_feed(number, events, queue)) for number, events in enumerate(answers)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        await _end(tasks)


async def collect_whole(events: Events) -> Answer:
    """One answer. Its events are closed at the end, also after an error."""
    async with aclosing(events):
        return await collect(events)


async def _feed(number: int, events: Events, queue: asyncio.Queue[tuple[int, Event | Exception | None]]) -> None:
    """Put all events into the queue as (number, event), and at the end None, or the error that ended them, in place of an event."""
    try:
        async with aclosing(events):
            async for event in events:
                await queue.put((number, event))
    except Exception as error:  # The reader of the queue raises the error.
        await queue.put((number, error))
    else:
        await queue.put((number, None))


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
