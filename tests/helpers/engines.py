"""A decoder of the real architecture, so small that thousands of answers take seconds; engines, which a fixture closes when a test ends;
what is asked of them, and what they make."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from weakref import WeakSet

import torch

from omnistage.engine.adapter import TokenHead
from omnistage.engine.decoder import DecoderParts, PackedDecoder, last_and_embedding
from omnistage.engine.engine import Engine
from omnistage.engine.parts import DecoderConfig
from omnistage.engine.request import Prompt, SequenceEvent, SequenceRequest
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.engine.sequence import SequenceStream
from omnistage.engine.types import FinishReason, Item

TINY = DecoderConfig(layers=2, hidden_size=192, ffn_size=128, query_heads=6, kv_heads=2, vocab_size=500, context=1024, norm_eps=1e-5)
TAPPED = DecoderParts(tap=last_and_embedding)
NAN_TOKEN = 499
"""With `nan`, its embedding is NaN: whoever reads it gets logits that are not finite."""


def tiny_weights(dtype: torch.dtype, config: DecoderConfig = TINY, *, nan: bool = False) -> Callable[[str], torch.Tensor | None]:
    """Random weights by name, equal for equal names."""
    shapes = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
        "q_proj.weight": (config.hidden_size, config.hidden_size),
        "k_proj.weight": (config.kv_heads * config.head_size, config.hidden_size),
        "v_proj.weight": (config.kv_heads * config.head_size, config.hidden_size),
        "o_proj.weight": (config.hidden_size, config.hidden_size),
        "gate_proj.weight": (config.ffn_size, config.hidden_size),
        "up_proj.weight": (config.ffn_size, config.hidden_size),
        "down_proj.weight": (config.hidden_size, config.ffn_size),
    }

    def weight(name: str) -> torch.Tensor | None:
        if name.endswith("norm.weight"):
            return torch.ones(config.hidden_size, dtype=dtype)
        shape = next((shape for end, shape in shapes.items() if name.endswith(end)), None)
        if shape is None:
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(*shape, generator=generator) * (1.0 if name.startswith("embed") else shape[1] ** -0.5)
        if nan and name.startswith("embed"):
            values[NAN_TOKEN] = float("nan")
        return values.to(dtype)

    return weight


def tiny_decoder(dtype: torch.dtype = torch.float32, *, nan: bool = False) -> PackedDecoder:
    return PackedDecoder(TINY, tiny_weights(dtype, nan=nan))


_ENGINES = WeakSet[Engine]()


def close_later(engine: Engine) -> Engine:
    """The engine, which `close_all` closes."""
    _ENGINES.add(engine)
    return engine


def close_all() -> None:
    while _ENGINES:
        asyncio.run(_ENGINES.pop().close())


def make_engine(decoder: PackedDecoder, pages: int = 200, *, kept_pages: int | None = None, **limits: int) -> Engine:
    """An engine that draws tokens. A row that is read from a freed page is NaN."""
    head = TokenHead(decoder.logits)
    return close_later(Engine(decoder, head, pages=pages, limits=SchedulerLimits(**limits), kept_pages=kept_pages, poison=True))


def ask(prompt: tuple[int, ...] = (1, 2, 3), **changes: object) -> SequenceRequest:
    return SequenceRequest(Prompt.of_tokens(prompt), **{"seed": 7, "max_items": 20, **changes})  # type: ignore[arg-type]


def drawn(events: list[SequenceEvent]) -> list[tuple[Item | None, float | None, FinishReason | None]]:
    return [(event.item, event.logprob, event.finish_reason) for event in events]


async def read(stream: SequenceStream) -> list[SequenceEvent]:
    """The events of a stream to its end, which it is closed after."""
    events: list[SequenceEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await stream.take()
    await stream.aclose()
    return events


def items(events: list[SequenceEvent]) -> list[Item]:
    return [event.item for event in events if event.item is not None]
