"""The rules of `Run`: whoever breaks one gets exactly one typed end, in Ended and in the status, and the next session is not harmed. A port
that nobody wants has ended from the beginning, and a Thinker's text is known by what its port carries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from helpers.ask import WholeAnswer, ask, request
from helpers.chain import router_and_stages, toy_chain
from helpers.link import ENDED, Context, bare_peer, listen, say
from helpers.models import CountingThinker
from helpers.ports import take_address
from helpers.run import params, row_chunks, run_interrupted, tensor_of
from helpers.stage import EXHAUSTED, INVALID, PRECONDITION, ROWS, chunk, hop_to, stage_of, stage_with
from omnistage.client.received import Received
from omnistage.models.interface import Piece, TensorRows, TextPiece, TextRequest, Wanted
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import ToyOptions, ToyThinker
from omnistage.router.pipeline import load_pipeline
from omnistage.stage.inputs import WINDOW
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.limits import MAX_ADDRESSES, MAX_HOPS

RUN = "/omnistage.v1.StageService/Run"


# The first message ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"chunk": chunk()},
        {"credit": stage_pb2.Credit(port="codes", total=1)},
        {"release": tensor_pb2.Release()},
        {"interrupt": stage_pb2.Interrupt()},
        {},
        None,
    ],
    ids=["chunk", "credit", "release", "interrupt", "empty", "half-close"],
)
async def test_first_message_must_be_open(event: dict[str, object] | None):
    async with stage_of("talker") as stage:
        caller = stage.caller()
        await (caller.call.done_writing() if event is None else caller.send(**event))
        await caller.expect("PROTOCOL", INVALID)


def decoded(message: object) -> stage_pb2.RunResponse:
    assert isinstance(message, bytes)
    return stage_pb2.RunResponse.FromString(message)


@pytest.mark.parametrize("after_open", [False, True], ids=["first", "later"])
async def test_bytes_that_are_no_message(after_open: bool):
    async with stage_of("talker") as stage, grpc.aio.insecure_channel(stage.address) as channel:
        run: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(RUN)
        call: grpc.aio.StreamStreamCall[bytes, bytes] = run(timeout=30)
        if after_open:
            await call.write(stage_pb2.RunRequest(open=stage.open()).SerializeToString())
            assert decoded(await call.read()).HasField("opened")
        await call.write(b"\xff" + random.randbytes(40))
        ended = decoded(await call.read()).ended
        await call.write(b"\xff\xff")
        await call.done_writing()
        assert (ended.reason, await call.code()) == ("PROTOCOL", INVALID)
        assert await call.details() == ended.message


def hop(*addresses: str, takes: Sequence[str] = ("codes",)) -> stage_pb2.Hop:
    return stage_pb2.Hop(takes=takes, addresses=addresses)


HERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"resume": stage_pb2.Resume(positions=[stage_pb2.Position(port="codes", seq=1, first=2)])}, "resume.history"),
        ({"resume": stage_pb2.Resume(positions=[stage_pb2.Position(port="Codes")])}, "resume.positions"),
        *[({"session_id": name}, "open.session_id") for name in ("", "a" * 65, "a/b", "a\n", "\N{LATIN SMALL LETTER E WITH ACUTE}")],
        ({"params": params("code2wav")}, "open.params"),
        ({"params": params("talker", voice="nobody")}, "talker.voice"),
        ({"checkpoints": ["audio"]}, "open.checkpoints"),
        ({"checkpoints": ["hidden"]}, "open.checkpoints"),
        ({"credits": {f"port{n}": 1 for n in range(65)}}, "open.credits"),
        ({"route": [hop()]}, "open.route.addresses"),
        ({"route": [hop(*[HERE] * (MAX_ADDRESSES + 1))]}, "open.route.addresses"),
        ({"route": [hop(HERE, takes=())]}, "open.route.takes"),
        ({"route": [hop(HERE, takes=["hidden"])]}, "open.route.takes"),
        ({"route": [hop(HERE)] * (MAX_HOPS + 1)}, "open.route"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
async def test_open_is_checked(fields: dict[str, Any], field: str):
    async with stage_of("talker") as stage:
        assert (await stage.refuse("BAD_REQUEST", **fields)).metadata["field"] == field


@pytest.mark.parametrize(
    ("fields", "reason", "code"),
    [
        ({"model": "other"}, "UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND),
        ({"model": ""}, "UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND),
        ({"revision": "other"}, "REVISION_MISMATCH", PRECONDITION),
    ],
)
async def test_a_stage_opens_what_is_for_its_model(fields: dict[str, Any], reason: str, code: grpc.StatusCode):
    async with stage_of("talker") as stage:
        assert "field" not in (await stage.refuse(reason, code, **fields)).metadata


async def test_a_route_that_cannot_be_reached_is_a_lost_stage():
    async with stage_of("talker") as stage:
        ended = await stage.refuse("STAGE_LOST", grpc.StatusCode.UNAVAILABLE, route=[hop_to(take_address())])
        assert ended.metadata["stage"] == "code2wav" and ended.HasField("retry_delay")


async def test_an_error_of_a_hop_behind_comes_up_as_it_is():
    async with stage_of("code2wav") as behind, stage_of("talker") as stage:
        hop = hop_to(behind.address, params=params("code2wav", profile="best"))
        ended = await stage.refuse("BAD_REQUEST", route=[hop])
        assert ended.metadata["field"] == "code2wav.profile"


# Input ---------------------------------------------------------------------------------------------------------------------------------


def other(count: int = 1, **payload: Any) -> chunk_pb2.Chunk:
    return chunk_pb2.Chunk(port="hidden", count=count, **payload)


def tensor(element_type: tensor_pb2.ElementType, data: bytes) -> tensor_pb2.Tensor:
    """One row of 32 numbers, as it says."""
    inline = tensor_pb2.InlinePart(data=data, total_bytes=len(data))
    return tensor_pb2.Tensor(element_type=element_type, shape=[1, 32], inline=inline)


FOREIGN = tensor(tensor_pb2.ELEMENT_TYPE_FLOAT32, b"")
FOREIGN.shared_memory.CopyFrom(tensor_pb2.SharedMemorySlot(arena=bytes(16), length=128, generation=1))

BROKEN = {
    "seq does not start at 0": [chunk(seq=1)],
    "items do not start at 0": [chunk(first=1)],
    "gap in seq": [chunk(), chunk(seq=2, first=1)],
    "gap in items": [chunk(), chunk(seq=1, first=2)],
    "repeat": [chunk(), chunk()],
    "overlap of items": [chunk(), chunk(seq=1, first=0)],
    "after last": [chunk(last=True), chunk(seq=1, first=1)],
    "unknown port": [chunk(port="codes")],
    "no port": [chunk(port="")],
    "wrong payload": [other(text=chunk_pb2.TextChunk(text="a"))],
    "items without payload": [other()],
    "wrong width": [other(tensor=tensor_of(np.zeros((1, 33), np.float32)))],
    "fewer rows than items": [other(3, tensor=tensor_of(ROWS[:2]))],
    "wrong rank": [other(tensor=tensor_of(np.zeros(32, np.float32)))],
    "wrong element type": [other(tensor=tensor(tensor_pb2.ELEMENT_TYPE_INT16, bytes(64)))],
    "shape and bytes differ": [other(tensor=tensor(tensor_pb2.ELEMENT_TYPE_FLOAT32, bytes(4)))],
    "memory that was not offered": [other(tensor=FOREIGN)],
    "empty tensor": [other(tensor=tensor_pb2.Tensor())],
}


@pytest.mark.parametrize("chunks", BROKEN.values(), ids=BROKEN)
async def test_input_that_breaks_a_rule_is_protocol(chunks: list[chunk_pb2.Chunk]):
    async with stage_of("talker") as stage:
        caller = await stage.opened(credits={})  # So that it cannot end well before the wrong chunk comes.
        for wrong in chunks:
            await caller.send(chunk=wrong)
        await caller.expect("PROTOCOL", INVALID)


async def test_second_open_is_protocol():
    async with stage_of("talker") as stage:
        caller = await stage.opened()
        await caller.send(open=stage.open())
        await caller.expect("PROTOCOL", INVALID)


@pytest.mark.parametrize(
    "frame", [chunk_pb2.CodeChunk(codes=[1, 2, 3], codebook_count=3), chunk_pb2.CodeChunk(codes=[1, 2, 3], codebook_count=4)]
)
async def test_codes_of_the_wrong_size_are_protocol(frame: chunk_pb2.CodeChunk):
    async with stage_of("code2wav") as stage:
        caller = await stage.opened()
        await caller.send(chunk=chunk_pb2.Chunk(port="codes", count=1, codes=frame))
        await caller.expect("PROTOCOL", INVALID)


async def test_more_chunks_than_credit():
    """The stage makes nothing without credit for its output, so it takes one chunk at most and the window fills."""
    async with stage_of("talker") as stage:
        caller = await stage.opened(credits={})
        assert caller.heard.credits == {"hidden": WINDOW}
        for seq in range(WINDOW + 2):
            await caller.send(chunk=chunk(seq=seq, first=seq))
        await caller.expect("CREDIT_EXCEEDED", EXHAUSTED)


async def test_within_the_credit_any_number_of_chunks_is_taken():
    async with stage_of("talker") as stage:
        rows = np.stack([formulas.row(n) for n in range(10 * WINDOW)])
        heard = await stage.run(row_chunks("hidden", rows, [1] * len(rows)))
        heard.check_whole(["codes"])
        assert dict(heard.reports[0].input_items) == {"hidden": len(rows)}
        np.testing.assert_array_equal(heard.codes(), formulas.frames(rows))


async def test_a_tensor_in_parts_counts_once():
    """Two inline parts of one tensor: the first has count 0, the items come with the last."""
    data = ROWS.astype("<f4").tobytes()
    parts = []
    for seq, (part, offset, count) in enumerate([(data[:400], 0, 0), (data[400:], 400, len(ROWS))]):
        inline = tensor_pb2.InlinePart(data=part, offset=offset, total_bytes=len(data))
        rows = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=ROWS.shape, inline=inline)
        parts.append(chunk_pb2.Chunk(port="hidden", seq=seq, first=0, count=count, last=seq == 1, tensor=rows))
    async with stage_of("talker") as stage:
        heard = await stage.run(parts)
        np.testing.assert_array_equal(heard.codes(), formulas.frames(ROWS))


# Ports that nobody wants ----------------------------------------------------------------------------------------------------------------


async def test_rows_that_nobody_wants_are_neither_computed_nor_sent(seed: int):
    model = CountingThinker(ToyOptions())
    async with stage_with(ThinkerStage(model)) as stage:
        heard = await stage.run(seed=seed, unwanted=["hidden"], client="somebody")
        heard.check_whole(["text"])
        assert heard.text() == formulas.text(seed, "hello", formulas.NATURAL_LENGTH)
        assert dict(heard.reports[0].output_items) == {"text": formulas.NATURAL_LENGTH, "hidden": 0}
        assert (model.computed, model.wanted, model.clients) == (0, [{"text": 0}], ["somebody"])


async def test_one_who_wants_rows_gets_them_beside_one_who_does_not(seed: int):
    model = CountingThinker(ToyOptions(interval_s=0.001))
    async with stage_with(ThinkerStage(model)) as stage:
        text, both = await asyncio.gather(
            stage.run(seed=seed, session_id="one", unwanted=["hidden"]), stage.run(seed=seed, session_id="other")
        )
        text.check_whole(["text"])
        both.check_whole(["text", "hidden"])
        assert model.computed == formulas.NATURAL_LENGTH


async def test_a_session_that_goes_on_does_not_want_what_an_older_stage_sent(seed: int):
    """A stage that knows no unwanted ports sent rows; its replacement sends none, wherever they stood."""
    model = CountingThinker(ToyOptions())
    async with stage_with(ThinkerStage(model)) as stage:
        whole = await stage.run(seed=seed, unwanted=["hidden"])
        tokens = [token for chunk in whole.of("text") for token in chunk.text.token_ids][:5]
        history = chunk_pb2.Chunk(port="text", count=5, text=chunk_pb2.TextChunk(token_ids=tokens))
        positions = [stage_pb2.Position(port="text", seq=3, first=5), stage_pb2.Position(port="hidden", seq=2, first=4)]
        resume = stage_pb2.Resume(positions=positions, history=[history])
        heard = await stage.run(seed=seed, unwanted=["hidden"], resume=resume)
        assert list(heard.chunks) == ["text"] and model.computed == 0
        assert heard.of("text")[0].first == 5
        assert whole.text().endswith(heard.text())


async def test_what_nobody_wants_of_the_hops_behind_and_who_asks_is_passed_on():
    given = asyncio.get_running_loop().create_future()

    async def behind(opened: stage_pb2.Open, context: Context) -> None:
        given.set_result(opened)
        await say(context, stage_pb2.RunResponse(opened=stage_pb2.Opened(credits=[stage_pb2.Credit(port="hidden", total=100)])), ENDED)
        await listen(context)

    async with bare_peer(behind) as address, stage_of("thinker") as stage:
        await stage.run(route=[hop_to(address, kind="talker", unwanted=["lips"])], client="somebody")
        opened: stage_pb2.Open = given.result()
        assert (list(opened.unwanted), opened.client) == (["lips"], "somebody")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"unwanted": ["nothing"]}, "open.unwanted"),
        ({"unwanted": ["text"], "checkpoints": ["text"]}, "open.unwanted"),
        ({"unwanted": ["hidden"], "route": [hop_to("127.0.0.1:1", kind="talker")]}, "open.unwanted"),
        ({"client": "x" * 65}, "open.client"),
    ],
    ids=["no port of this stage", "a checkpoint", "what the next hop takes", "too long a name"],
)
async def test_what_cannot_be_unwanted_is_refused_and_the_next_session_works(fields: dict[str, Any], field: str):
    async with stage_of("thinker") as stage:
        assert (await stage.refuse("BAD_REQUEST", **fields)).metadata["field"] == field


# The port of the text -------------------------------------------------------------------------------------------------------------------


class SayingWords(ToyThinker):
    """Its text comes on the port `words`."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        text, hidden = self.info.produces
        self.info = replace(self.info, produces=(replace(text, name="words"), hidden))

    def generate(self, prepared: TextRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[TextPiece | TensorRows, None]:
        return super().generate(prepared, inputs, {"text" if port == "words" else port: first for port, first in ports.items()})


def words(answer: WholeAnswer) -> str:
    return "".join(chunk.text.text for chunk in answer.of("words"))


@pytest.mark.parametrize(("count", "told"), [(0, "none"), (2, "text, more")])
def test_a_thinker_has_one_port_of_text(count: int, told: str) -> None:
    model = ToyThinker(ToyOptions())
    text, hidden = model.info.produces
    model.info = replace(model.info, produces=(*(text, replace(text, name="more"))[:count], hidden))
    with pytest.raises(ValueError, match=f"toy-thinker is a Thinker and must have one compact port of text; it has {told}"):
        ThinkerStage(model)


async def test_an_interrupted_text_says_so_whatever_its_port_is_called():
    logic = ThinkerStage(SayingWords(ToyOptions(interval_s=0.01, length=100_000)))
    async with stage_with(logic) as stage:
        heard = await run_interrupted(stage.stub, stage.open(unwanted=["hidden"]), "words")
        heard.check_whole(["words"])
        assert heard.of("words")[-1].text.finish_reason == chunk_pb2.FINISH_REASON_INTERRUPTED


async def test_an_answer_is_timed_and_gone_on_with_whatever_the_port_of_its_text_is_called(seed: int):
    logic = ThinkerStage(SayingWords(ToyOptions(max_chunk=3)))
    pipeline = load_pipeline("toy").model_copy(update={"name": "mine", "outputs": ("words", "audio")})
    async with router_and_stages(toy_chain(None, logic), pipeline) as stack:
        asked = request("Say it.", seed, model="mine")
        whole = await ask(stack.stub, asked)
        whole.check_whole()
        assert whole.started is not None and whole.usage is not None
        assert words(whole) == formulas.text(seed, "Say it.", formulas.NATURAL_LENGTH)
        assert whole.usage.finish_reason == chunk_pb2.FINISH_REASON_STOP
        assert whole.usage.HasField("first_text") and whole.usage.HasField("first_audio")

        received = Received()
        received.start(whole.started)
        had = whole.of("words")[:3]
        for chunk in had:
            received.take(chunk)
        rest = await ask(stack.stub, received.request(asked))
        assert rest.of("words")[0].first == sum(chunk.count for chunk in had)
        assert "".join(chunk.text.text for chunk in had) + words(rest) == words(whole)
