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
        self._pass = batch = _Pass(residuals, lengths)
        try:
            yield
        finally:
            self._pass = None
        # A failed pass leaves nothing here: each picture takes it again alone.
        for each, change in batch.reused:
            each.reused += 1
            each.largest = max(each.largest, change)
        for each, first, rest in batch.computed:
            each.first, each.rest = first, rest

    def _with_cache(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The `forward` of the block with that number, which uses the cache within a pass."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None:
                return forward(*args, **kwargs)
            if not number:
                return self._run_first(self._pass, forward, args, kwargs)
            return self._run_other(self._pass, number == self._last, forward, args, kwargs)

        return watched

    def _run_first(self, batch: _Pass, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the first block with its arguments, return its result, and decide which rows go through the other blocks."""
        before = args[0] if args else kwargs["hidden_states"]
        output = forward(*args, **kwargs)
        batch.base = _rows(output)
        added = batch.base - before
        for row, (residuals, length) in enumerate(zip(batch.residuals, batch.lengths, strict=True)):
            batch.added.append(added[row, :length])
            change = residuals.change(batch.added[row]) if residuals.threshold else float("inf")
            batch.changes.append(change)
            if not change < residuals.threshold:  # This also holds for a change that is no number.
                batch.kept.append(row)
        return output

    def _run_other(self, batch: _Pass, is_last: bool, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute another block for the kept rows alone; after the last block all rows are put together again."""
        count = len(batch.residuals)
        rows = args[0] if args else kwargs["hidden_states"]
        text_rows = kwargs.get("encoder_hidden_states")
        if batch.kept:
            # Between the first block and the last there are only the kept rows.
            picked = [self._pick_rows(batch, place, value, count) for place, value in enumerate(args)]
            output = forward(*picked, **{name: self._pick_rows(batch, name, value, count) for name, value in kwargs.items()})
        else:
            output = rows if text_rows is None else (text_rows, rows)
        if not is_last:
            return output
        all_rows = self._join_rows(batch, _rows(output))
        return all_rows if isinstance(output, Tensor) else (*output[:-1], all_rows)

    def _pick_rows(self, batch: _Pass, place: str | int, value: Any, count: int) -> Any:
        """An argument of a block, for the kept rows alone. place: its position or name. count: number of all rows."""
        is_rows = place in (0, "hidden_states", "encoder_hidden_states")
        if batch.is_whole or not isinstance(value, Tensor) or not (is_rows or place in self._batched) or len(value) == len(batch.kept):
            return value
        index = torch.tensor(batch.kept, device=value.device)
        return value[index if len(value) == count else torch.cat([index, index + count])]

    def _join_rows(self, batch: _Pass, rows: Tensor) -> Tensor:
        """All rows after the last block. rows: its result, the kept rows. Other rows get the sum of their last whole step."""
        assert batch.base is not None
        all_rows, kept_rows = batch.base.clone(), iter(rows if batch.kept else ())
        for row, (residuals, length) in enumerate(zip(batch.residuals, batch.lengths, strict=True)):
            if row in batch.kept:
                all_rows[row] = next(kept_rows)
                if residuals.threshold:
                    batch.computed.append((residuals, batch.added[row].clone(), (all_rows[row] - batch.base[row])[:length].clone()))
            else:
                assert residuals.rest is not None
                all_rows[row, :length] += residuals.rest
                batch.reused.append((residuals, batch.changes[row]))
        return all_rows


def _rows(output: Any) -> Tensor:
    rows: Tensor = output if isinstance(output, Tensor) else output[-1]
    return rows
