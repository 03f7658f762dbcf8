"""A port that nobody wants has ended from the beginning: it is not computed, not sent, and not asked of a replacement."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from helpers.link import ENDED, Context, bare_peer, listen, say
from helpers.models import CountingThinker
from helpers.run import RunAnswer, RunStream, open_of, run_interrupted, run_once
from helpers.servers import all_free, local_stage, stage_stub
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import ToyOptions
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2, stage_pb2

TALKER = stage_pb2.STAGE_KIND_TALKER


async def test_rows_that_nobody_wants_are_neither_computed_nor_sent(seed: int):
    model = CountingThinker(ToyOptions())
    logic = ThinkerStage(model)
    async with local_stage(logic) as stage, stage_stub(stage.address) as stub:
        heard = await run_once(stub, open_of(logic.description, seed=seed, unwanted=["hidden"], client="somebody"))
        heard.check_whole(["text"])
        assert heard.text() == formulas.text(seed, "hello", formulas.NATURAL_LENGTH)
        assert dict(heard.reports[0].output_items) == {"text": formulas.NATURAL_LENGTH, "hidden": 0}
        assert (model.computed, model.wanted, model.clients) == (0, [{"text": 0}], ["somebody"])
        await all_free([stage.address])


async def test_one_who_wants_rows_gets_them_beside_one_who_does_not(seed: int):
    model = CountingThinker(ToyOptions(interval_s=0.001))
    logic = ThinkerStage(model)
    async with local_stage(logic) as stage, stage_stub(stage.address) as stub:
        asked = [open_of(logic.description, seed=seed, session_id=name) for name in ("one", "other")]
        asked[0].unwanted.append("hidden")
        text, both = await asyncio.gather(*(run_once(stub, each) for each in asked))
        text.check_whole(["text"])
        both.check_whole(["text", "hidden"])
        assert model.computed == formulas.NATURAL_LENGTH


async def test_an_interrupted_session_does_not_end_a_port_that_nobody_wants():
    logic = ThinkerStage(CountingThinker(ToyOptions(interval_s=0.01, length=100_000)))
    async with local_stage(logic) as stage, stage_stub(stage.address) as stub:
        heard = await run_interrupted(stub, open_of(logic.description, unwanted=["hidden"]), "text")
        heard.check_whole(["text"])
        assert heard.of("text")[-1].text.finish_reason == chunk_pb2.FINISH_REASON_INTERRUPTED


async def test_a_session_that_goes_on_does_not_want_what_an_older_stage_sent(seed: int):
    """A stage that knows no unwanted ports sent rows; its replacement sends none, wherever they stood."""
    model = CountingThinker(ToyOptions())
    logic = ThinkerStage(model)
    async with local_stage(logic) as stage, stage_stub(stage.address) as stub:
        whole = await run_once(stub, open_of(logic.description, seed=seed, unwanted=["hidden"]))
        tokens = [token for chunk in whole.of("text") for token in chunk.text.token_ids][:5]
        history = chunk_pb2.Chunk(port="text", count=5, text=chunk_pb2.TextChunk(token_ids=tokens))
        positions = [stage_pb2.Position(port="text", seq=3, first=5), stage_pb2.Position(port="hidden", seq=2, first=4)]
        resume = stage_pb2.Resume(positions=positions, history=[history])
        heard = await run_once(stub, open_of(logic.description, seed=seed, unwanted=["hidden"], resume=resume))
        assert list(heard.chunks) == ["text"] and model.computed == 0
        assert heard.of("text")[0].first == 5
        assert whole.text().endswith(heard.text())


async def test_what_nobody_wants_of_the_hops_behind_and_who_asks_is_passed_on():
    given = asyncio.get_running_loop().create_future()

    async def behind(opened: stage_pb2.Open, context: Context) -> None:
        given.set_result(opened)
        await say(context, stage_pb2.RunResponse(opened=stage_pb2.Opened(credits=[stage_pb2.Credit(port="hidden", total=100)])), ENDED)
        await listen(context)

    logic = ThinkerStage(CountingThinker(ToyOptions()))
    async with bare_peer(behind) as address, local_stage(logic) as stage, stage_stub(stage.address) as stub:
        hop = stage_pb2.Hop(kind=TALKER, model="m", addresses=[address], takes=["hidden"], unwanted=["lips"])
        await run_once(stub, open_of(logic.description, route=[hop], client="somebody"))
        opened: stage_pb2.Open = given.result()
        assert (list(opened.unwanted), opened.client) == (["lips"], "somebody")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"unwanted": ["nothing"]}, "open.unwanted"),
        ({"unwanted": ["text"], "checkpoints": ["text"]}, "open.unwanted"),
        (
            {"unwanted": ["hidden"], "route": [stage_pb2.Hop(kind=TALKER, model="m", addresses=["127.0.0.1:1"], takes=["hidden"])]},
            "open.unwanted",
        ),
        ({"client": "x" * 65}, "open.client"),
    ],
    ids=["no port of this stage", "a checkpoint", "what the next hop takes", "too long a name"],
)
async def test_what_cannot_be_unwanted_is_refused_and_the_next_session_works(fields: dict[str, object], field: str):
    logic = ThinkerStage(CountingThinker(ToyOptions()))
    async with local_stage(logic) as stage, stage_stub(stage.address) as stub:
        caller = RunStream(stub)
        await caller.send(open=open_of(logic.description, **fields))  # type: ignore[arg-type]
        ended = await caller.expect("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
        assert ended.metadata["field"] == field
        heard: RunAnswer = await run_once(stub, open_of(logic.description))
        heard.check_whole(["text", "hidden"])
