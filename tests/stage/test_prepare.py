"""A session that is being prepared has its place, holds nobody up, and ends with its deadline."""

from __future__ import annotations

import asyncio

from helpers.link import Context, bare_peer, listen, opening
from helpers.run import RunStream
from helpers.servers import all_free, local_stage, stage_stub, watch_until
from omnistage.models.interface import TextRequest
from omnistage.models.toy.stages import ToyOptions, ToyThinker
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import stage_pb2


class Slow(ToyThinker):
    """Prepares no request before it is let go."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def prepare(self, request: TextRequest) -> TextRequest:
        self.asked.set()
        await self.go.wait()
        return await super().prepare(request)


async def test_a_session_has_its_place_while_it_is_prepared():
    model = Slow(ToyOptions())
    async with local_stage(ThinkerStage(model), max_sessions=1) as stage, stage_stub(stage.address) as stub:
        first, second = RunStream(stub), RunStream(stub)
        await first.send(open=opening("thinker", session_id="first"))
        async with asyncio.timeout(60):
            await model.asked.wait()
        await second.send(open=opening("thinker", session_id="second"))
        refused = (await second.finish()).ended
        assert refused is not None and refused.reason == "OVERLOADED"
        model.go.set()
        done = (await first.finish()).ended
        assert done is not None and not done.reason
        await all_free([stage.address])


async def test_a_session_that_is_never_prepared_ends_with_its_deadline():
    model = Slow(ToyOptions())
    async with local_stage(ThinkerStage(model), session_limit=0.5) as stage, stage_stub(stage.address) as stub:
        caller = RunStream(stub)
        await caller.send(open=opening("thinker"))
        ended = (await caller.finish()).ended
        assert ended is not None and ended.reason == "DEADLINE"
        await all_free([stage.address])


async def test_a_session_that_is_prepared_and_opened_again_gives_its_place_to_the_newer_one():
    model = Slow(ToyOptions())
    async with local_stage(ThinkerStage(model)) as stage, stage_stub(stage.address) as stub:
        older, newer = RunStream(stub), RunStream(stub)
        await older.send(open=opening("thinker", session_id="same", attempts=[0]))
        async with asyncio.timeout(60):
            await model.asked.wait()
        await newer.send(open=opening("thinker", session_id="same", attempts=[1]))
        ended = (await older.finish()).ended
        assert ended is not None and ended.reason == "SUPERSEDED"
        await watch_until(stage.address, lambda report: report.sessions == 1)
        model.go.set()
        done = (await newer.finish()).ended
        assert done is not None and not done.reason
        await all_free([stage.address])


async def test_a_session_whose_stage_behind_does_not_answer_and_that_is_opened_again_ends():
    silent = asyncio.Event()

    async def behind(opened: stage_pb2.Open, context: Context) -> None:
        silent.set()
        await listen(context)

    model = Slow(ToyOptions())
    model.go.set()
    async with bare_peer(behind) as address, local_stage(ThinkerStage(model)) as stage, stage_stub(stage.address) as stub:
        hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_TALKER, model="toy-talker", addresses=[address], takes=["hidden"])
        older, newer = RunStream(stub), RunStream(stub)
        await older.send(open=opening("thinker", session_id="same", attempts=[0], route=[hop]))
        async with asyncio.timeout(60):
            await silent.wait()
        await newer.send(open=opening("thinker", session_id="same", attempts=[1]))
        ended = (await older.finish()).ended
        assert ended is not None and ended.reason == "SUPERSEDED"
        done = (await newer.finish()).ended
        assert done is not None and not done.reason
        await all_free([stage.address])
