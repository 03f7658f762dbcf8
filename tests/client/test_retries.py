"""A call of which the router says when to ask again is asked again, while the caller has nothing of the answer and there is time, as is one
of a pipeline that is starting."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from helpers.chain import addresses_of
from helpers.peer import SAMPLES, STARTED, TEXT, Bare, Events, Failing, Play, PlayingPeer, answer, event, listening, playing
from helpers.servers import local_chain, local_router
from helpers.talking import CTRL_D, ENTER, PROMPT, Person, alone_here
from helpers.terminal import Terminal
from omnistage.client import AsyncOmni, Failover, Omni, Progress, TextDelta, errors, limits
from omnistage.client.connection import START_PATIENCE_S, Pipeline
from omnistage.client.limits import GROWTH, JITTER, MAX_RETRIES, Retries
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.errors import REASONS, StageError

SOON_S = 0.02


def lost(retry_delay_s: float = SOON_S) -> StageError:
    return StageError("STAGE_LOST", "no thinker is reachable now", metadata={"stage": "thinker"}, retry_delay_s=retry_delay_s)


def full(retry_delay_s: float = SOON_S) -> StageError:
    return StageError("OVERLOADED", "all places are taken", retry_delay_s=retry_delay_s)


def starting(retry_delay_s: float = SOON_S) -> StageError:
    return StageError("STARTING", "film starts", metadata={"pipeline": "film"}, retry_delay_s=retry_delay_s)


async def test_what_passes_is_not_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omnistage.client")
    async with playing(lost(0.2), full(0.2)) as (peer, _, omni):
        got = await omni.generate("Hi", timeout_s=20.0)
    assert (got.text, got.failovers) == (TEXT, ())
    first, second, third = peer.requests
    assert first == second == third and first.request_id, "all that a router has of it stands under one id"
    assert peer.left_s[2] < peer.left_s[0] - 0.4, "one time limit, of which gRPC rounds what it sends by about 1 %"
    told = [message for message in caplog.messages if "asking again" in message]
    assert [message.partition(" s (")[2] for message in told] == ["1 of 2)", "2 of 2)"]
    assert told[0].startswith("no thinker is reachable now; asking again in 0.2 s")


async def refused(*plays: Play, max_times: int = MAX_RETRIES, **options: Any) -> tuple[errors.OmniError, int]:
    """The error of one call, and how many requests it was."""
    async with playing(*plays, max_retries=max_times) as (peer, _, omni):
        with pytest.raises(errors.OmniError) as caught:
            await omni.generate("Hi", **options)
    return caught.value, len(peer.requests)


async def test_the_last_error_says_how_often_it_was_asked() -> None:
    async with playing(full(), lost(), lost()) as (_, _, omni):
        with pytest.raises(errors.StageLostError) as caught:
            await omni.generate("Hi")
        assert str(caught.value) == caught.value.message == "no thinker is reachable now; asked 3 times"
        assert caught.value.retry_delay_s == SOON_S
        assert (await omni.generate("Hi")).text == TEXT, "another call is another matter"


@pytest.mark.parametrize(("client", "call", "requests"), [(0, {}, 1), (2, {"max_retries": 0}, 1), (0, {"max_retries": 1}, 2), (5, {}, 6)])
async def test_how_often_is_said_by_the_call_or_else_by_the_client(client: int, call: dict[str, int], requests: int) -> None:
    error, count = await refused(*[lost(0.001) for _ in range(8)], max_times=client, **call)
    assert isinstance(error, errors.StageLostError) and (count, "asked" in error.message) == (requests, requests > 1)


async def test_the_sync_client_does_the_same() -> None:
    peer = PlayingPeer(lost(), lost())

    def ask(address: str) -> str:
        with Omni(address=address, max_retries=1) as omni:
            return omni.generate("Hi", max_retries=2).text

    async with listening(peer) as wire:
        assert await asyncio.to_thread(ask, wire.address) == TEXT


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
async def test_what_is_no_number_of_times(value: object) -> None:
    with pytest.raises(errors.BadRequestError, match="max_retries: is "):
        AsyncOmni(address="127.0.0.1:1", max_retries=value)  # type: ignore[arg-type]
    with pytest.raises(errors.BadRequestError, match="max_retries: is "):
        await AsyncOmni(address="127.0.0.1:1").generate("Hi", max_retries=value)  # type: ignore[call-overload]


async def test_a_pause_that_the_time_limit_has_no_room_for_is_not_begun() -> None:
    error, count = await refused(lost(30.0), timeout_s=20.0)
    assert isinstance(error, errors.StageLostError) and count == 1 and "asked" not in error.message


NEVER = sorted(name for name, reason in REASONS.items() if reason.retry_delay_s is None)


@pytest.mark.parametrize("reason", [*NEVER, ""])
async def test_what_does_not_say_when_is_not_asked_again(reason: str) -> None:
    error, count = await refused(StageError(reason, "so it is"))
    assert (error.message, count) == ("so it is", 1)


async def test_a_proxy_that_does_not_say_when_is_not_asked_again() -> None:
    error, count = await refused(Bare(grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert isinstance(error, errors.OverloadedError) and count == 1


def some(count: int) -> Events:
    """The first events of an answer."""
    return list(answer(omni_pb2.GenerateRequest()))[:count]


def progress() -> omni_pb2.GenerateResponse:
    return event(chunk_pb2.Chunk(port="progress", count=1, progress=chunk_pb2.ProgressChunk(done=1, total=4)))


def failover() -> omni_pb2.GenerateResponse:
    return omni_pb2.GenerateResponse(failover=stage_pb2.Failover(kind=stage_pb2.STAGE_KIND_TALKER, lost="a:1", replica="b:2"))


@pytest.mark.parametrize("before", [[event(STARTED)], [event(STARTED), progress(), failover()]], ids=["its start", "progress"])
async def test_what_is_no_output_binds_nobody(before: Events) -> None:
    """The answer begins anew, and is whole."""
    async with playing(Failing(before, lost())) as (peer, _, omni):
        events = [heard async for heard in omni.stream("Hi")]
    assert "".join(heard.text for heard in events if isinstance(heard, TextDelta)) == TEXT
    assert sum(isinstance(heard, Progress) for heard in events) == sum(sent.chunk.HasField("progress") for sent in before)
    first, second = peer.requests
    assert first == second and not second.HasField("resume")


async def test_what_the_caller_has_of_an_answer_is_not_given_twice() -> None:
    heard = []
    async with playing(Failing(some(2), lost())) as (peer, _, omni):
        with pytest.raises(errors.StageLostError):
            async for one in omni.stream("Hi"):
                heard.append(one)
    assert [type(one) for one in heard] == [TextDelta] and len(peer.requests) == 1


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("ask", ["generate", "say", "chat"])
async def test_what_is_given_whole_begins_anew_whatever_had_come(ask: str, count: int) -> None:
    """The caller has none of it: text that had come is not there twice."""
    async with playing(Failing(some(count), lost()), full(), Failing(some(count), lost()), max_retries=3) as (peer, _, omni):
        got = await getattr(omni, ask)([{"role": "user", "content": "Hi"}] if ask == "chat" else "Hi")
    assert (got.text, len(peer.requests)) == (TEXT, 4)
    assert got.audio is not None and len(got.audio.samples) == len(SAMPLES)
    assert not any(request.HasField("resume") for request in peer.requests)


async def test_what_is_given_whole_still_goes_on_after_a_loss_of_the_router() -> None:
    async with playing(Failing(some(2), lost()), 4) as (peer, wire, omni):
        asking = asyncio.create_task(omni.generate("Hi"))
        await peer.asked(2)
        wire.cut()
        got = await asking
    assert (got.text, [lost.stage for lost in got.failovers]) == (TEXT, ["router"])


async def test_a_loss_of_the_router_is_no_retry_and_stands_beside_them() -> None:
    """The connection breaks, the router that goes on has lost its stage, and it breaks once more, which is one loss too many."""
    async with playing(0, lost(), None) as (peer, wire, omni):
        asking = asyncio.create_task(omni.generate("Hi"))
        await peer.asked(1)
        wire.cut()
        assert (await asking).text == TEXT
    assert len(peer.requests) == 3
    async with playing(0, lost(), 0) as (peer, wire, omni):
        asking = asyncio.create_task(omni.generate("Hi"))
        for count in (1, 3):
            await peer.asked(count)
            wire.cut()
        with pytest.raises(errors.RouterLostError):
            await asking


async def test_a_router_that_ends_is_left_for_another_one() -> None:
    ends, serves = PlayingPeer(StageError("DRAINING", "this router ends", retry_delay_s=SOON_S)), PlayingPeer()
    async with listening(ends) as one, listening(serves) as other, AsyncOmni(address=f"{one.address},{other.address}") as omni:
        assert (await omni.generate("Hi")).text == TEXT
    assert (len(ends.requests), len(serves.requests)) == (1, 1)


@pytest.mark.parametrize("refusal", [lost(20.0), starting(20.0)], ids=["lost", "starting"])
async def test_who_waits_can_be_cancelled(refusal: StageError) -> None:
    async with playing(refusal) as (peer, _, omni):
        waiting = asyncio.create_task(omni.generate("Hi"))
        await peer.asked(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await omni.generate("Hi")).text == TEXT


def test_pauses_grow_and_are_never_shorter_than_the_server_said() -> None:
    drawn = set()
    for _ in range(5):
        retries = Retries(1000)
        for number in (0, 1, 2, 2, *[2] * 400):
            pause_s = retries.pause_s(1.0)
            assert GROWTH**number <= pause_s <= GROWTH**number * (1 + JITTER)
            retries.count(errors.StageLostError("gone"), pause_s)
            drawn.add(pause_s)
    assert len(drawn) > 100, "many clients do not come in the same moment"
    assert MAX_RETRIES == 2


async def test_a_retry_draws_nothing_of_what_a_program_draws(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # The one that all share.
    before = random.getstate(), str(np.random.get_state())
    async with playing(lost(), full()) as (peer, _, omni):
        await omni.generate("Hi")
    assert len(peer.requests) == 3 and (random.getstate(), str(np.random.get_state())) == before


def test_processes_that_seed_alike_do_not_pause_in_step(seed: int) -> None:
    drawn = set()
    for _ in range(4):
        random.seed(seed)
        drawn.add(Retries(1).pause_s(1.0))
    assert len(drawn) > 1


LONG_S = 25.0
"""Within the patience for a start, and far above what a close takes."""


@pytest.mark.parametrize(
    ("prompt", "play", "most"),
    [
        pytest.param("Hi", full(LONG_S), 1, id="full"),
        pytest.param("Hi", lost(LONG_S), 1, id="lost"),
        pytest.param("Hi", starting(LONG_S), 0, id="starting"),
        pytest.param(["Hi", "you"], lost(LONG_S), 1, id="one of a list"),
        pytest.param(["Hi", "you"], full(LONG_S), 0, id="a list"),
    ],
)
async def test_the_close_ends_who_waits(prompt: str | list[str], play: StageError, most: int) -> None:
    peer = PlayingPeer(play, play)
    async with listening(peer) as wire:
        omni = AsyncOmni(address=wire.address)
        begun = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(omni.generate(prompt, max_retries=most))
        await peer.asked(1 if isinstance(prompt, str) else 2)
        done, _ = await asyncio.wait([waiting], timeout=0.2)  # The refusal is on its way, or there; the close is to end both.
        assert not done
        await omni.close()
        with pytest.raises(errors.ClosedError):
            await waiting
        assert asyncio.get_running_loop().time() - begun < LONG_S, "it was not waited for"
        with pytest.raises(errors.ClosedError):
            await omni.generate("Hi")


async def test_the_close_ends_the_search_for_a_router() -> None:
    peer = PlayingPeer(2, StageError("DRAINING", "not ready", retry_delay_s=LONG_S))
    async with listening(peer) as wire:
        omni = AsyncOmni(address=wire.address, resume_timeout_s=2 * LONG_S)
        begun = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(omni.generate("Hi"))
        await peer.asked(1)
        wire.cut()
        await peer.asked(2)
        await omni.close()
        with pytest.raises(errors.ClosedError):
            await waiting
        assert asyncio.get_running_loop().time() - begun < LONG_S


async def test_the_close_ends_the_reading_of_a_medium(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    omni = AsyncOmni(address="127.0.0.1:1")
    waiting = asyncio.create_task(omni.generate("Hi", images=tmp_path / "pipe"))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await omni.close()
    with pytest.raises(errors.ClosedError):
        await waiting
    (tmp_path / "pipe").write_bytes(b"so that its reader ends")


async def test_the_words_of_a_router_stand_in_the_log_as_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omnistage.client")
    words = "full\x1b[2J\x9b1m\nINFO all is well\u202e\r\u2028end \N{SNOWMAN}"
    async with playing(StageError("OVERLOADED", words, retry_delay_s=SOON_S), starting()) as (peer, _, omni):
        await omni.generate("Hi")
    assert len(peer.requests) == 3 and len(caplog.messages) == 2
    assert caplog.messages[0].startswith(r"full\x1b[2J\x9b1m\nINFO all is well\u202e\r\u2028end ☃; asking again in ")
    assert all(message.isprintable() for message in caplog.messages)


def test_every_log_of_the_client_is_such_a_one() -> None:
    for path in Path(limits.__file__).parent.glob("*.py"):
        assert "getLogger" not in path.read_text() or path.name == "wording.py", path.name


async def commanded(plays: list[Play], words: list[str]) -> tuple[Terminal, int, PlayingPeer]:
    peer = PlayingPeer(*plays)
    async with listening(peer) as wire:
        terminal = Terminal(120, 30)
        code = await asyncio.to_thread(terminal.run, [*words, "--address", wire.address])
    return terminal, code, peer


async def test_a_terminal_shows_each_retry_and_a_script_does_not(tmp_path: Path) -> None:
    for words in (["ask", "Hi", "--no-play"], ["say", "Hi", "--no-play"], ["draw", "Hi", "--out", str(tmp_path / "x.png")]):
        terminal, _, peer = await commanded([lost(), full()], words)
        told = [line for line in terminal.lines if "asking again in" in line]
        assert [line.partition(";")[0] for line in told] == ["no thinker is reachable now", "all places are taken"], words
        assert [line.partition(" s ")[2] for line in told] == ["(1 of 2)", "(2 of 2)"] and len(peer.requests) == 3
    terminal, code, peer = await commanded([lost(), lost()], ["ask", "Hi", "--json"])
    assert code == 0 and len(peer.requests) == 3 and not any("asking again" in line for line in terminal.lines)


@pytest.mark.parametrize("size", [(80, 24), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("words", [["ask", "Hi", "--no-play"], ["chat", "--no-play"]], ids=lambda words: words[0])
async def test_a_line_of_a_retry_is_broken_between_words_and_stays_dim(
    size: tuple[int, int], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a server says, and however wide the terminal is."""
    alone_here(tmp_path, monkeypatch)
    said = "all places of the pipeline are taken by others who asked before, [red]and[/] nobody has left"
    peer = PlayingPeer(StageError("OVERLOADED", said, retry_delay_s=SOON_S))
    terminal = Terminal(*size)
    steps = [(PROMPT, b"Hi" + ENTER), ("(1 of 2)", b""), ("ttft", b""), (PROMPT, CTRL_D)] if words[0] == "chat" else []
    async with listening(peer) as wire:
        assert await asyncio.to_thread(terminal.run, [*words, "--address", wire.address], Person(*steps)) == 0
    assert len(peer.requests) == 2
    first = next(number for number, line in enumerate(terminal.lines) if line.startswith("all places"))
    last = next(number for number, line in enumerate(terminal.lines) if line.endswith("(1 of 2)"))
    shown = terminal.lines[first : last + 1]
    assert " ".join(shown).startswith(f"{said}; asking again in 0.")
    for line in shown:
        assert f"\x1b[2m{line}".encode() in terminal.written, "dim from its beginning"


