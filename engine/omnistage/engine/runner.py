"""Runs steps through a decoder, a head and the cache, one step after the other on the calling thread."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from omnistage.engine.adapter import Decoder, DrawnItem, Head
from omnistage.engine.attention import AttentionBackend
from omnistage.engine.followers import NOBODY, Followers
from omnistage.engine.kv import KVCache
from omnistage.engine.linear import pad_rows
from omnistage.engine.plan import last_rows, make_plan
from omnistage.engine.request import Taps
from omnistage.engine.scheduler import Run


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a run. taps: of all its rows; None: no taps were wanted. drawn: the next item; None: no item was to be drawn, or none
    could be, because logits were not finite or nothing is allowed."""

    run: Run
    taps: Taps | None
    drawn: DrawnItem | None


class Runner:
    """Computes steps on this rank, and sends each step to the other ranks, the followers."""

    def __init__(self, decoder: Decoder, head: Head, cache: KVCache, attention: AttentionBackend, followers: Followers = NOBODY) -> None:
        self._decoder, self._head, self._cache, self._attention = decoder, head, cache, attention
        self._followers = followers

    def follow(self, new: Many[int], freed: Many[int]) -> None:
        """Report to the cache, here and on the followers, which pages were taken and freed since the last step."""
        self._cache.follow(new, freed)
        if new or freed:
            self._followers.pages_changed(new, freed)

    def run(self, runs: Many[Run]) -> list[Computed]:
        """Compute the rows of some runs in one pass. For each run that ends with the last known row of its sequence, draw the next item."""
        plan = make_plan(runs, self._decoder.spec, pad_rows(1))
        device_plan = plan.to(self._decoder.spec.device)
        attention = self._attention.bind(self._cache, self._decoder.spec, device_plan)
        with self._followers.step(plan):
            hidden = self._decoder.hidden(device_plan.rows, attention)
        drawing = [run.sequence for run in runs if run.draws]
        items: list[DrawnItem | None] = []
        if drawing:
            last = last_rows(hidden.last, device_plan)
            items = self._head.draw(last, [sequence.draws for sequence in drawing], [sequence.banned for sequence in drawing])
        else:
            # Wait for an asynchronous device: otherwise a step would seem to take no time, and others would queue up.
            hidden.last[0, 0].item()
        taps_here = None if hidden.taps is None else hidden.taps.cpu()
        answers = iter(items)
        results = []
        for run, planned_run in zip(runs, plan.runs, strict=True):
            taps = None
            if taps_here is not None and run.wants_taps:
                # Taps of this run alone: a reader that keeps a part of the step's tensor would keep all of it.
                taps = Taps(run.start, taps_here[planned_run.first : planned_run.first + run.count].clone())
            results.append(Computed(run, taps, next(answers) if run.draws else None))
        return results
