"""Follows an answer while it comes: shows it, gives its sound to players, and keeps the parts that are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from omnistage.cli.screen import TURNS_PER_S, Screen, Spoken
from omnistage.client.errors import ProtocolError
from omnistage.client.events import Alignment, AudioChunk, Done, Event, Picture, TextDelta, ThoughtDelta


async def follow(
    events: AsyncGenerator[Event, None], screen: Screen, keep_sound: bool, ears: Sequence[Callable[[AudioChunk], object]] = ()
) -> tuple[Spoken, Done]:
    """Show an answer while it comes; returns the answer and its last event, `Done`. keep_sound: keep the chunks of sound in the answer.
    ears: functions that are called with each chunk of sound; they must not wait. Raises ProtocolError if `Done` does not come."""
    spoken = Spoken()
    async with aclosing(events):
        with screen:
            turning = asyncio.create_task(_turn(screen))
            try:
                async for event in events:
                    match event:
                        case TextDelta():
                            turning.cancel()
                            spoken.text += event.text
                            spoken.tokens += len(event.token_ids)
                            screen.show(spoken, event.text)
                        case ThoughtDelta():
                            spoken.thought += event.text
                            spoken.tokens += len(event.token_ids)
                            if screen.think(spoken, event.text):
                                turning.cancel()
                        case AudioChunk():
                            turning.cancel()
                            spoken.audio_s += event.duration_s
                            if keep_sound:
                                spoken.sounds.append(event)
                            for ear in ears:
                                ear(event)
                            screen.show(spoken, "")
                        case Alignment():
                            spoken.words += event.words
                        case Picture():
                            spoken.pictures += event.preview_step is None
                        case Done():
                            return spoken, event
            finally:
                turning.cancel()
                await asyncio.wait({turning})
    raise ProtocolError("the stream ended without its account")


async def _turn(screen: Screen) -> None:
    """Update the waiting line for ever; the caller cancels this when the first text or sound comes."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    with suppress(OSError):  # The reader is gone; the next piece of the answer raises the error.
        while True:
            await asyncio.sleep(1 / TURNS_PER_S)
            screen.wait(clock() - begun)
