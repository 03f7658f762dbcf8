"""The step cache: steps that change little are not computed whole, and each row of a batch decides for itself.

The first block of a transformer is always computed. Its residual is what the block adds to a row. If the residual is nearly as in the
last step that was computed whole, the other blocks would add nearly the same as they did then; the row gets that sum again, and skips
these blocks. Rows of one pass that need the other blocks go through them together without the others. Hooks of Diffusers for the same aim
keep one state for a whole module, where pictures that join and leave would get each other's state.

A request that wants the cache says how much the residual may change, in parts of itself; the more it may change, the fewer blocks are
computed and the further is the picture from a picture without the cache. The skipped steps are reported with the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False, slots=True)
class Residuals:
    """The residuals of one row, over its steps. threshold: largest change at which a step is not computed whole; 0: all steps are. first:
    the sum that the first block added in the last step that was computed whole; rest: the sum that the other blocks added; both [tokens,
    width]. reused: number of steps that were not computed whole; largest: the largest change in these steps."""

    threshold: float
    first: Tensor | None = None
    rest: Tensor | None = None
    reused: int = 0
    largest: float = 0.0

    def change(self, first: Tensor) -> float:
        """The change from the last residual of the first block to this one, as a part of the last one; infinite if there was none."""
        if self.first is None or self.rest is None:
            return float("inf")
        return float((first - self.first).abs().mean() / self.first.abs().mean().clamp(min=1e-12))


@dataclass(slots=True)
class _Pass:
    """One pass of several rows. lengths: number of tokens of each row without its padding, which comes last; None: all. base: the rows
    after the first block. added, changes: the sum that the first block added to each row, and its change. kept: numbers of the rows that go
    through the other blocks. reused: the other rows, each with its change. computed: the new first and rest of the kept rows."""

    residuals: Sequence[Residuals]  # One for each row.
    lengths: Sequence[int | None]
    base: Tensor | None = None
    added: list[Tensor] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    reused: list[tuple[Residuals, float]] = field(default_factory=list)
    computed: list[tuple[Residuals, Tensor, Tensor]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.kept) == len(self.residuals)


class StepCache:
    """The step cache of one transformer. Outside of `applied` the blocks compute as ever.

    blocks: all of them, in order. The rows are the first argument of each, or `hidden_states`; it returns them alone or last. batched:
    names and positions of its other arguments that have one row, or two, for each row."""

    def __init__(self, blocks: Sequence[nn.Module], batched: Sequence[str | int]) -> None:
        self._batched = frozenset(batched)
        self._pass: _Pass | None = None
        self._last = len(blocks) - 1
        for number, block in enumerate(blocks):
            if self._last:  # One block alone leaves nothing to skip.
                block.forward = self._with_cache(number, block.forward)

    @contextmanager
    def applied(self, residuals: Sequence[Residuals], lengths: Sequence[int | None]) -> Iterator[None]:
        """In this context the cache serves one pass. residuals, lengths: one for each row, as in _Pass."""
        if not any(each.threshold for each in residuals):
            yield
            return
        self._pass = now = _Pass(residuals, lengths)
        try:
            yield
        finally:
            self._pass = None
        # A failed pass leaves nothing here: each picture takes it again alone.
        for each, change in now.reused:
            each.reused += 1
            each.largest = max(each.largest, change)
        for each, first, rest in now.computed:
            each.first, each.rest = first, rest

    def _with_cache(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The `forward` of the block with that number, which uses the cache within a pass."""

        def watched(*arguments: Any, **named: Any) -> Any:
            if self._pass is None:
                return forward(*arguments, **named)
            if not number:
                return self._run_first(self._pass, forward, arguments, named)
            return self._run_other(self._pass, number == self._last, forward, arguments, named)

        return watched

    def _run_first(self, now: _Pass, forward: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute the first block with its arguments, return its result, and decide which rows go through the other blocks."""
        before = arguments[0] if arguments else named["hidden_states"]
        made = forward(*arguments, **named)
        now.base = _rows(made)
        added = now.base - before
        for row, (residuals, length) in enumerate(zip(now.residuals, now.lengths, strict=True)):
            now.added.append(added[row, :length])
            change = residuals.change(now.added[row]) if residuals.threshold else float("inf")
            now.changes.append(change)
            if not change < residuals.threshold:  # This also holds for a change that is no number.
                now.kept.append(row)
        return made

    def _run_other(self, now: _Pass, is_last: bool, forward: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute another block for the kept rows alone; after the last block all rows are put together again."""
        count = len(now.residuals)
        rows = arguments[0] if arguments else named["hidden_states"]
        beside = named.get("encoder_hidden_states")
        if now.kept:
            # Between the first block and the last there are only the kept rows.
            picked = [self._pick_rows(now, place, value, count) for place, value in enumerate(arguments)]
            made = forward(*picked, **{name: self._pick_rows(now, name, value, count) for name, value in named.items()})
        else:
            made = rows if beside is None else (beside, rows)
        if not is_last:
            return made
        whole = self._join_rows(now, _rows(made))
        return whole if isinstance(made, Tensor) else (*made[:-1], whole)

    def _pick_rows(self, now: _Pass, place: str | int, value: Any, count: int) -> Any:
        """An argument of a block, for the kept rows alone. place: its position or name. count: number of all rows."""
        is_rows = place in (0, "hidden_states", "encoder_hidden_states")
        if now.is_whole or not isinstance(value, Tensor) or not (is_rows or place in self._batched) or len(value) == len(now.kept):
            return value
        index = torch.tensor(now.kept, device=value.device)
        return value[index if len(value) == count else torch.cat([index, index + count])]

    def _join_rows(self, now: _Pass, made: Tensor) -> Tensor:
        """All rows after the last block. made: its result for the kept rows. Other rows get the sum of their last whole step."""
        assert now.base is not None
        whole, kept = now.base.clone(), iter(made if now.kept else ())
        for row, (residuals, length) in enumerate(zip(now.residuals, now.lengths, strict=True)):
            if row in now.kept:
                whole[row] = next(kept)
                if residuals.threshold:
                    now.computed.append((residuals, now.added[row].clone(), (whole[row] - now.base[row])[:length].clone()))
            else:
                assert residuals.rest is not None
                whole[row, :length] += residuals.rest
                now.reused.append((residuals, now.changes[row]))
        return whole


def _rows(made: Any) -> Tensor:
    rows: Tensor = made if isinstance(made, Tensor) else made[-1]
    return rows
