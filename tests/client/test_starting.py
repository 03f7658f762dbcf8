"""A pipeline that is starting is waited for, for a while; then the refusal stands as it came."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from helpers.peer import TEXT, PlayingPeer, listening
from helpers.servers import local_router, local_stage, toy_logic
from helpers.terminal import Terminal
from omnistage.client import AsyncOmni, Failover, StartingError, UnavailableError
from omnistage.client.connection import START_PATIENCE_S, Pipeline
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import StageError


def starts(retry_delay_s: float) -> StageError:
    """A router's error for a pipeline that is not ready."""
    return StageError("STARTING", "film starts", metadata={"pipeline": "film"}, retry_delay_s=retry_delay_s)


WAITS = "film is still starting; waiting up to 30 s"


async def test_it_is_asked_again_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omnistage.client")
    peer = PlayingPeer(starts(0.02), starts(0.02))
    async with listening(peer) as wire, AsyncOmni(address=wire.address) as omni:
        answer = await omni.generate("Hi", max_tokens=5)
    assert (answer.text, answer.failovers) == (TEXT, ())
    assert caplog.messages == [WAITS], "once for a call"
    first, second, third = peer.requests
    assert first == second == third and first.request_id


@pytest.mark.parametrize(("delay_s", "timeout_s"), [(START_PATIENCE_S + 1, 120.0), (5.0, 4.0)], ids=["patience", "limit"])
async def test_the_refusal_stands_where_it_would_take_too_long(delay_s: float, timeout_s: float) -> None:
    """At once: nobody is to wait for what cannot come in time."""
    peer = PlayingPeer(starts(delay_s))
    async with listening(peer) as wire, AsyncOmni(address=wire.address) as omni:
        with pytest.raises(StartingError, match="film starts") as refused:
            await omni.generate("Hi", timeout_s=timeout_s)
    assert (refused.value.pipeline, refused.value.retry_delay_s, refused.value.reason) == ("film", delay_s, "STARTING")
    assert isinstance(refused.value, UnavailableError) and "replicas()" in refused.value.hint
    assert len(peer.requests) == 1


async def test_a_terminal_shows_what_is_waited_for(tmp_path: Path) -> None:
    """Once, above the answer; a script is not told."""
    for words in (["ask", "Hi", "--no-play"], ["draw", "Hi", "--out", str(tmp_path / "x.png")]):
        peer = PlayingPeer(starts(0.02), starts(0.02))
        async with listening(peer) as wire:
            terminal = Terminal(120, 30)
            await asyncio.to_thread(terminal.run, [*words, "--address", wire.address])
            assert len(peer.requests) == 3 and terminal.lines.count(WAITS) == 1 and terminal.lines[0] == WAITS
    async with listening(PlayingPeer(starts(0.02))) as wire:
        terminal = Terminal(120, 30)
        assert await asyncio.to_thread(terminal.run, ["ask", "Hi", "--json", "--address", wire.address]) == 0
        assert WAITS not in terminal.lines


async def test_who_waits_can_be_cancelled() -> None:
    peer = PlayingPeer(starts(20))
    async with listening(peer) as wire, AsyncOmni(address=wire.address) as omni:
        waiting = asyncio.create_task(omni.generate("Hi"))
        await peer.asked(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await omni.generate("Hi")).text == TEXT


async def test_a_router_that_came_back_and_is_not_ready_is_waited_for() -> None:
    """In the middle of an answer, which goes on then."""
    peer = PlayingPeer(6, starts(0.02), starts(0.02))
    async with listening(peer) as wire, AsyncOmni(address=wire.address) as omni:
        text, failovers = "", []
        async for event in omni.stream("Hi"):
            text += getattr(event, "text", "")
            if text and len(peer.requests) == 1:
                wire.cut()
            if isinstance(event, Failover):
                failovers.append(event.stage)
    assert text == TEXT and failovers == ["router"]
    assert [request.HasField("resume") for request in peer.requests] == [False, True, True, True]


def test_starting_pipelines_are_listed_behind_the_ready_ones() -> None:
    listed = omni_pb2.ListModelsResponse(
        models=[omni_pb2.Model(name="words", stages=[stage_pb2.STAGE_KIND_THINKER])], starting=[omni_pb2.Model(name="film")]
    )
    words, film = Pipeline.all_of(listed)
    assert (words.name, words.state, words.stages, film.name, film.state) == ("words", "ready", ("thinker",), "film", "starting")


async def test_a_router_with_a_pipeline_that_starts_answers_with_the_other(free_port: int) -> None:
    """Nobody serves the second one's stage."""
    words = load_pipeline("toy-picture")
    async with (
        local_stage(toy_logic("thinker")) as thinker,
        local_stage(toy_logic("talker")) as talker,
        local_stage(toy_logic("code2wav")) as code2wav,
        local_router(
            {
                "toy/thinker": thinker.address,
                "toy/talker": talker.address,
                "toy/code2wav": code2wav.address,
                "toy-picture/diffusion": f"127.0.0.1:{free_port}",
            },
            load_pipeline("toy"),
            words,
        ) as router,
        AsyncOmni(address=router.address) as omni,
    ):
        assert [(one.name, one.state) for one in await omni.pipelines()] == [("toy", "ready"), ("toy-picture", "starting")]
        assert (await omni.generate("Hi", outputs=["text"])).pipeline == "toy"
        for ask in (omni.draw("a hill", timeout_s=0.5), omni.generate("Hi", pipeline="toy-picture", timeout_s=0.5)):
            with pytest.raises(StartingError) as refused:
                await ask
            assert refused.value.pipeline == "toy-picture"
