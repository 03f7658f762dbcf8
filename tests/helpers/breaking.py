"""`python -m helpers.breaking`: a Thinker on a tiny engine. BREAK ends the thread of the engine by an error, FAIL only a step of it.
With the option `hangs_at` every step hangs that computes a token at that place, the prompt of 3 tokens counted as well."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import torch

from helpers.engines import TINY, tiny_weights
from omnistage.engine.adapter import Attention, Hidden, StepRows, TokenHead
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.types import Activity, Sampling
from omnistage.models.interface import Content, Load, ModelInfo, Piece, PortSpec, TextPiece, TextRequest, Wanted
from omnistage.models.reports import LoadError
from omnistage.stage.server import main
from omnistage.stage.settings import StageSettings
from omnistage.thinker.stage import ThinkerStage

BREAK, FAIL = "break", "fail"
PROMPTS = {BREAK: (498,), FAIL: (497,)}
"""The token that does it; random weights would draw it sooner or later, if they were not kept from it."""


class BreakingDecoder(PackedDecoder):
    """The error that it raises to break is no error of a step, like an error in the engine itself."""

    hangs_at = -1

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        if self.hangs_at in rows.positions:
            threading.Event().wait()
        if PROMPTS[FAIL][0] in rows.items:
            raise ValueError("told to fail")
        if PROMPTS[BREAK][0] in rows.items:
            raise AssertionError("told to break")
        return super().hidden(rows, attention)


class BreakingThinker:
    """Tokens as they come, each one as the word of its number."""

    def __init__(self, hangs_at: int = -1) -> None:
        decoder = BreakingDecoder(TINY, tiny_weights(torch.float32))
        decoder.hangs_at = hangs_at
        self._engine = Engine(decoder, TokenHead(decoder.logits), pages=100)
        self.info = ModelInfo("breaking", "1", (), (PortSpec("text", Content.TEXT, compact=True),), max_sessions=8)

    @property
    def threads(self) -> Sequence[Activity]:
        return (self._engine.activity,)

    def load(self) -> Load:
        stats = self._engine.stats()
        return Load(stats.waiting, stats.pages_used, stats.pages_total)

    async def prepare(self, request: TextRequest) -> TextRequest:
        return request

    async def generate(self, prepared: TextRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[TextPiece, None]:
        request = prepared
        prompt = PROMPTS.get(request.turns[-1].text, (1, 2, 3))
        sampling = Sampling(logit_bias={token: -1e9 for (token,) in PROMPTS.values()})
        history = tuple((token_id,) for token_id in request.history)
        asked = SequenceRequest(Prompt.of_tokens(prompt), request.seed, request.max_tokens, sampling, ignore_end=True, history=history)
        async with aclosing(self._engine.submit(asked)) as stream:
            while events := await stream.take():
                ids = tuple(event.item[0] for event in events if event.item is not None)
                yield TextPiece("".join(f"{token} " for token in ids), ids, finish_reason=events[-1].finish_reason)

    async def warm_up(self) -> None:
        return

    async def close(self) -> None:
        await self._engine.close()


def load(settings: StageSettings) -> ThinkerStage[TextRequest]:
    return ThinkerStage(BreakingThinker(int(settings.options.get("hangs_at", -1))))


if __name__ == "__main__":
    sys.exit(main("thinker", load, LoadError))
