"""A Thinker's text is known by what its port carries, not by the port's name: at the stage, at the router and at the client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import pytest

from helpers.ask import WholeAnswer, ask, request
from helpers.run import open_of, run_interrupted
from helpers.servers import local_router, local_stage, omni_stub, stage_stub, toy_logic
from omnistage.client.received import Received
from omnistage.models.interface import Piece, TensorRows, TextPiece, TextRequest, Wanted
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import ToyOptions, ToyThinker
from omnistage.router.pipeline import PipelineFile
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2

PIPELINE = {
    "name": "mine",
    "description": "Says words.",
    "inputs": ["text"],
    "outputs": ["words", "audio"],
    "stages": [
        {"kind": "thinker", "family": "toy"},
        {"kind": "talker", "family": "toy", "takes": ["hidden"]},
        {"kind": "code2wav", "family": "toy", "takes": ["codes"]},
    ],
    "defaults": {"thinker": {"max_tokens": 256}},
}


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
    async with local_stage(logic) as stage, stage_stub(stage.address) as stub:
        heard = await run_interrupted(stub, open_of(logic.description, unwanted=["hidden"]), "words")
        heard.check_whole(["words"])
        assert heard.of("words")[-1].text.finish_reason == chunk_pb2.FINISH_REASON_INTERRUPTED


async def test_an_answer_is_timed_and_gone_on_with_whatever_the_port_of_its_text_is_called(seed: int):
    async with (
        local_stage(ThinkerStage(SayingWords(ToyOptions(max_chunk=3)))) as thinker,
        local_stage(toy_logic("talker")) as talker,
        local_stage(toy_logic("code2wav")) as code2wav,
        local_router(
            {"thinker": thinker.address, "talker": talker.address, "code2wav": code2wav.address}, PipelineFile.model_validate(PIPELINE)
        ) as router,
        omni_stub(router.address) as stub,
    ):
        asked = request("Say it.", seed, model="mine")
        whole = await ask(stub, asked)
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
        rest = await ask(stub, received.request(asked))
        assert rest.of("words")[0].first == sum(chunk.count for chunk in had)
        assert "".join(chunk.text.text for chunk in had) + words(rest) == words(whole)
