"""Every field of GenerateRequest, changed at random: an answer, or an error of the table with its details. Any messages in a
conversation, in any order: turns are answered or fail, and calls end, typed. Clients that go away."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from helpers.ask import ask, read, refusal, refused, request
from helpers.mistreated import TYPED, Mistreated
from helpers.mutation import changed
from helpers.run import messages
from helpers.servers import CLIENT_OPTIONS
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.errors import MAX_TEXT_BYTES

ENOUGH = 40
"""Events after which a client has heard enough of an answer that may be long."""

WORDS = ["text", "audio", "codes", "hidden", "toy", "user", "assistant", "system", "1", "balanced", "png"]
LONG = {"max_tokens": 20_000, "ignore_eos": True}


def held(text: int, samples: int) -> stage_pb2.Resume:
    """The part of the answer to `request()` that a client has: so many tokens and samples."""
    resume = stage_pb2.Resume()
    if text:
        tokens = [formulas.token(1, "hello", n) for n in range(text)]
        words = chunk_pb2.TextChunk(text="".join(map(formulas.word, tokens)), token_ids=tokens)
        resume.positions.add(port="text", seq=text, first=text)
        resume.history.add(port="text", count=text, text=words)
    if samples:
        resume.positions.add(port="audio", seq=3, first=samples)
    return resume


GOOD = [
    request(),
    request(thinker={"sampling": stage_pb2.Sampling(temperature=0.7, top_p=0.9, logit_bias={3: 1.0}), "stop": ["x"], "max_tokens": 50}),
    request(outputs=["text"], request_id="mine", conversation_id="ours"),
    request(talker=stage_pb2.TalkerParams(voice="toy", speed=1.0), code2wav=stage_pb2.Code2WavParams(profile="latency")),
    omni_pb2.GenerateRequest(seed=3, thinker=stage_pb2.ThinkerParams(verbatim="one two three")),
    request(resume=held(5, 700), revisions=["1", "1", "1"]),
    request(resume=held(3, 0), outputs=["text"], revisions=["1"]),
    request(resume=stage_pb2.Resume(), request_id="mine"),
]


async def end_of(stub: omni_pb2_grpc.OmniServiceAsyncStub, asked: omni_pb2.GenerateRequest) -> str:
    """The reason of the refusal; "OK" for an answer, or the beginning of one."""
    call = stub.Generate(asked, timeout=120)
    try:
        for _ in range(ENOUGH):
            if await call.read() is grpc.aio.EOF:
                break
    except grpc.aio.AioRpcError as error:
        told = refusal(error)
        assert told.reason in TYPED, told
        assert len(told.message.encode()) <= MAX_TEXT_BYTES
        return told.reason
    finally:
        call.cancel()
    return "OK"


@lengths.rounds(200, 2000)
def test_any_field_of_a_request(house: Mistreated, rounds: int) -> None:
    reasons: Counter[str] = Counter()

    @settings(max_examples=rounds, suppress_health_check=list(HealthCheck), database=None)
    @given(asked=st.sampled_from(GOOD).flatmap(lambda asked: changed(asked, WORDS)))
    def play(asked: omni_pb2.GenerateRequest) -> None:
        reasons[house.play(end_of(house.omni, asked))] += 1

    play()
    house.play(house.still_well())
    print(dict(reasons))
    assert reasons["OK"] and reasons["BAD_REQUEST"] and reasons["UNKNOWN_MODEL"]


@pytest.mark.parametrize(
    "resume", [held(5, 700), held(1, 0), held(0, 1), held(formulas.NATURAL_LENGTH - 1, 2879)], ids=["both", "text", "sound", "most"]
)
def test_an_answer_goes_on_from_any_place(house: Mistreated, resume: stage_pb2.Resume) -> None:
    """The good ones above are good."""

    async def go_on() -> None:
        whole = await ask(house.omni, request())
        rest = omni_pb2.GenerateRequest()
        rest.CopyFrom(request(resume=resume, revisions=["1", "1", "1"]))
        parts: dict[str, list[chunk_pb2.Chunk]] = {"text": [], "audio": []}
        async for event in house.omni.Generate(rest, timeout=120):
            if event.HasField("chunk"):
                parts[event.chunk.port].append(event.chunk)
        places = {position.port: position for position in resume.positions}
        text = whole.of("text")
        words = [formulas.word(token) for chunk in text for token in chunk.text.token_ids]
        begin = places["text"].first if "text" in places else 0
        assert "".join(chunk.text.text for chunk in parts["text"]) == "".join(words[begin:])
        begin = places["audio"].first if "audio" in places else 0
        assert b"".join(chunk.audio.data for chunk in parts["audio"]) == whole.samples()[begin:].tobytes()
        for port, position in places.items():
            assert (parts[port][0].seq, parts[port][0].first) == (position.seq, position.first)

    house.play(go_on())


def test_a_message_that_quotes_what_was_sent_fits_into_the_trailers(house: Mistreated) -> None:
    for asked in (
        request(outputs=["\N{GRINNING FACE}" * 50_000]),
        request(talker=stage_pb2.TalkerParams(voice="\N{GRINNING FACE}" * 50_000)),
        request(model="x" * 100_000),
    ):
        told = house.play(refused(house.omni, asked))
        assert told.reason in ("BAD_REQUEST", "UNKNOWN_MODEL")


# Media and sizes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (stage_pb2.Part(media=stage_pb2.Media(data=b"\x89PNG", media_type="image/png")), "parts.media"),
        (stage_pb2.Part(media=stage_pb2.Media(data=bytes(7 << 20), media_type="audio/wav")), "parts.media"),
        (stage_pb2.Part(media=stage_pb2.Media(media_type="\x00" * 1000, use_audio=True)), "parts.media.media_type"),
        (stage_pb2.Part(port="microphone"), "parts.port"),
        (stage_pb2.Part(port="text"), "parts.port"),
        (stage_pb2.Part(), "parts"),
    ],
    ids=["picture", "7 MiB of sound", "odd type", "port", "port of ours", "nothing"],
)
def test_media_is_refused_by_name_where_the_model_takes_text(house: Mistreated, part: stage_pb2.Part, field: str) -> None:
    asked = request(thinker={"messages": [*messages("hm"), stage_pb2.Message(role="user", parts=[part])]})
    told = house.play(refused(house.omni, asked))
    assert (told.reason, told.fields) == ("BAD_REQUEST", [f"thinker.messages.{field}"])


def test_pictures_to_draw_from_are_refused_by_name(house: Mistreated) -> None:
    stage = house.stages["diffusion"]
    opening = stage.open()
    opening.params.diffusion.images.add(data=bytes(32 << 20), media_type="image/png")

    async def refuse() -> None:
        caller = stage.caller()
        await caller.send(open=opening)
        ended = await caller.expect("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
        assert ended.metadata["field"] == "diffusion.images"

    house.play(refuse())


@pytest.mark.parametrize("size", [8 << 20, 65 << 20])
def test_media_is_not_even_read_by_a_router_for_text(house: Mistreated, size: int) -> None:
    """gRPC refuses it, before our code sees it."""
    many = request(thinker={"messages": [stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=stage_pb2.Media(data=bytes(size)))])]})

    async def refuse() -> None:
        large = [*[option for option in CLIENT_OPTIONS if "message_length" not in option[0]], ("grpc.max_send_message_length", 1 << 28)]
        async with grpc.aio.insecure_channel(house.router, options=large) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await ask(omni_pb2_grpc.OmniServiceStub(channel), many)
            assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    house.play(refuse())


# Clients that go -----------------------------------------------------------------------------------------------------------------------


def test_clients_that_vanish_at_any_moment(house: Mistreated, seed: int) -> None:
    """The connection itself is gone, not only the call."""
    chance = random.Random(seed)

    async def vanish(moment: int) -> None:
        channel = grpc.aio.insecure_channel(house.router, options=CLIENT_OPTIONS)
        try:
            call = omni_pb2_grpc.OmniServiceStub(channel).Generate(request(thinker=LONG), timeout=300)
            for _ in range(moment):
                await read(call)
        finally:
            await channel.close()

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as clients:  # If one fails, none is left over for the next test.
            for _ in range(30):
                clients.create_task(vanish(chance.choice([0, 1, 2, 3, 10, 50])))

    house.play(all_of_them())
    house.play(house.still_well())


def test_the_same_request_asked_many_times_is_answered_once(house: Mistreated) -> None:
    """With one id, only the newest call has the answer; the others are told."""

    async def insist() -> None:
        calls = []
        for _ in range(8):
            calls.append(house.omni.Generate(request(thinker=LONG, request_id="again"), timeout=120))
            assert (await read(calls[-1])).HasField("started")
        for call in calls[:-1]:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert refusal(raised.value).reason == "SUPERSEDED"
        assert (await read(calls[-1])).HasField("chunk")
        calls[-1].cancel()
        answer = await ask(house.omni, request(request_id="again"))
        answer.check_toy(1, "hello")

    house.play(insist())
    house.play(house.still_well())


# Conversations -------------------------------------------------------------------------------------------------------------------------


CONVERSE = "/omnistage.v1.OmniService/Converse"
CONVERSATION_WORDS = ["text", "audio", "media0", "toy", "user", "video/mp4", "1"]
MEDIA = chunk_pb2.Chunk(port="media0", count=3, media=chunk_pb2.MediaChunk(data=b"abc"))
PART = stage_pb2.Part(port="media0", media_type="video/mp4")
TURNS = [
    omni_pb2.ConverseRequest(turn=request()),
    omni_pb2.ConverseRequest(turn=request(outputs=["text"])),
    omni_pb2.ConverseRequest(turn=request(thinker={"messages": [stage_pb2.Message(role="user", parts=[PART])]})),
    omni_pb2.ConverseRequest(chunk=MEDIA),
    omni_pb2.ConverseRequest(interrupt=stage_pb2.Interrupt()),
    omni_pb2.ConverseRequest(credit=stage_pb2.Credit(port="text", total=3)),
]

Messages = st.lists(
    st.one_of(
        st.sampled_from(TURNS).map(lambda good: good.SerializeToString()),
        st.sampled_from(TURNS).flatmap(lambda good: changed(good, CONVERSATION_WORDS)).map(lambda bad: bad.SerializeToString()),
        st.binary(max_size=20),
    ),
    min_size=1,
    max_size=4,
)


async def heard(address: str, messages: list[bytes]) -> list[str]:
    """The results of the turns, and the end of the call: reasons, or OK for an answer and for a good end."""
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        multi: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONVERSE)
        call = multi(timeout=60)
        reading = asyncio.create_task(_read(call))
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError):
            for message in messages:
                await call.write(message)
            await call.done_writing()
        reasons = await reading
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return [*reasons, "end"]
        error = grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), await call.details())
        told = refusal(error)
        assert told.reason in TYPED, told
        return [*reasons, told.reason]


async def _read(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> list[str]:
    reasons = []
    with suppress(grpc.aio.AioRpcError):
        while (data := await call.read()) is not grpc.aio.EOF:
            assert isinstance(data, bytes)
            response = omni_pb2.ConverseResponse.FromString(data)
            if response.HasField("usage"):
                reasons.append("OK")
            if response.HasField("turn_failed"):
                assert response.turn_failed.reason in TYPED, response
                reasons.append(response.turn_failed.reason)
    return reasons


@lengths.rounds(150, 2000)
def test_any_messages(house: Mistreated, rounds: int) -> None:
    reasons: Counter[str] = Counter()

    @settings(max_examples=rounds, suppress_health_check=list(HealthCheck), database=None, deadline=None)
    @given(messages=Messages)
    def play(messages: list[bytes]) -> None:
        reasons.update(house.play(heard(house.router, messages)))

    play()
    house.play(house.still_well())
    print(dict(reasons))
    assert reasons["OK"] and reasons["BAD_REQUEST"] and reasons["PROTOCOL"]


def test_conversations_whose_clients_vanish_at_any_moment(house: Mistreated, seed: int) -> None:
    chance = random.Random(seed)

    async def vanish(messages: list[omni_pb2.ConverseRequest]) -> None:
        channel = grpc.aio.insecure_channel(house.router, options=CLIENT_OPTIONS)
        try:
            call = omni_pb2_grpc.OmniServiceStub(channel).Converse(timeout=60)
            for message in messages:
                await call.write(message)
                await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        finally:
            await channel.close()

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(30):
                clients.create_task(vanish([TURNS[0], *chance.choices(TURNS, k=chance.randint(0, 3))]))

    house.play(all_of_them())
    house.play(house.still_well())