async def test_the_command_is_told_how_often() -> None:
    terminal, code, peer = await commanded([lost(), lost()], ["ask", "Hi", "--no-play", "--max-retries", "0"])
    assert code == 1 and len(peer.requests) == 1
    terminal, code, peer = await commanded([lost(), lost()], ["ask", "Hi", "--no-play", "--max-retries", "1"])
    assert code == 1 and len(peer.requests) == 2
    assert "error: no thinker is reachable now; asked 2 times (ask again in 0.0 s)" in terminal.lines


WAITS = "film is still starting; waiting up to 30 s"


async def test_it_is_asked_again_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omnistage.client")
    async with playing(starting(), starting()) as (peer, _, omni):
        answer = await omni.generate("Hi", max_tokens=5)
    assert (answer.text, answer.failovers) == (TEXT, ())
    assert caplog.messages == [WAITS], "once for a call"
    first, second, third = peer.requests
    assert first == second == third and first.request_id


@pytest.mark.parametrize(("delay_s", "timeout_s"), [(START_PATIENCE_S + 1, 120.0), (5.0, 4.0)], ids=["patience", "limit"])
async def test_the_refusal_stands_where_it_would_take_too_long(delay_s: float, timeout_s: float) -> None:
    """At once: nobody is to wait for what cannot come in time."""
    error, count = await refused(starting(delay_s), timeout_s=timeout_s)
    assert isinstance(error, errors.StartingError) and (error.pipeline, error.retry_delay_s, count) == ("film", delay_s, 1)
    assert (error.message, error.reason) == ("film starts", "STARTING") and "replicas()" in error.hint
    assert issubclass(errors.StartingError, errors.UnavailableError)


