"""Speech that does not come to its end, and drawings: their client leaves, or a stage is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from helpers import servers
from helpers.gateway import gateway
from helpers.openai_document import events_of
from helpers.servers import ServerProcess, ServerProcesses, all_free, watch_until
from helpers.waiting import until

SLOW_S = 0.05
ENDLESS = " ".join(["word"] * 20_000)
"""It would be spoken for minutes."""


@pytest.fixture
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcesses, ServerProcess]]:
    """A toy that speaks slowly, of its own for each test, and a gateway."""
    folder = tmp_path_factory.mktemp("slow")
    with servers.stack(folder, options={"interval_s": SLOW_S}) as stack, gateway(stack.address, folder) as door:
        yield stack, door


def asked(stream_format: str = "audio") -> dict[str, Any]:
    return {"model": "tts-1", "voice": "alloy", "input": ENDLESS, "response_format": "wav", "stream_format": stream_format}


def ends(door: ServerProcess) -> list[tuple[int, str]]:
    """Status and reason of each request that has ended."""
    lines = [json.loads(line) for line in door.log().splitlines()]
    return [(line["status"], line["reason"]) for line in lines if line["event"] == "http.done"]


async def test_who_leaves_in_mid_speech_frees_the_stages(slow: tuple[ServerProcesses, ServerProcess]) -> None:
    stack, door = slow
    async with httpx2.AsyncClient(base_url=f"http://{door.address}", timeout=60) as client:
        for stream_format in ("audio", "sse"):
            async with client.stream("POST", "/v1/audio/speech", json=asked(stream_format)) as answer:
                assert await anext(answer.aiter_bytes())
            await all_free(list(stack.addresses.values()))
    await until(lambda: ends(door) == [(200, "CANCELLED")] * 2)


async def test_what_a_lost_stage_cuts_off_is_not_taken_for_the_whole(slow: tuple[ServerProcesses, ServerProcess]) -> None:
    """A file has no words for it: its connection breaks. Events have."""
    stack, door = slow
    heard: list[bytes] = []
    async with (
        httpx2.AsyncClient(base_url=f"http://{door.address}", timeout=60) as client,
        client.stream("POST", "/v1/audio/speech", json=asked()) as file,
        client.stream("POST", "/v1/audio/speech", json=asked("sse")) as told,
    ):
        pieces = file.aiter_bytes()
        heard.append(await anext(pieces))
        os.kill(stack.stages["code2wav"].pid, signal.SIGKILL)
        with pytest.raises(httpx2.RemoteProtocolError):
            async for piece in pieces:
                heard.append(piece)
        *deltas, (_, last) = events_of((await told.aread()).decode())
    assert heard[0].startswith(b"RIFF") and {data["type"] for _, data in deltas} <= {"speech.audio.delta"}
    assert last["error"]["reason"] == "STAGE_LOST" and last["error"]["type"] == "server_error"
    await until(lambda: ends(door) == [(200, "STAGE_LOST")] * 2)
    await all_free([stack.addresses[kind] for kind in ("thinker", "talker")])


async def test_who_leaves_before_a_picture_is_drawn_frees_the_stage(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whether it comes whole or as events."""
    folder = tmp_path_factory.mktemp("drawing")
    options = {"interval_s": SLOW_S}
    with (
        servers.stack(folder, kinds=["diffusion"], pipeline="toy-film", family="toy-film", options=options) as stack,
        gateway(stack.address, folder) as door,
    ):
        for stream in (False, True):
            drawing = {"prompt": "a cat", "stream": stream, "include_events": stream, "steps": 1000}
            async with httpx2.AsyncClient(base_url=f"http://{door.address}", timeout=60) as client:
                waiting = asyncio.create_task(client.post("/v1/images/generations", json=drawing))
                await watch_until(stack.addresses["diffusion"], lambda report: report.sessions > 0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            await all_free(list(stack.addresses.values()))
        await until(lambda: [reason for _, reason in ends(door)] == ["CANCELLED"] * 2)
