"""This machine's results for a fixed sequence. Their bits differ from the results of a machine that computes the same model differently."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omnistage.engine.adapter import Decoder, DecoderSpec, StepRows
from omnistage.engine.attention import AttentionBackend
from omnistage.engine.linear import pad_rows
from omnistage.engine.memory import PAGE_ROWS, KVCache, pages_for
from omnistage.engine.plan import NOBODY, Followers, PlannedRun, StepPlan

FIXED_ROWS = 5 * PAGE_ROWS // 2
"""Two pages and a half: with one more row, which is decoded, the sequence uses every product, and attention to one page and to several."""

REVISION = 3
"""Raise it whenever a change of the engine, or of the models' shared code, can give other items for equal input and no fixed sequence shows
that, for example in how tokens are drawn or become text."""


def fixed_results(
    decoder: Decoder,
    logits: Callable[[torch.Tensor], torch.Tensor],
    attention: AttentionBackend,
    followers: Followers = NOBODY,
) -> list[torch.Tensor]:
    """REVISION, then the hidden rows and logits of a sequence: FIXED_ROWS rows, read in runs like a prompt, and one more row that is
    decoded.

    A row does not depend on other rows, so these bits stand for every product and for attention, however many rows a step has."""
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
            device_plan = plan.to(decoder.spec.device)
            bound = attention.bind(cache, decoder.spec, device_plan)
            with followers.step(plan):
                hidden = decoder.hidden(device_plan.rows, bound).last
            results += [hidden[: end - start], logits(hidden)[: end - start]]
    return results


def _plan(spec: DecoderSpec, start: int, count: int) -> StepPlan:
    """The plan of a step with `count` rows of the fixed sequence from slot `start` on, all in one page."""
    padded = max(count, pad_rows(1))
    slots = torch.arange(start, start + padded)
    # Two primes, so that neighbouring rows and codebooks have unlike ids.
    items = slots[:, None] * 7919 + torch.arange(spec.codebooks) * 104729
    pages = pages_for(start + count)
    rows = StepRows(items % torch.tensor(spec.ids), slots.expand(spec.axes, padded), padding=padded - count)
    return StepPlan(
        rows=rows,
        pages=torch.full((count,), pages - 1),
        places=slots[:count] % PAGE_ROWS,
        runs=(PlannedRun(0, count, start, tuple(range(pages))),),
        draw_rows=torch.arange(padded),
    )
