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
    answer = Spoken()
    async with aclosing(events):
        with screen:
            turning = asyncio.create_task(_turn(screen))
            try:
                async for event in events:
                    match event:
                        case TextDelta():
                            turning.cancel()
                            answer.text += event.text
                            answer.tokens += len(event.token_ids)
                            screen.show(answer, event.text)
                        case ThoughtDelta():
                            answer.thought += event.text
                            answer.tokens += len(event.token_ids)
                            if screen.think(answer, event.text):
                                turning.cancel()
                        case AudioChunk():
                            turning.cancel()
                            answer.audio_s += event.duration_s
                            if keep_sound:
                                answer.sounds.append(event)
                            for ear in ears:
                                ear(event)
                            screen.show(answer, "")
                        case Alignment():
                            answer.words += event.words
                        case Picture():
                            answer.pictures += event.preview_step is None
                        case Done():
                            return answer, event
            finally:
                turning.cancel()
                await asyncio.wait({turning})
    raise ProtocolError("the stream ended without its account")


async def _turn(screen: Screen) -> None:
    """Update the waiting line for ever; the caller cancels this when the first text or sound comes."""
    clock = asyncio.get_running_loop().time
    begin_s = clock()
    with suppress(OSError):  # The reader is gone; the next piece of the answer raises the error.
        while True:
            await asyncio.sleep(1 / TURNS_PER_S)
            screen.wait(clock() - begin_s)
