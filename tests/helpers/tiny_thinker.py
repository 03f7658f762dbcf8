"""A Thinker with the decoder of tiny.py in bfloat16, whose rows go out as they are: the bits of bfloat16."""

from __future__ import annotations

import torch

from helpers.arithmetic_models import SESSIONS, ArithmeticThinker, OnEngine
from helpers.tiny import TAPPED, TINY, tiny_weights
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.head import TokenHead
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.engine.sequence import SequenceStream
from omnistage.models.interface import Content, ElementType, ModelInfo, PortSpec, TextRequest
from omnistage.models.options import with_resumed
from omnistage.models.text.answer import EngineStream


def engine() -> Engine:
    decoder = PackedDecoder(TINY, tiny_weights(torch.bfloat16), TAPPED)
    limits = SchedulerLimits(max_sequences=8, max_waiting=with_resumed(SESSIONS))
    return Engine(decoder, TokenHead(decoder.logits), pages=100, limits=limits, poison=True)


class TinyThinker(ArithmeticThinker):
    """Reads the bytes of the conversation, and says the numbers of its tokens."""

    def __init__(self) -> None:
        text = PortSpec("text", Content.TEXT, compact=True)
        width = TINY.hidden_size
        rows = (PortSpec(name, Content.TENSOR, width=width, element_type=ElementType.BFLOAT16) for name in ("prompt", "hidden"))
        OnEngine.__init__(self, ModelInfo("tiny-thinker", "1", (), (text, *rows), SESSIONS, inputs=("text",)), engine())

    def asked(self, request: TextRequest) -> SequenceRequest:
        return SequenceRequest(
            Prompt.of_tokens("".join(turn.text for turn in request.turns).encode(), request.scope.encode()),
            request.seed,
            request.max_tokens + 1,
            request.sampling,
            history=tuple((token_id,) for token_id in request.history),
            client=request.client,
        )

    def tokens(self, stream: SequenceStream) -> EngineStream[torch.Tensor]:
        return stream
