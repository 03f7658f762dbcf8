"""The plan of a step: everything that computing it needs, as tensors that can be copied to a device and sent to other ranks. `Followers` is
the engine's view of the other ranks of a decoder, which follow every step."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from omnistage.engine.adapter import CPU, DecoderSpec, StepRows
from omnistage.engine.devices import to_device
from omnistage.engine.linear import pad_rows
from omnistage.engine.memory import PAGE_ROWS, pages_for
from omnistage.engine.scheduler import Run


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The numbers of a run that attention needs. first: number of its first row in the step. count: number of its rows. start: slot of the
    first row in its sequence. pages: the pages that its rows see; its own rows are in the last of these pages."""

    first: int
    count: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The input of one step, on the CPU until `to` copies it. rows: the decoder's input. pages, places: for each row the page for its keys
    and values, and its slot in that page, int64 [rows without padding]. runs: in the order of the rows. draw_rows: numbers of the rows from
    which an item is drawn, int64 [n]."""

    rows: StepRows
    pages: torch.Tensor
    places: torch.Tensor
    runs: tuple[PlannedRun, ...]
    draw_rows: torch.Tensor

    @property
    def count(self) -> int:
        """Number of rows without padding."""
        return len(self.pages)

    def to(self, device: torch.device) -> StepPlan:
        """The same plan on a device. Vectors that are on this device already are not copied."""
        if device.type == "cpu":
            return self
        rows = self.rows
        return replace(
            self,
            rows=replace(
                rows,
                items=to_device(rows.items, device),
                positions=to_device(rows.positions, device),
                given_vectors=None if rows.given_vectors is None else to_device(rows.given_vectors, device),
                has_given=None if rows.has_given is None else to_device(rows.has_given, device),
            ),
            pages=to_device(self.pages, device),
            places=to_device(self.places, device),
            draw_rows=to_device(self.draw_rows, device),
        )


def make_plan(runs: Many[Run], spec: DecoderSpec, least_rows: int) -> StepPlan:
    """The plan of a step with these runs. least_rows: fewest rows of a step; if the runs have fewer, padding follows."""
    count = sum(run.count for run in runs)
    padded = max(count, least_rows)
    items = np.zeros((padded, spec.codebooks), np.int64)
    positions = np.zeros((spec.axes, padded), np.int64)
    slots = np.empty(count, np.int64)
    pages = np.empty(count, np.int64)
    planned_runs: list[PlannedRun] = []
    draw_rows: list[int] = []
    given_vectors: list[tuple[int, torch.Tensor]] = []
    first = 0
    for run in runs:
        sequence, rows = run.sequence, slice(first, first + run.count)
        run_pages = tuple(sequence.pages[: pages_for(run.start + run.count)])
        items[rows] = sequence.items_of(run.start, run.count)
        positions[:, rows] = sequence.positions_of(run.start, run.count, spec.axes)
        slots[rows] = np.arange(run.start, run.start + run.count)
        pages[rows] = run_pages[-1]
        given_vectors += [(first + at, vectors) for at, vectors in sequence.given_of(run.start, run.count)]
        planned_runs.append(PlannedRun(first, run.count, run.start, run_pages))
        first += run.count
        if run.draws:
            draw_rows.append(first - 1)
    vectors, has_given = _gather_given(given_vectors, padded, spec) if given_vectors else (None, None)
    return StepPlan(
        rows=StepRows(
            items=torch.from_numpy(items),
            positions=torch.from_numpy(positions),
            given_vectors=vectors,
            has_given=has_given,
            taps=any(run.wants_taps for run in runs),
            padding=padded - count,
        ),
        pages=torch.from_numpy(pages),
        places=torch.from_numpy(slots % PAGE_ROWS),
        runs=tuple(planned_runs),
        draw_rows=torch.tensor(draw_rows, dtype=torch.int64),
    )


def _gather_given(parts: Many[tuple[int, torch.Tensor]], rows: int, spec: DecoderSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """`given_vectors` and `has_given` of StepRows. parts: pairs of a row's number and the vectors [n, given_width] for n rows from this row
    on."""
    # If all parts are on the CPU, the vectors are made there and move to the device with the plan. Otherwise they are made on the device,
    # where an encoder's vectors are already.
    are_on_cpu = all(part.device.type == "cpu" for _, part in parts)
    vectors = torch.zeros(rows, spec.given_width, dtype=spec.dtype, device=CPU if are_on_cpu else spec.device)
    has_given = torch.zeros(rows, 1, dtype=torch.bool)
    for first, part in parts:
        vectors[first : first + len(part)] = part
        has_given[first : first + len(part)] = True
    return vectors, has_given


def last_rows(hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """The hidden rows from which an item is drawn, and copies of the first of them if a product needs more rows. hidden: of all rows of the
    step."""
    last = hidden.index_select(0, plan.draw_rows)
    padding = pad_rows(len(last)) - len(last)
    return torch.cat([last, last[:1].expand(padding, -1)]) if padding else last


class Followers(Protocol):
    """The other ranks. Each rank has a cache like the engine's, for its own heads, and carries out orders one after the other. Each method
    raises RanksApart if a rank has ended. processes: ids of their processes."""

    @property
    def processes(self) -> Sequence[int]: ...

    def new_cache(self, pages: int, *, poison: bool = False) -> None:
        """Replace the cache on each rank by one of this many pages. poison: see KVCache."""

    def pages_changed(self, new: Sequence[int], freed: Sequence[int]) -> None:
        """See KVCache.follow."""

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        """A context in which the other ranks compute the hidden rows of a step. The caller computes inside; an error there becomes
        RanksApart."""


class Nobody:
    """Implements `Followers` without any: one process has the whole decoder."""

    processes = ()

    def new_cache(self, pages: int, *, poison: bool = False) -> None: ...

    def pages_changed(self, new: Sequence[int], freed: Sequence[int]) -> None: ...

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        return nullcontext()


NOBODY = Nobody()
