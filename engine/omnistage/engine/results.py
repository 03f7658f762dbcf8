"""What this machine makes of a fixed sequence: bits that tell it from another machine which computes the same model otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omnistage.engine.adapter import Decoder, DecoderSpec, StepRows
from omnistage.engine.attention import AttentionBackend
from omnistage.engine.followers import NOBODY, Followers
from omnistage.engine.kv import KVCache
from omnistage.engine.linear import pad_rows
from omnistage.engine.pages import PAGE_ROWS, pages_for
from omnistage.engine.plan import Plan, PlannedRun

FIXED_ROWS = 5 * PAGE_ROWS // 2
"""Whole pages, a part of one, and a single row: every product and the attention over one page and over several."""


REVISION = 2
"""Grows whenever the engine, or what models on it share, could give other items for equal input: what no fixed sequence shows, such as how
tokens are drawn or become text."""


def fixed_results(
    decoder: Decoder,
    logits: Callable[[torch.Tensor], torch.Tensor],
    attention: AttentionBackend,
    followers: Followers = NOBODY,
) -> list[torch.Tensor]:
    """REVISION, then hidden rows and logits of a sequence of FIXED_ROWS rows, read in runs as a prompt is, and of one more that is decoded.

    A row does not depend on its company, so these are the bits of every product and of attention, whatever a step takes."""
    pages = range(pages_for(FIXED_ROWS + 1))
    cache = KVCache(decoder.spec, len(pages))
    cache.follow(pages, ())
    followers.new_cache(len(pages))
    followers.pages_changed(pages, ())
    starts = [*range(0, FIXED_ROWS, PAGE_ROWS), FIXED_ROWS]
    results = [torch.tensor([REVISION])]
    with torch.inference_mode():
        for start, end in zip(starts, [*starts[1:], FIXED_ROWS + 1], strict=True):
            plan = _plan(decoder.spec, start, end - start)
            here = plan.to(decoder.spec.device)
            bound = attention.bind(cache, decoder.spec, here)
            with followers.step(plan):
                hidden = decoder.hidden(here.rows, bound).last
            results += [hidden[: end - start], logits(hidden)[: end - start]]
    return results


def _plan(spec: DecoderSpec, start: int, count: int) -> Plan:
    """Rows of the sequence from `start` on, in one page."""
    padded = max(count, pad_rows(1))
    slots = torch.arange(start, start + padded)
    items = slots[:, None] * 7919 + torch.arange(spec.codebooks) * 104729
    pages = pages_for(start + count)
    return Plan(
        rows=StepRows(items % spec.item_ids, slots.expand(spec.axes, padded)),
        pages=torch.full((count,), pages - 1),
        places=slots[:count] % PAGE_ROWS,
        runs=(PlannedRun(0, count, start, tuple(range(pages))),),
        drawn=torch.arange(padded),
    )
