"""A request for text computes no rows; who asks has a name at the stages that says nothing of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from helpers.ask import ask, request
from helpers.counting import CountingThinker
from helpers.link import ENDED, Context, bare_peer, listen, say, steady_beat
from helpers.servers import local_router, local_stage, omni_stub, toy_logic
from omnistage.models.toy.stages import ToyOptions
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2, omni_pb2_grpc, stage_pb2


@asynccontextmanager
async def speaking(thinker: str) -> AsyncIterator[omni_pb2_grpc.OmniServiceAsyncStub]:
    """A router in front of a Thinker that is there, and of toys behind it."""
    async with (
        local_stage(toy_logic("talker")) as talker,
        local_stage(toy_logic("code2wav")) as code2wav,
        local_router({"thinker": thinker, "talker": talker.address, "code2wav": code2wav.address}) as router,
        omni_stub(router.address) as stub,
    ):
        yield stub


async def test_a_request_for_text_computes_and_ships_no_row(seed: int):
    model = CountingThinker(ToyOptions())
    async with local_stage(ThinkerStage(model)) as thinker, speaking(thinker.address) as stub:
        answer = await ask(stub, request("Only read.", seed, outputs=["text"]))
        answer.check_toy(seed, "Only read.")
        assert answer.usage is not None
        assert [dict(report.output_items) for report in answer.usage.stages] == [{"text": 24, "hidden": 0}]
        assert model.computed == 0
        spoken = await ask(stub, request("And listen.", seed))
        spoken.check_toy(seed, "And listen.")
        assert model.computed == 24


async def test_a_client_has_one_name_at_the_stages_and_another_client_another():
    model = CountingThinker(ToyOptions())
    async with local_stage(ThinkerStage(model)) as thinker, speaking(thinker.address) as stub:
        keys: list[list[tuple[str, str]]] = [[], [("x-api-key", "secret")], [], [("x-api-key", "secret")], [("x-api-key", "other")]]
        for metadata in keys:
            await ask(stub, request("Who?", 1, outputs=["text"]), metadata=metadata)
        plain, one, plain_again, one_again, other = model.clients
        assert plain == plain_again and one == one_again and len({plain, one, other}) == 3
        assert all(re.fullmatch(r"[0-9a-f]{16}/[0-9a-f]{16}", name) for name in model.clients)


async def test_an_older_thinker_that_sends_rows_all_the_same_is_heard_to_the_end():
    """It knows no unwanted ports and waits for credit for each of them; the rows are dropped."""
    rows = 100
    description = toy_logic("thinker").description
    credits: dict[str, int] = {}

    async def older(opened: stage_pb2.Open, context: Context) -> None:
        await say(context, stage_pb2.RunResponse(opened=stage_pb2.Opened(revisions=[description.revision])))
        credits.update({credit.port: credit.total for credit in opened.credits})
        tensor = {"element_type": 1, "shape": [1, 1], "inline": {"data": b"\0\0\0\0", "total_bytes": 4}}
        for n in range(rows):
            while credits["hidden"] <= n:
                message = await context.read()
                assert isinstance(message, bytes)
                credit = stage_pb2.RunRequest.FromString(message).credit
                credits[credit.port] = credit.total
            chunk = chunk_pb2.Chunk(port="hidden", seq=n, first=n, count=1, last=n == rows - 1, tensor=tensor)
            await say(context, stage_pb2.RunResponse(chunk=chunk))
        text = chunk_pb2.TextChunk(text="done", token_ids=[1], finish_reason=chunk_pb2.FINISH_REASON_STOP)
        await say(context, stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="text", count=1, last=True, text=text)), ENDED)
        await listen(context)

    async with bare_peer(older, steady_beat, description) as thinker, speaking(thinker) as stub:
        answer = await ask(stub, request("Only read.", 1, outputs=["text"]))
        assert answer.text() == "done" and list(answer.chunks) == ["text"]
        assert credits["hidden"] >= rows
