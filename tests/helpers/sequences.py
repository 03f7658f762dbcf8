"""All that an engine made for one request."""

from __future__ import annotations

from omnistage.engine.request import SequenceEvent
from omnistage.engine.sequence import SequenceStream
from omnistage.engine.types import Item


async def read(stream: SequenceStream) -> list[SequenceEvent]:
    """The events of a stream to its end, which it is closed after."""
    events: list[SequenceEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await stream.take()
    await stream.aclose()
    return events


def items(events: list[SequenceEvent]) -> list[Item]:
    return [event.item for event in events if event.item is not None]
