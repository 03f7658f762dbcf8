"""A text that was to be spoken: without a single sample it is an error, not an answer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from helpers.peer import TEXT, Events, PlayingPeer, answer, event, listening
from omnistage.client import AsyncOmni, Done, Event, NotSpokenError, Omni, TextDelta
from omnistage.v1 import chunk_pb2, omni_pb2

MUTE: Events = [message for message in answer(omni_pb2.GenerateRequest()) if message.chunk.port != "audio"]
"""An answer without a port of sound."""

CODED: Events = [*MUTE[:-1], event(chunk_pb2.Chunk(port="codes", last=True)), MUTE[-1]]
"""An answer whose speech stays codes."""

EMPTY: Events = [*MUTE[:-1], event(chunk_pb2.Chunk(port="audio", last=True)), MUTE[-1]]
"""An answer whose sound ends before the first sample."""


@pytest.mark.parametrize(("events", "why"), [(MUTE, "it has no Talker"), (CODED, "it has no Code2Wav"), (EMPTY, "no sound came")])
async def test_what_cannot_be_spoken_is_an_error_with_a_name(events: Events, why: str) -> None:
    async with listening(PlayingPeer(events)) as wire, AsyncOmni(address=wire.address) as omni:
        with pytest.raises(NotSpokenError, match=f"nothing of this text could be spoken by peer: {why}") as caught:
            await omni.say("...")
        assert "voice" in caught.value.hint
        assert (await omni.say("Hi")).audio is not None


async def test_a_stream_tells_it_at_its_end_instead_of_done() -> None:
    heard: list[Event] = []
    async with listening(PlayingPeer(MUTE)) as wire, AsyncOmni(address=wire.address) as omni, aclosing(omni.stream_say("...")) as stream:
        with pytest.raises(NotSpokenError):
            async for told in stream:
                heard.append(told)
    assert "".join(told.text for told in heard if isinstance(told, TextDelta)) == TEXT
    assert not any(isinstance(told, Done) for told in heard)


async def test_the_sync_client_tells_it_too() -> None:
    def say(address: str) -> None:
        with Omni(address=address) as omni, pytest.raises(NotSpokenError):
            omni.say("...", outputs=["text", "audio"])

    async with listening(PlayingPeer(MUTE)) as wire:
        await asyncio.to_thread(say, wire.address)


async def test_who_asked_for_no_sound_misses_none(tmp_path: Path) -> None:
    async with listening(PlayingPeer(MUTE, MUTE)) as wire, AsyncOmni(address=wire.address) as omni:
        assert (await omni.say("...", outputs=["text"])).text == TEXT
        answered = await omni.generate("Hi")
    assert answered.audio is None  # an answer is worth having without its sound
    with pytest.raises(NotSpokenError, match="no sound"):
        answered.save(tmp_path / "absent.wav")
    assert not (tmp_path / "absent.wav").exists()