async def test_a_terminal_shows_what_is_waited_for(tmp_path: Path) -> None:
    """Once, above the answer; a script is not told."""
    for words in (["ask", "Hi", "--no-play"], ["draw", "Hi", "--out", str(tmp_path / "x.png")]):
        terminal, _, peer = await commanded([starting(), starting()], words)
        assert len(peer.requests) == 3 and terminal.lines.count(WAITS) == 1 and terminal.lines[0] == WAITS
    terminal, code, _ = await commanded([starting()], ["ask", "Hi", "--json"])
    assert code == 0 and WAITS not in terminal.lines


async def test_a_router_that_came_back_and_is_not_ready_is_waited_for() -> None:
    """In the middle of an answer, which goes on then."""
    text, failovers = "", []
    async with playing(6, starting(), starting()) as (peer, wire, omni):
        async for event in omni.stream("Hi"):
            text += getattr(event, "text", "")
            if text and len(peer.requests) == 1:
                wire.cut()
            if isinstance(event, Failover):
                failovers.append(event.stage)
    assert text == TEXT and failovers == ["router"]
    assert [request.HasField("resume") for request in peer.requests] == [False, True, True, True]


def test_starting_pipelines_are_listed_behind_the_ready_ones() -> None:
    ready = omni_pb2.Model(name="words", stages=[stage_pb2.STAGE_KIND_THINKER])
    words, film = Pipeline.all_of(omni_pb2.ListModelsResponse(models=[ready], starting=[omni_pb2.Model(name="film")]))
    assert (words.name, words.state, words.stages, film.name, film.state) == ("words", "ready", ("thinker",), "film", "starting")


async def test_a_router_with_a_pipeline_that_starts_answers_with_the_other(free_port: int) -> None:
    """Nobody serves the second one's stage."""
    pipelines = load_pipeline("toy"), load_pipeline("toy-picture")
    async with local_chain() as stages:
        addresses = {f"toy/{kind}": address for kind, address in addresses_of(stages).items()}
        addresses["toy-picture/diffusion"] = f"127.0.0.1:{free_port}"
        async with local_router(addresses, *pipelines) as router, AsyncOmni(address=router.address) as omni:
            assert [(one.name, one.state) for one in await omni.pipelines()] == [("toy", "ready"), ("toy-picture", "starting")]
            assert (await omni.generate("Hi", outputs=["text"])).pipeline == "toy"
            for ask in (omni.draw("a hill", timeout_s=0.5), omni.generate("Hi", pipeline="toy-picture", timeout_s=0.5)):
                with pytest.raises(errors.StartingError) as refusal:
                    await ask
                assert refusal.value.pipeline == "toy-picture"
