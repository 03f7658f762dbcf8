"""The reader of one answer: what is whole goes through, what is not is an error with a name; an answer ends whole, mute, or by a status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, get_args

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.peer import TEXT, Bare, Events, Play, PlayingPeer, answer, event, listening, playing
from helpers.servers import Local, local_chain, local_router
from omnistage import client
from omnistage.client import AsyncOmni, Done, Event, Omni, TextDelta, errors
from omnistage.client.answer import collect
from omnistage.client.events import Picture, TokenLogprob
from omnistage.client.reader import Reader
from omnistage.client.received import DTYPES
from omnistage.connector.tensors import layout_of, split
from omnistage.v1 import chunk_pb2, omni_pb2, tensor_pb2

NO_FILM = chunk_pb2.VideoChunk(data=b"<", media_type="text/html")
STARTED = omni_pb2.GenerateResponse(started=omni_pb2.Started(session_id="s", model="toy", seed=7))
USAGE = omni_pb2.GenerateResponse(usage=omni_pb2.Usage(finish_reason=chunk_pb2.FINISH_REASON_STOP))


def chunk(port: str, seq: int, first: int, count: int, *, last: bool = False, **content: Any) -> omni_pb2.GenerateResponse:
    return omni_pb2.GenerateResponse(chunk=chunk_pb2.Chunk(port=port, seq=seq, first=first, count=count, last=last, **content))


def text(seq: int, first: int, words: str, *, last: bool = False) -> omni_pb2.GenerateResponse:
    content = chunk_pb2.TextChunk(text=words, token_ids=range(len(words)))
    return chunk("text", seq, first, len(words), last=last, text=content)


def audio(seq: int, first: int, samples: Any, *, last: bool = False, channels: int = 1, rate: int = 24000) -> omni_pb2.GenerateResponse:
    data = np.asarray(samples, "<i2").tobytes()
    sound = chunk_pb2.AudioChunk(data=data, encoding=chunk_pb2.AUDIO_ENCODING_PCM16, sample_rate_hz=rate, channel_count=channels)
    return chunk("audio", seq, first, len(samples) // channels, last=last, audio=sound)


async def stream(messages: Sequence[omni_pb2.GenerateResponse]) -> AsyncIterator[omni_pb2.GenerateResponse]:
    for message in messages:
        yield message


async def read(*messages: omni_pb2.GenerateResponse):
    return await collect(Reader(0.0).read(stream(messages)))


def test_events_and_what_several_of_them_are_can_be_imported() -> None:
    kinds = {kind for event in get_args(Event) for kind in event.__mro__[:-1]}
    assert kinds <= {getattr(client, name) for name in client.__all__}


async def test_a_whole_answer() -> None:
    texts = text(0, 0, "ab"), text(1, 2, "c", last=True)
    answer = await read(STARTED, texts[0], audio(0, 0, [100, -200]), texts[1], audio(1, 2, [300], last=True), USAGE)
    assert answer.text == answer["content"] == "abc" and dict(answer) == {"role": "assistant", "content": "abc"}
    assert answer.audio is not None and answer.audio.sample_rate == 24000
    assert (answer.audio.samples * 32768).tolist() == [100, -200, 300]
    assert (answer.seed, answer.pipeline, answer.finish_reason) == (7, "toy", "stop")


def codes(seq: int, first: int, frames: list[list[int]], count: int, *, last: bool = False) -> omni_pb2.GenerateResponse:
    content = chunk_pb2.CodeChunk(codes=[code for frame in frames for code in frame], codebook_count=2)
    return chunk("codes", seq, first, count, last=last, codes=content)


async def test_codes_of_speech_come_as_frames() -> None:
    answer = await read(STARTED, codes(0, 0, [[1, 2], [3, 4]], 2), text(0, 0, "a", last=True), codes(1, 2, [[5, 6]], 1, last=True), USAGE)
    assert answer.codes is not None and answer.codes.dtype == np.uint32
    assert answer.codes.tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(errors.ProtocolError, match="3 codes are not 2 frames of 2"):
        await read(STARTED, codes(0, 0, [[1, 2], [3]], 2, last=True), USAGE)


def alignment(seq: int, first: int, words: Sequence[tuple[int, int, int]], *, last: bool = False) -> omni_pb2.GenerateResponse:
    """words: first character, count, and begin in ms; each lasts 100 ms."""
    spoken = [
        chunk_pb2.SpokenWord(first_character=at, character_count=n, begin_us=ms * 1000, end_us=ms * 1000 + 100_000) for at, n, ms in words
    ]
    return chunk("alignment", seq, first, len(words), last=last, alignment=chunk_pb2.AlignmentChunk(words=spoken) if spoken else None)


def tokens(seq: int, first: int, words: str, count: int, *, last: bool = False) -> omni_pb2.GenerateResponse:
    return chunk("text", seq, first, count, last=last, text=chunk_pb2.TextChunk(text=words, token_ids=range(count)))


async def test_words_come_with_their_text_however_it_was_cut_and_tokens_with_their_times() -> None:
    answer = await read(
        STARTED,
        tokens(0, 0, "**", 1),
        tokens(1, 1, "Good", 1),
        alignment(0, 0, [(2, 4, 50)]),
        tokens(2, 2, "** mor", 2),
        tokens(3, 4, "nin", 1),
        tokens(4, 5, "g, on 3", 1),
        tokens(5, 6, " May 😀 it is", 3),
        alignment(1, 1, [(9, 8, 200), (18, 8, 700)]),
        alignment(2, 3, [(29, 2, 900)]),
        tokens(6, 9, " so. 🙂", 1),
        tokens(7, 10, "!", 1, last=True),
        alignment(3, 4, [(35, 3, 1500)]),
        alignment(4, 5, [], last=True),
        USAGE,
    )
    assert [word.text for word in answer.words] == ["Good", "morning,", "on 3 May", "it", "so."]
    assert [answer.text[word.first_character :][: len(word.text)] for word in answer.words] == [word.text for word in answer.words]
    assert [(word.begin_s, word.end_s) for word in answer.words] == [(0.05, 0.15), (0.2, 0.3), (0.7, 0.8), (0.9, 1.0), (1.5, 1.6)]
    assert answer.token_begins_s() == [0.05, 0.05, 0.2, 0.2, 0.2, 0.2, 0.7, 0.7, 0.7, 1.5, 1.6]


async def test_an_answer_whose_words_are_not_told_has_none() -> None:
    answer = await read(STARTED, text(0, 0, "abc", last=True), USAGE)
    assert (answer.words, answer.token_begins_s()) == ((), [])
    alone = await read(STARTED, alignment(0, 0, [(3, 4, 0)], last=True), USAGE)
    assert [(word.text, word.first_character) for word in alone.words] == [("", 3)]


async def test_words_that_are_not_what_is_said_of_them_are_an_error() -> None:
    pair = [alignment(0, 0, [(5, 2, 0)]), alignment(1, 1, [(4, 1, 200)], last=True)]
    for bad in ([alignment(0, 0, [(5, 2, 0), (3, 2, 200)], last=True)], pair):
        with pytest.raises(errors.ProtocolError, match="out of its turn"):
            await read(STARTED, *bad, USAGE)
    fewer = alignment(0, 0, [(0, 1, 0), (2, 1, 200)], last=True)
    del fewer.chunk.alignment.words[1]
    with pytest.raises(errors.ProtocolError, match="1 words are not 2"):
        await read(STARTED, fewer, USAGE)


async def test_every_token_comes_with_its_logprob_where_that_was_asked_for() -> None:
    first, last = text(0, 0, "ab"), text(1, 2, "c", last=True)
    assert (await read(STARTED, first, last, USAGE)).logprobs == ()
    first.chunk.text.logprobs[:] = [-0.5, -2.25]
    last.chunk.text.logprobs[:] = [-0.125]
    answer = await read(STARTED, first, last, USAGE)
    assert (answer.token_ids, answer.logprobs) == ((0, 1, 0), (-0.5, -2.25, -0.125))


async def test_logprobs_come_with_their_tokens() -> None:
    tops = [chunk_pb2.TopLogprobs(token_ids=[7, 9], logprobs=[-0.5, -1.5], pieces=[b"a", b"\xf0"]), chunk_pb2.TopLogprobs()]
    content = chunk_pb2.TextChunk(text="ab", token_ids=[9, 8], logprobs=[-1.5, -2], top_logprobs=tops, pieces=[b"a", b"b"])
    events = Reader(0.0).read(stream([STARTED, chunk("text", 0, 0, 2, last=True, text=content), USAGE]))
    delta = await anext(events)
    assert isinstance(delta, TextDelta)
    assert (delta.token_ids, delta.logprobs, delta.pieces) == ((9, 8), (-1.5, -2.0), (b"a", b"b"))
    assert delta.top_logprobs == ((TokenLogprob(7, -0.5, b"a"), TokenLogprob(9, -1.5, b"\xf0")), ())
    await events.aclose()


async def test_a_connection_that_breaks_after_the_account_breaks_nothing() -> None:
    async def broken() -> AsyncIterator[omni_pb2.GenerateResponse]:
        for message in (STARTED, text(0, 0, "ab", last=True), USAGE):
            yield message
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    assert (await collect(Reader(0.0).read(broken()))).text == "ab"


async def test_channels_are_kept_apart() -> None:
    answer = await read(STARTED, audio(0, 0, [100, 300, -8, 8], channels=2, last=True), USAGE)
    assert answer.audio is not None and (answer.audio.samples * 32768).tolist() == [[100, 300], [-8, 8]]
    with pytest.raises(errors.ProtocolError, match="there are 1 channels, before there were 2"):
        await read(STARTED, audio(0, 0, [100, 300], channels=2), audio(1, 1, [5]))


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([STARTED, audio(0, 0, [1, 2]), audio(1, 3, [4]), USAGE], "gap, position 3 came, 2 is next"),
        ([STARTED, audio(0, 0, [1, 2]), audio(1, 1, [2]), USAGE], "repeat, position 1 came, 2 is next"),
        ([STARTED, text(0, 0, "a"), text(2, 1, "b"), USAGE], "chunk 2 came, 1 is next"),
        ([STARTED, text(0, 0, "a", last=True), text(1, 1, "b"), USAGE], "after the last"),
        ([STARTED, text(0, 0, "a"), USAGE], "text did not end"),
        ([STARTED, text(0, 0, "a", last=True)], "before its account"),
        ([text(0, 0, "a")], "before the start"),
        ([STARTED, STARTED], "started twice"),
        ([STARTED, audio(0, 0, [1], rate=24000), audio(1, 1, [1], rate=16000)], "sample rate"),
        ([STARTED, audio(0, 0, [1], rate=0)], "sample rate"),
        ([STARTED, chunk("text", 0, 0, 2)], "without content"),
        ([STARTED, chunk("media", 0, 0, 0, media=chunk_pb2.MediaChunk())], "cannot read media"),
        ([STARTED, chunk("video", 0, 0, 0, video=NO_FILM)], "a film of type 'text/html'"),
    ],
)
async def test_a_stream_that_is_not_whole(messages: list[omni_pb2.GenerateResponse], told: str) -> None:
    with pytest.raises(errors.ProtocolError, match=told):
        await read(*messages)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(lambda chunk: setattr(chunk, "count", 2), "6 bytes are not 2 samples", id="its length is not its count"),
        pytest.param(lambda chunk: setattr(chunk.audio, "encoding", 9), "encoding 9", id="an encoding of a newer server"),
    ],
)
async def test_sound_that_cannot_be_read(change: Callable[[chunk_pb2.Chunk], None], told: str) -> None:
    message = audio(0, 0, [1, 2, 3])
    change(message.chunk)
    with pytest.raises(errors.ProtocolError, match=told):
        await read(STARTED, message)


async def test_float_sound() -> None:
    data = np.array([0.5, -1.0], "<f4").tobytes()
    sound = chunk_pb2.AudioChunk(data=data, encoding=chunk_pb2.AUDIO_ENCODING_FLOAT32, sample_rate_hz=22050, channel_count=1)
    answer = await read(STARTED, chunk("audio", 0, 0, 2, last=True, audio=sound), USAGE)
    assert answer.audio is not None and answer.audio.samples.tolist() == [0.5, -1.0]


def image(seq: int, first: int, data: bytes, offset: int, total: int, *, last: bool, step: int | None = None) -> omni_pb2.GenerateResponse:
    part = tensor_pb2.InlinePart(data=data, offset=offset, total_bytes=total)
    picture = chunk_pb2.ImageChunk(data=part, media_type="image/png", preview_step=step)
    return chunk("image", seq, first, int(offset + len(data) == total and step is None), last=last, image=picture)


async def test_a_picture_in_pieces_after_a_preview() -> None:
    messages = [image(0, 0, b"pre", 0, 3, last=False, step=2), image(1, 0, b"abc", 0, 5, last=False), image(2, 0, b"de", 3, 5, last=True)]
    events = [event async for event in Reader(0.0).read(stream([STARTED, *messages, USAGE]))]
    pictures = [(e.data, e.index, e.preview_step) for e in events if isinstance(e, Picture)]
    assert pictures == [(b"pre", 0, 2), (b"abcde", 0, None)]


@pytest.mark.parametrize("kind", ["image/svg+xml", "text/html", "image/gif", "", "IMAGE/PNG", "image/png\r\n"])
async def test_a_picture_that_may_be_more_than_one(kind: str) -> None:
    message = image(0, 0, b"abc", 0, 3, last=True)
    message.chunk.image.media_type = kind
    with pytest.raises(errors.ProtocolError, match="must be image/png"):
        await read(STARTED, message, USAGE)


async def test_a_picture_with_a_missing_piece() -> None:
    with pytest.raises(errors.ProtocolError, match="a piece at byte 4"):
        await read(STARTED, image(0, 0, b"abc", 0, 6, last=False), image(1, 0, b"ef", 4, 6, last=True))


def rows_of(
    seq: int, first: int, rows: NDArray[Any], *, last: bool = False, element_type: tensor_pb2.ElementType | None = None
) -> list[omni_pb2.GenerateResponse]:
    """As a stage sends them to who can read its messages only: in parts of a MiB."""
    layout = layout_of(rows, element_type)
    parts = list(split(np.frombuffer(rows.tobytes(), np.uint8), layout))
    chunks = [chunk_pb2.Chunk(port="rows", seq=seq + number, first=first, tensor=part) for number, part in enumerate(parts)]
    chunks[-1].count, chunks[-1].last = len(rows), last
    return [omni_pb2.GenerateResponse(chunk=chunk) for chunk in chunks]


@pytest.mark.parametrize("element_type", DTYPES)
async def test_rows_of_every_type_come_as_arrays(element_type: tensor_pb2.ElementType) -> None:
    sent = np.arange(6).astype(DTYPES[element_type]).reshape(3, 2)
    two, one = rows_of(0, 0, sent[:2], element_type=element_type), rows_of(1, 2, sent[2:], element_type=element_type, last=True)
    rows = (await read(STARTED, *two, *one, USAGE)).rows["rows"]
    if element_type == tensor_pb2.ELEMENT_TYPE_BFLOAT16:
        sent = (sent.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(rows, sent) and rows.dtype == sent.dtype


def test_every_type_of_the_contract_is_known() -> None:
    assert set(DTYPES) == set(tensor_pb2.ElementType.values()) - {tensor_pb2.ELEMENT_TYPE_UNSPECIFIED}


async def test_a_row_that_comes_in_parts_is_put_together_also_after_a_loss() -> None:
    sent = np.random.default_rng(1).standard_normal((2, 300_000)).astype(np.float32)
    one, two, three = rows_of(0, 0, sent, last=True)
    reader = Reader(0.0)
    events = reader.read(stream([STARTED, one, two]))
    with pytest.raises(errors.ProtocolError, match="ended before its account"):
        await anext(events)
    reader.lose("127.0.0.1:1", "gone")
    again = rows_of(2, 0, sent, last=True)
    answer = await collect(reader.read(stream([STARTED, *again, USAGE])))
    assert np.array_equal(answer.rows["rows"], sent) and list(answer.rows) == ["rows"]
    assert np.array_equal((await read(STARTED, one, two, three, USAGE)).rows["rows"], sent)
    with pytest.raises(errors.ProtocolError, match="a part at byte 0 of 2400000, 1048576 is next"):
        two.chunk.tensor.inline.offset = 0
        await read(STARTED, one, two, three, USAGE)


def enlarge(chunk: chunk_pb2.Chunk) -> None:
    chunk.tensor.shape[1], chunk.tensor.inline.total_bytes = 1 << 40, 12 << 40


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda chunk: setattr(chunk, "count", 2), "3 rows are not 2"),
        (lambda chunk: setattr(chunk.tensor, "element_type", 0), "of type 0 are no rows"),
        (lambda chunk: setattr(chunk.tensor, "element_type", 99), "of type 99 are no rows"),
        (lambda chunk: chunk.tensor.shape.append(1), "are no rows"),
        (lambda chunk: chunk.tensor.shape.__setitem__(1, 3), "24 bytes are not 3 rows of 3"),
        (enlarge, "or too many"),
        (lambda chunk: setattr(chunk.tensor.inline, "offset", 8), "a part at byte 8"),
        (lambda chunk: chunk.tensor.shared_memory.SetInParent(), "outside of its message"),
    ],
)
async def test_rows_that_are_not_what_is_said_of_them_are_an_error(change: Callable[[chunk_pb2.Chunk], None], told: str) -> None:
    (message,) = rows_of(0, 0, np.zeros((3, 2), np.float32), last=True)
    change(message.chunk)
    with pytest.raises(errors.ProtocolError, match=told):
        await read(STARTED, message, USAGE)


async def test_rows_that_change_or_are_cut_are_an_error() -> None:
    sent = np.zeros((3, 2), np.float32)
    with pytest.raises(errors.ProtocolError, match="another type or width than before"):
        await read(STARTED, *rows_of(0, 0, sent), *rows_of(1, 3, np.zeros((1, 3), np.float32), last=True), USAGE)
    (cut,) = rows_of(0, 0, sent, last=True)
    cut.chunk.tensor.inline.data, cut.chunk.count = b"0123", 0
    with pytest.raises(errors.ProtocolError, match="the answer is cut: rows did not end"):
        await read(STARTED, cut, USAGE)


ANSWERS = 100
CLIENTS = pytest.mark.parametrize("client", [AsyncOmni, Omni])


async def asked(client: type[Any], what: str, *plays: Play, **options: Any) -> tuple[Any, int]:
    """The result of a client's call, in a coroutine or in a thread, as its user makes it, and how many requests it was."""
    peer = PlayingPeer(*plays)

    def ask(address: str) -> Any:
        with Omni(address=address) as omni:
            return getattr(omni, what)(**options)

    async with listening(peer) as wire:
        if client is Omni:
            result = await asyncio.to_thread(ask, wire.address)
        else:
            async with AsyncOmni(address=wire.address) as omni:
                result = await getattr(omni, what)(**options)
    return result, len(peer.requests)


