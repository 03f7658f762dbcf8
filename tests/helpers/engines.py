"""Small engines for the tests of the engine, which a fixture closes when a test ends, and what is asked of them."""

from __future__ import annotations

import asyncio
from weakref import WeakSet

from omnistage.engine.adapter import TokenHead
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.request import Prompt, SequenceEvent, SequenceRequest
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.engine.types import FinishReason, Item

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
