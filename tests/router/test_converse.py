"""Converse: turns whose media are streamed in pieces, through a real router into the toy that sees and hears."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from helpers.ask import WholeAnswer, ask, refusal, refused, request
from helpers.chain import RouterAndStages, router_and_stages, toy_chain
from helpers.converse import PIECE, ConverseStream, Pieces, TurnFailed, file_chunks, on_port, sound_chunks, zeros
from helpers.families import PICTURE, SOUND
from helpers.run import messages
from helpers.servers import all_free, family_logic
from helpers.waiting import until
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

LENGTH = 12
MICROPHONE = "microphone"


@asynccontextmanager
async def house(thinkers: int = 1, router: Mapping[str, Any] | None = None, **options: object) -> AsyncIterator[RouterAndStages]:
    """toy-omni with ears and films behind a router. When the test ends it must answer, and nothing may be held."""
    hearing = {"length": LENGTH, "microphone": True, "films": True, **options}
    logics = [family_logic("toy-omni", "thinker", hearing) for _ in range(thinkers)]
    logics += [family_logic("toy-omni", kind, {"length": LENGTH, **options}) for kind in ("talker", "code2wav")]
    async with router_and_stages(logics, load_pipeline("toy-omni"), **(router or {})) as stack:
        yield stack
        check(await ConverseStream(stack.stub).turn(question(messages("Well?"), 3)), ("u", "Well?"), 3)


def question(given: Sequence[stage_pb2.Message], seed: int, max_tokens: int = LENGTH) -> omni_pb2.GenerateRequest:
    thinker = stage_pb2.ThinkerParams(messages=given, max_tokens=max_tokens)
    return omni_pb2.GenerateRequest(seed=seed, thinker=thinker, outputs=["text"])


def with_parts(*parts: stage_pb2.Part) -> list[stage_pb2.Message]:
    return [stage_pb2.Message(role="user", parts=parts)]


def check(answer: WholeAnswer, seen: tuple[formulas.Seen, ...], seed: int) -> None:
    answer.check_whole()
    items = formulas.items(seen)
    assert answer.text() == "".join(formulas.word(formulas.omni_token(seed, items, n)) for n in range(LENGTH))


FILM = random.Random(7).randbytes(700_001)
MEDIA = {"media2": ("image/png", png(PICTURE)), "media5": ("audio/wav", wav(SOUND, formulas.SAMPLE_RATE_HZ)), "media0": ("video/mp4", FILM)}
ASKED = with_parts(
    stage_pb2.Part(text="What is "),
    *(on_port(port, kind, len(data)) for port, (kind, data) in MEDIA.items()),
    on_port(MICROPHONE),
    stage_pb2.Part(text="?"),
)
SEEN: tuple[formulas.Seen, ...] = ("u", "What is ", PICTURE, SOUND, formulas.film(hashlib.sha256(FILM).digest()), SOUND[:777], "?")


def streams(chance: random.Random) -> dict[str, Pieces]:
    """All media of ASKED in pieces of any size."""
    cut: dict[str, Pieces] = {port: file_chunks(port, data, cuts(chance, len(data))) for port, (_, data) in MEDIA.items()}
    return cut | {MICROPHONE: sound_chunks(MICROPHONE, SOUND[:777], cuts(chance, 777))}


def cuts(chance: random.Random, size: int) -> list[int]:
    """About twenty pieces."""
    return [min(chance.randint(1, max(size // 10, 1)), PIECE) for _ in range(20)]


async def test_it_sees_and_hears_what_is_streamed_however_it_is_cut(seed: int):
    """Several ports at once, interleaved, one turn after the other in one conversation; between them one without media."""
    chance = random.Random(seed)
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        for n in range(3):
            check(await conversation.turn(question(ASKED, n), streams(chance)), SEEN, n)
            check(await conversation.turn(question(messages("Only words."), n)), ("u", "Only words."), n)
        assert await conversation.end() is grpc.StatusCode.OK


async def test_the_account_says_what_came_in(seed: int):
    async with house() as stack:
        answer = await ConverseStream(stack.stub).turn(question(ASKED, 1), streams(random.Random(seed)))
        assert answer.usage is not None
        sizes = {port: len(data) for port, (_, data) in MEDIA.items()} | {MICROPHONE: 777}
        assert {port: n for port, n in answer.usage.stages[0].input_items.items() if n} == sizes


async def test_slow_clients_are_waited_for_and_others_answered_meanwhile():
    waiting, film = asyncio.Event(), with_parts(on_port("media0", "video/mp4"))
    async with house() as stack:
        pieces = {"media0": file_chunks("media0", b"slow", [1])}
        answering = asyncio.create_task(ConverseStream(stack.stub).turn(question(film, 1), pieces, waiting.wait))
        answer = await ConverseStream(stack.stub).turn(question(film, 2), {"media0": file_chunks("media0", b"fast")})
        check(answer, seen_film(b"fast"), 2)
        check(await ask(stack.stub, question(messages("hm"), 3)), ("u", "hm"), 3)
        waiting.set()
        check(await answering, seen_film(b"slow"), 1)


def seen_film(data: bytes) -> tuple[formulas.Seen, ...]:
    return ("u", formulas.film(hashlib.sha256(data).digest()))


async def test_an_interrupted_turn_ends_and_the_next_one_is_answered():
    async with house(interval_s=0.05, length=400) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(turn=question(messages("Go on and on."), 1, 400))
        while not (await conversation.read()).HasField("chunk"):
            pass
        await conversation.send(interrupt=stage_pb2.Interrupt())
        while not (message := await conversation.read()).HasField("usage"):
            pass
        assert message.usage.finish_reason == chunk_pb2.FINISH_REASON_INTERRUPTED
        await conversation.send(interrupt=stage_pb2.Interrupt())  # Too late: nothing is answered now.
        await conversation.send(turn=question(with_parts(on_port("media0", "video/mp4")), 1))
        while not (await conversation.read()).HasField("credit"):
            pass
        await conversation.send(interrupt=stage_pb2.Interrupt())  # While its film is still to come.
        while not (message := await conversation.read()).HasField("usage"):
            assert not message.HasField("turn_failed"), message
        conversation.call.cancel()


# Refusals ------------------------------------------------------------------------------------------------------------------------------


async def test_generate_names_converse():
    async with house() as stack:
        told = await refused(stack.stub, question(with_parts(on_port(MICROPHONE)), 1))
        assert (told.reason, told.fields) == ("BAD_REQUEST", ["thinker.messages.parts.port"])
        assert "Converse" in told.message


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ([on_port("media8", "video/mp4")], "thinker.messages.parts.port"),
        ([on_port("text", "video/mp4")], "thinker.messages.parts.port"),
        ([on_port("media0", "video/mp4"), on_port("media0", "video/mp4")], "thinker.messages.parts.port"),
        ([on_port("media0")], "thinker.messages.parts.media_type"),
        ([on_port("media0", "text/plain")], "thinker.messages.parts.media_type"),
        ([on_port(MICROPHONE, "audio/wav")], "thinker.messages.parts.media_type"),
        ([on_port("media0", "video/mp4", 1 << 30)], "thinker.messages.parts.port"),
    ],
    ids=["unknown", "of an output", "twice", "no type", "odd type", "type of live sound", "1 GiB as it says"],
)
async def test_a_turn_that_asks_badly_fails_before_anything_is_streamed(parts: list[stage_pb2.Part], field: str):
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        with pytest.raises(TurnFailed) as told:
            await conversation.turn(question(with_parts(*parts), 1))
        assert (told.value.reason, told.value.failed.code) == ("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert (told.value.failed.metadata["field"], conversation.room) == (field, {})
        check(await conversation.turn(question(ASKED, 1), streams(random.Random(1))), SEEN, 1)


async def test_a_film_that_turns_out_too_large_fails_and_the_rest_of_it_is_passed_over():
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        picture = on_port("media0", "image/png")
        with pytest.raises(TurnFailed) as told:
            await conversation.turn(question(with_parts(picture), 1), {"media0": zeros("media0", 64 << 20)})
        assert told.value.reason == "BAD_REQUEST" and "1048576 bytes" in told.value.failed.message
        assert conversation.room["media0"] < 64, "room for a quarter of it at most"
        check(await conversation.turn(question(ASKED, 1), streams(random.Random(1))), SEEN, 1)


Event = omni_pb2.ConverseRequest


def piece(seq: int = 0, first: int = 0, *, port: str = "media0", last: bool = False, data: bytes = b"x") -> Event:
    return Event(chunk=chunk_pb2.Chunk(port=port, seq=seq, first=first, count=len(data), last=last, media=chunk_pb2.MediaChunk(data=data)))


FILM_TURN = Event(turn=question(with_parts(on_port("media0", "video/mp4")), 1))
HURRIED = Event(turn=FILM_TURN.turn)
"""The same turn as another object: events behind it are sent without waiting for the first room."""

BROKEN: dict[str, tuple[list[Event | None], str]] = {
    "nothing at all": ([None], "OK"),
    "a chunk without a turn": ([piece()], "PROTOCOL"),
    "an interrupt without a turn": ([Event(interrupt=stage_pb2.Interrupt())], "PROTOCOL"),
    "an event that nobody knows": ([Event()], "PROTOCOL"),
    "two turns at once": ([FILM_TURN, FILM_TURN], "PROTOCOL"),
    "a port that was not named": ([FILM_TURN, piece(port="media1")], "PROTOCOL"),
    "a gap": ([FILM_TURN, piece(1, 1)], "PROTOCOL"),
    "a repeat": ([FILM_TURN, piece(), piece()], "PROTOCOL"),
    "a chunk after the last": ([FILM_TURN, piece(last=True), piece(1, 1)], "PROTOCOL"),
    "more bytes than items": ([FILM_TURN, piece(data=b""), piece(1, 5)], "PROTOCOL"),
    "another payload": ([FILM_TURN, Event(chunk=chunk_pb2.Chunk(port="media0", text=chunk_pb2.TextChunk(text="x"), count=1))], "PROTOCOL"),
    "items without a payload": ([FILM_TURN, Event(chunk=chunk_pb2.Chunk(port="media0", count=1))], "PROTOCOL"),
    "a half-close in the middle": ([FILM_TURN, piece(), None], "HALF_CLOSED"),
    "more than there is room for": ([HURRIED, *(piece(n, n) for n in range(40))], "CREDIT_EXCEEDED"),
    "more bytes than a chunk has": ([FILM_TURN, piece(data=bytes(PIECE + 1))], "BAD_REQUEST"),
    "credit for too many ports": ([FILM_TURN, *(Event(credit=stage_pb2.Credit(port=f"p{n}")) for n in range(65))], "PROTOCOL"),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_who_breaks_the_rules_is_told(what: str):
    """Sent as soon as the first room is given, or at once."""
    events, reason = BROKEN[what]
    async with house(interval_s=0.05) as stack:
        conversation = ConverseStream(stack.stub)
        heard: list[omni_pb2.ConverseResponse] = []
        try:
            for event in events:
                if event is None:
                    await conversation.call.done_writing()
                else:
                    await conversation.call.write(event)
                if event is FILM_TURN and not heard:
                    while not heard or not heard[-1].HasField("credit"):
                        heard.append(await conversation.read())
            while (message := await conversation.call.read()) is not grpc.aio.EOF:
                assert isinstance(message, omni_pb2.ConverseResponse)
                heard.append(message)
                if message.HasField("turn_failed"):
                    assert message.turn_failed.reason == reason
                    conversation.call.cancel()
                    return
            assert (reason, await conversation.call.code()) == ("OK", grpc.StatusCode.OK)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            error = await conversation.failure()
            assert refusal(error).reason == reason


async def test_who_sends_nothing_is_left():
    """With room and a port that waits; who waits between two turns is not."""
    async with house(router={"stall_limit": 0.5}) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(turn=question(with_parts(on_port("media0", "video/mp4")), 1))
        with pytest.raises(TurnFailed) as left:
            await conversation.answer()
        assert left.value.reason == "CLIENT_STALLED" and "media0" in left.value.failed.message
        await all_free(stack.addresses)
        check(await conversation.turn(question(messages("And now?"), 1)), ("u", "And now?"), 1)


async def test_a_router_that_was_held_up_blames_no_client():
    """It was stopped for twice the time that a client has; what was sent meanwhile it has not read yet."""
    async with house(router={"stall_limit": 0.5}) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(turn=question(ASKED, 1))
        async with conversation.streaming(streams(random.Random(1))):
            for _ in range(3):
                await asyncio.sleep(0.05)
                time.sleep(1.0)  # noqa: ASYNC251, the event loop is to be held up
            answer = await conversation.answer()
        check(answer, SEEN, 1)


async def test_who_reads_nothing_is_left():
    """Its answer fills the buffers; then the call ends, because nothing more can be written in it."""
    async with router_and_stages(toy_chain({"samples_per_frame": 100_000}), stall_limit=0.5) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(turn=request("Say much.", 1))
        ended = {"pipeline": "toy", "reason": "CLIENT_STALLED"}
        await until(lambda: stack.router.registry.get_sample_value("omnistage_router_requests_total", ended))
        with pytest.raises(grpc.aio.AioRpcError) as left:
            await conversation.answer()
        assert refusal(left.value).reason == "CLIENT_STALLED"


async def test_clients_that_vanish_in_the_middle_leave_nothing():
    async with house() as stack:
        for moment in range(6):
            conversation = ConverseStream(stack.stub)
            await conversation.send(turn=question(ASKED, 1))
            async with conversation.streaming(streams(random.Random(moment))):
                for _ in range(2 * moment):
                    await conversation.read()
                conversation.call.cancel()


# Rules of Generate that hold here too ----------------------------------------------------------------------------------------------------


async def test_a_deadline_ends_the_call_and_frees_everything():
    async with house() as stack:
        conversation = ConverseStream(stack.stub, timeout_s=1)
        await conversation.send(turn=question(with_parts(on_port("media0", "video/mp4")), 1))
        # The clock of the session may be a moment before that of the call: then the turn is told to have failed first.
        with pytest.raises((TurnFailed, grpc.aio.AioRpcError), match="DEADLINE"):
            await conversation.answer()
        assert await conversation.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_turn_that_is_asked_again_is_answered_once():
    """By a client whose connection broke: the newer call has the answer."""
    async with house() as stack:
        asked = question(with_parts(on_port("media0", "video/mp4")), 1)
        asked.request_id = "0123456789abcdef" * 2
        older, newer = ConverseStream(stack.stub), ConverseStream(stack.stub)
        await older.send(turn=asked)
        while not (await older.read()).HasField("credit"):
            pass
        check(await newer.turn(asked, {"media0": file_chunks("media0", b"film")}), seen_film(b"film"), 1)
        with pytest.raises(TurnFailed, match="SUPERSEDED"):
            await older.answer()


@pytest.mark.parametrize("running", [True, False], ids=["in a turn", "between two"])
async def test_a_router_that_drains_finishes_turns_and_ends_conversations(running: bool):
    async with router_and_stages(toy_chain({"interval_s": 0.02})) as stack:
        conversation = ConverseStream(stack.stub)
        (await conversation.turn(request("How?", 1))).check_toy(1, "How?")
        if running:
            await conversation.send(turn=request("And now?", 2))
            await conversation.read()
        async with asyncio.TaskGroup() as group:
            group.create_task(stack.router.service.drain(30))
            if running:
                answer = WholeAnswer(started=omni_pb2.Started())
                async for event in conversation.events():
                    answer.take(event)
                answer.check_toy(2, "And now?")
            with pytest.raises(grpc.aio.AioRpcError) as ended_:
                await conversation.read()
            assert refusal(ended_.value).reason == "DRAINING"


# Losses ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << 20, 24 << 20], ids=["small", "large"])
async def test_a_thinker_that_is_lost_while_it_is_sent_a_film(size: int):
    """The router sends what it still has to another Thinker. If more of a film is gone, the client has to send it again, and is told so."""
    async with house(2) as stack:
        conversation = ConverseStream(stack.stub)
        held = asyncio.Event()
        held.set()
        sent = 0

        async def pause() -> None:
            nonlocal sent
            sent += 1
            if sent * PIECE >= size:  # The last piece waits.
                held.clear()
            await held.wait()

        asked = question(with_parts(on_port("media0", "video/mp4", size)), 1)
        answering = asyncio.create_task(conversation.turn(asked, {"media0": zeros("media0", size)}, pause))
        await until(lambda: not held.is_set())
        await stack.end_busy("thinker")
        held.set()
        if size == 1 << 20:
            answer = await answering
            check(answer, seen_film(bytes(size)), 1)
            assert [failover.kind for failover in answer.failovers] == [stage_pb2.STAGE_KIND_THINKER]
        else:
            with pytest.raises(TurnFailed) as told:
                await answering
            assert told.value.reason == "STAGE_LOST" and "stream it again" in told.value.failed.message
            assert told.value.failed.metadata["stage"] == "thinker"
            assert told.value.failed.retry_delay.ToTimedelta().total_seconds() > 0
            check(await conversation.turn(asked, {"media0": zeros("media0", size)}), seen_film(bytes(size)), 1)