@pytest.fixture
async def router() -> AsyncIterator[Local]:
    async with local_chain({"length": 3}) as chain, local_router({kind: stage.address for kind, stage in chain.items()}) as running:
        yield running


def ended(router: Local) -> dict[str, float]:
    """Requests of the toy pipeline by how they ended."""
    samples = [sample for family in router.registry.collect() for sample in family.samples]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name == "omnistage_router_requests_total"}


async def test_whole_answers_of_asyncio(router: Local) -> None:
    async with AsyncOmni(address=router.address) as omni:
        for number in range(ANSWERS):
            await omni.say("Hi.", seed=number)
    assert ended(router) == {"OK": ANSWERS}


async def test_whole_answers_and_streams_without_asyncio(router: Local) -> None:
    def ask() -> None:
        with Omni(address=router.address) as omni:
            for number in range(ANSWERS // 2):
                omni.say("Hi.", seed=number)
                stream = omni.stream_say("Hi.", seed=number)
                while not isinstance(next(stream), Done):
                    pass
                stream.close()

    await asyncio.to_thread(ask)
    assert ended(router) == {"OK": ANSWERS}


async def test_a_status_that_does_not_come_is_not_waited_for() -> None:
    whole = list(answer(omni_pb2.GenerateRequest()))
    async with playing(whole) as (peer, _, omni):  # It sends these and then nothing more, no status either.
        assert (await omni.generate("Hi")).text == TEXT
        async with asyncio.timeout(30):
            await peer.cancelled.wait()


async def test_what_comes_after_the_account_is_an_error() -> None:
    with pytest.raises(errors.ProtocolError, match="after its account"):
        await asked(AsyncOmni, "generate", [*answer(omni_pb2.GenerateRequest()), event(omni_pb2.Usage())], prompt="Hi")


MUTE: Events = [message for message in answer(omni_pb2.GenerateRequest()) if message.chunk.port != "audio"]
"""An answer without a port of sound."""

CODED: Events = [*MUTE[:-1], event(chunk_pb2.Chunk(port="codes", last=True)), MUTE[-1]]
"""An answer whose speech stays codes."""

EMPTY: Events = [*MUTE[:-1], event(chunk_pb2.Chunk(port="audio", last=True)), MUTE[-1]]
"""An answer whose sound ends before the first sample."""


@CLIENTS
@pytest.mark.parametrize(("events", "why"), [(MUTE, "it has no Talker"), (CODED, "it has no Code2Wav"), (EMPTY, "no sound came")])
async def test_what_cannot_be_spoken_is_an_error_with_a_name(events: Events, why: str, client: type[Any]) -> None:
    for options in ({}, {"outputs": ["text", "audio"]}):
        with pytest.raises(errors.NotSpokenError, match=f"nothing of this text could be spoken by peer: {why}") as caught:
            await asked(client, "say", events, text="...", **options)
        assert "voice" in caught.value.hint
    assert (await asked(client, "say", text="Hi"))[0].audio is not None


async def test_a_stream_tells_it_at_its_end_instead_of_done() -> None:
    heard: list[Event] = []
    async with playing(MUTE) as (_, _, omni), aclosing(omni.stream_say("...")) as stream:
        with pytest.raises(errors.NotSpokenError):
            async for told in stream:
                heard.append(told)
    assert "".join(told.text for told in heard if isinstance(told, TextDelta)) == TEXT
    assert not any(isinstance(told, Done) for told in heard)


async def test_who_asked_for_no_sound_misses_none(tmp_path: Path) -> None:
    async with playing(MUTE, MUTE) as (_, _, omni):
        assert (await omni.say("...", outputs=["text"])).text == TEXT
        answered = await omni.generate("Hi")
    assert answered.audio is None  # an answer is worth having without its sound
    with pytest.raises(errors.NotSpokenError, match="no sound"):
        answered.save(tmp_path / "absent.wav")
    assert not (tmp_path / "absent.wav").exists()


CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
MAY_BE_ASKED_AGAIN = errors.BROKEN | {grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED}


@CLIENTS
@pytest.mark.parametrize("after", [0, 6])
@pytest.mark.parametrize("code", sorted(errors.BROKEN, key=str))
async def test_an_answer_that_is_cut_off_goes_on(code: grpc.StatusCode, after: int, client: type[Any]):
    answer, count = await asked(client, "generate", Bare(code, after), prompt="Hi")
    assert (answer.text, count) == (TEXT, 2)


@CLIENTS
@pytest.mark.parametrize("code", sorted(errors.BROKEN, key=str))
async def test_an_answer_that_is_cut_off_twice_may_be_asked_again(code: grpc.StatusCode, client: type[Any]):
    with pytest.raises(errors.RouterLostError) as told:
        await asked(client, "generate", Bare(code, 6), Bare(code, 6), prompt="Hi")
    assert told.value.code is code and code.name in str(told.value) and "Ask again" in told.value.hint


@CLIENTS
@pytest.mark.parametrize("code", CODES)
async def test_every_status_is_an_error_that_says_what_to_do(code: grpc.StatusCode, client: type[Any]):
    """For whoever asks once; the task that asks is cancelled by none of them."""
    with pytest.raises(errors.OmniError) as told:
        await asked(client, "pipelines", Bare(code))
    error, task = told.value, asyncio.current_task()
    assert error.code is code and error.hint and str(error)
    assert isinstance(error, errors.UnavailableError) == (code in MAY_BE_ASKED_AGAIN)
    assert not isinstance(error, errors.UnavailableError) or error.retry_delay_s
    assert task is not None and not task.cancelling()


@CLIENTS
async def test_a_time_limit_that_is_not_the_clients_is_not_told_as_its_own(client: type[Any]):
    with pytest.raises(errors.DeadlineError, match="before its own time limit of 60 s") as told:
        await asked(client, "generate", Bare(grpc.StatusCode.DEADLINE_EXCEEDED), prompt="Hi", timeout_s=60)
    assert "proxy" in told.value.hint
