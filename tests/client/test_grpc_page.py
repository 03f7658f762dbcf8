"""docs/grpc.md: every message that it shows is sent as it is printed, to a router or a stage, by a caller that knows the stubs alone."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from helpers.ask import Refusal, WholeAnswer, refusal
from helpers.run import RunStream
from helpers.servers import ServerProcess, stage_stub
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "grpc.md").read_text(encoding="utf-8")
TIMEOUT_S = 60.0

M = TypeVar("M", bound=Message)


def shown(kind: type[M]) -> list[M]:
    """The messages of this kind that the page shows, in their order."""
    texts = re.findall(r"`(\w+)`:\n```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [json_format.Parse(text, kind()) for name, text in texts if name == kind.__name__]


ASKED, RESUMED = shown(omni_pb2.GenerateRequest)
GOOD_TURN, BAD_TURN = shown(omni_pb2.ConverseRequest)
THINKER_OPEN, MORE_CREDIT, CODE2WAV_OPEN, CODES = shown(stage_pb2.RunRequest)


def test_every_message_of_the_page_is_sent_by_a_test_here() -> None:
    assert PAGE.count("```json") == 8


@pytest.fixture
async def router(toy_address: str) -> AsyncIterator[omni_pb2_grpc.OmniServiceAsyncStub]:
    async with grpc.aio.insecure_channel(toy_address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield omni_pb2_grpc.OmniServiceStub(channel)


async def answered(router: omni_pb2_grpc.OmniServiceAsyncStub, request: omni_pb2.GenerateRequest) -> list[omni_pb2.GenerateResponse]:
    return [event async for event in router.Generate(request, timeout=TIMEOUT_S)]


async def refused(router: omni_pb2_grpc.OmniServiceAsyncStub, request: omni_pb2.GenerateRequest) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answered(router, request)
    return refusal(raised.value)


def whole(events: list[omni_pb2.GenerateResponse]) -> WholeAnswer:
    answer = WholeAnswer()
    for event in events:
        answer.take(event)
    answer.check_toy(7, "Hi")
    return answer


async def test_ask(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    events = await answered(router, ASKED)
    whole(events)
    assert (events[0].WhichOneof("event"), events[-1].WhichOneof("event")) == ("started", "usage")
    (audio, *_) = [event.chunk.audio for event in events if event.chunk.HasField("audio")]
    assert (audio.encoding, audio.sample_rate_hz, audio.channel_count) == (1, formulas.SAMPLE_RATE_HZ, 1)


async def test_several_chunks_in_one_message_come_only_where_they_are_asked_for(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    assert not any(event.HasField("chunks") for event in await answered(router, ASKED))
    batched = copy_of(ASKED)
    batched.batches = True
    whole(await answered(router, batched))


def test_grpcurl_can_do_what_its_line_says(toy_address: str) -> None:
    """By reflection alone, from the method and the JSON of the line."""
    (line,) = re.findall(r"^grpcurl .*", PAGE, re.MULTILINE)
    match = re.fullmatch(r"grpcurl -plaintext -d '(.*)' 127.0.0.1:50050 (\S+)/(\S+)", line)
    assert match is not None
    with grpc.insecure_channel(toy_address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(match[2]).FindMethodByName(match[3])
        asked = json_format.Parse(match[1], GetMessageClass(method.input_type)())
        call: grpc.UnaryStreamMultiCallable[Message, Message] = channel.unary_stream(
            f"/{match[2]}/{match[3]}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        events = [json_format.MessageToDict(event) for event in call(asked, timeout=TIMEOUT_S)]
    seed = int(events[0]["started"]["seed"])
    text = "".join(event["chunk"]["text"]["text"] for event in events if "text" in event.get("chunk", {}))
    assert text == formulas.text(seed, "Hi", formulas.NATURAL_LENGTH)


async def test_an_answer_goes_on_where_it_was_cut(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    """The rest begins at the place that the request says, and what the client has and the rest are the answer."""
    started, *rest = await answered(router, RESUMED)
    assert (started.started.model, started.started.seed, list(started.started.revisions)) == ("toy", 7, ["1", "1", "1"])
    text = [event.chunk for event in rest if event.chunk.port == "text"]
    audio = [event.chunk for event in rest if event.chunk.port == "audio"]
    assert [(text[0].seq, text[0].first), (audio[0].seq, audio[0].first)] == [(2, 4), (1, 120)]
    held = RESUMED.resume.history[0].text.text
    assert held + "".join(chunk.text.text for chunk in text) == formulas.text(7, "Hi", formulas.NATURAL_LENGTH)
    samples = np.frombuffer(b"".join(chunk.audio.data for chunk in audio), "<i2")
    np.testing.assert_array_equal(samples, formulas.audio(7, "Hi", formulas.NATURAL_LENGTH)[120:, 0] * 32768)


def copy_of(message: M) -> M:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


async def test_where_only_started_came_resume_is_empty(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    request = copy_of(RESUMED)
    request.resume.Clear()
    request.resume.SetInParent()
    whole(await answered(router, request))


async def test_other_revisions_and_text_without_its_history_are_refused(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    request = copy_of(RESUMED)
    request.revisions[0] = "another"
    assert (await refused(router, request)).reason == "REVISION_MISMATCH"
    request = copy_of(RESUMED)
    del request.resume.history[:]
    assert (await refused(router, request)).reason == "BAD_REQUEST"


async def test_a_bad_request_names_its_field(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    told = await refused(router, omni_pb2.GenerateRequest(model="no-such-model"))
    assert (told.reason, told.code, told.retry_delay_s) == ("UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND, None)
    assert told.metadata["field"] == "model"
    told = await refused(router, BAD_TURN.turn)
    assert (told.reason, told.code, told.fields) == ("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT, ["thinker.max_tokens"])


async def test_a_conversation_goes_on_after_a_turn_that_failed(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    call = router.Converse(timeout=TIMEOUT_S)
    await call.write(BAD_TURN)
    failed = await call.read()
    assert isinstance(failed, omni_pb2.ConverseResponse)
    assert (failed.turn_failed.reason, failed.turn_failed.metadata["field"]) == ("BAD_REQUEST", "thinker.max_tokens")
    await call.write(GOOD_TURN)
    answer = WholeAnswer()
    while answer.usage is None:
        event = await call.read()
        assert isinstance(event, omni_pb2.ConverseResponse)
        answer.take(as_generated(event))
    answer.check_toy(7, "Hi")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


def as_generated(event: omni_pb2.ConverseResponse) -> omni_pb2.GenerateResponse:
    """The same event of a call of Generate."""
    name = event.WhichOneof("event")
    assert name in ("started", "chunk", "usage"), event
    return omni_pb2.GenerateResponse(**{name: getattr(event, name)})


@contextmanager
def by_hand(kind: str, folder: Path) -> Iterator[str]:
    """The address of a stage that is started as the page starts one, on a free port."""
    (flags,) = re.findall(r"^python -m omnistage\.thinker (.*) --address 127.0.0.1:50051$", PAGE, re.MULTILINE)
    with ServerProcess(f"omnistage.{kind}", *flags.split(), "--address", "127.0.0.1:0", log_folder=folder) as process:
        process.wait_ready()
        yield process.address


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with by_hand("thinker", tmp_path_factory.mktemp("thinker")) as address:
        yield address


async def test_a_thinker_alone(thinker: str) -> None:
    async with stage_stub(thinker) as stub:
        caller = RunStream(stub)
        await caller.call.write(THINKER_OPEN)
        await caller.opened()
        await caller.until(lambda heard: len(heard.of("text")) == 2)
        await caller.until_silent()
        assert len(caller.heard.of("text")) == 2, "more than there was credit for"
        await caller.call.write(MORE_CREDIT)
        heard = await caller.finish()
    heard.check_whole(["text"])
    assert heard.text() == formulas.text(7, "Hi", formulas.NATURAL_LENGTH)


async def test_tensors_come_inline_to_who_takes_no_offer(thinker: str) -> None:
    request = copy_of(THINKER_OPEN)
    del request.open.unwanted[:]
    del request.open.credits[:]
    request.open.credits.extend(stage_pb2.Credit(port=port, total=1000) for port in ("text", "hidden"))
    async with stage_stub(thinker) as stub:
        caller = RunStream(stub)
        await caller.call.write(request)
        assert (await caller.opened()).offers
        heard = await caller.finish()
    heard.check_whole(["text", "hidden"])
    np.testing.assert_array_equal(heard.rows("hidden")[0], formulas.row(formulas.token(7, "Hi", 0)))


async def test_an_interrupt_ends_a_session_well(thinker: str) -> None:
    async with stage_stub(thinker) as stub:
        caller = RunStream(stub)
        await caller.call.write(THINKER_OPEN)
        await caller.until(lambda heard: len(heard.of("text")) == 2)
        await caller.send(interrupt=stage_pb2.Interrupt())
        await caller.call.write(MORE_CREDIT)
        heard = await caller.finish()
    heard.check_whole(["text"])
    assert len(heard.text()) < len(formulas.text(7, "Hi", formulas.NATURAL_LENGTH))


async def test_a_code2wav_alone(tmp_path: Path) -> None:
    with by_hand("code2wav", tmp_path) as address:
        async with stage_stub(address) as stub:
            caller = RunStream(stub)
            await caller.call.write(CODE2WAV_OPEN)
            (credit,) = (await caller.opened()).credits
            assert (credit.port, credit.total > 0) == ("codes", True)
            await caller.call.write(CODES)
            heard = await caller.finish()
    heard.check_whole(["audio"])
    codes = np.array(CODES.chunk.codes.codes, np.uint32).reshape(2, 4)
    np.testing.assert_array_equal(heard.samples(), formulas.samples(codes)[:, 0] * 32768)


def test_every_message_is_the_json_that_it_is_printed_as() -> None:
    """A name that json_format does not know would have been an error; one that is written twice would not."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len({name for name, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    for text in re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        json.loads(text, object_pairs_hook=once)
