"""A decoder whose every hidden row is a sum that can be done by hand, on the real engine: frames of two codes, rows that are given or
appended, positions on three axes, taps.

A row is worth `worth(item, given, positions)`, a whole number below MODULUS. Its hidden row is the sum of what all rows up to it are worth,
which attention computes as their mean: queries are zero, so all weights are equal. The next frame follows from the sum and the seed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from helpers.engines import close_later
from omnistage.engine.adapter import Attention, DecoderSpec, DrawnItem, Hidden, StepRows
from omnistage.engine.engine import Engine
from omnistage.engine.request import Prompt
from omnistage.engine.sampler import Draws
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.engine.types import Item

MODULUS = 61
IDS = 50
START = 49
"""Second code of the first row of every prompt, and of no other row: how many rows there are is read from it."""
END = 7
"""A frame that begins with this code ends an answer that may end."""
AXES, GIVEN, TAPS = 3, 2, 2
SPEC = DecoderSpec(
    layers=1,
    query_heads=2,
    kv_heads=1,
    head_size=32,
    item_ids=IDS,
    context=2000,
    dtype=torch.float32,
    codebooks=2,
    axes=AXES,
    given_width=GIVEN,
    tap_width=TAPS,
)


def worth(item: Item, given: Sequence[float] | None, positions: Sequence[int]) -> int:
    """The number that a row adds to the sum."""
    vector = 0 if given is None else 1 + 17 * int(given[0]) + 19 * int(given[1])
    return (3 * item[0] + 5 * item[1] + vector + 7 * positions[0] + 11 * positions[1] + 13 * positions[2]) % MODULUS


def frame(total: int, seed: int) -> Item:
    """The frame that follows a sum."""
    return (total + seed) % IDS, (3 * total + 1) % START


class CountingDecoder:
    """Implements `Decoder`. Taps: the sum, and what the row itself is worth."""

    spec = SPEC

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        count = len(rows.items)
        value = rows.items @ torch.tensor([3, 5]) + torch.tensor([7, 11, 13]) @ rows.positions
        if rows.given_vectors is not None and rows.has_given is not None:
            value = value + ((rows.given_vectors.long() @ torch.tensor([17, 19]) + 1) * rows.has_given[:, 0])
        value = value % MODULUS
        keys_values = torch.zeros(count, 2, SPEC.head_size)
        keys_values[:, 1, 0] = value.float()
        keys_values[:, 1, 1] = (rows.items[:, 1] == START).float()
        means = attention(0, torch.zeros(count, SPEC.query_heads, SPEC.head_size), keys_values)[:, :2]
        # The mean of the marks is one over the number of rows. Padding has no mark, and no meaning.
        sums = (means[:, :1] / means[:, 1:]).nan_to_num().round()
        return Hidden(sums, torch.stack([sums[:, 0], value.float()], 1) if rows.taps else None)


class CountingHead:
    """Implements `Head`. How an item is sampled means nothing to it."""

    def draw(self, hidden: torch.Tensor, draws: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[DrawnItem | None]:
        results: list[DrawnItem | None] = []
        for total, draw, ids in zip(hidden[: len(draws), 0].tolist(), draws, banned, strict=True):
            item = frame(int(total), draw.seed)
            results.append(DrawnItem(((item[0] + 1) % IDS, item[1]) if item[0] in ids else item))
        return results


def engine(pages: int = 100, kept_pages: int | None = None, **limits: int) -> Engine:
    limits_ = SchedulerLimits(**limits)
    return close_later(Engine(CountingDecoder(), CountingHead(), pages=pages, limits=limits_, kept_pages=kept_pages, poison=True))


def prompt_items(first: Sequence[int]) -> NDArray[np.int64]:
    """Rows of a prompt, with the mark on the first one."""
    items = np.stack([np.array(first, np.int64), np.zeros(len(first), np.int64)], axis=1)
    items[0, 1] = START
    return items


def answer(
    prompt: Prompt, seed: int, count: int, appended: Sequence[Sequence[float]] | None = None
) -> tuple[list[Item], list[tuple[int, int]]]:
    """The first `count` frames after a prompt, and the taps of every row, by hand. appended: the vectors for the frames' rows; the last one
    stands for all further ones."""
    given: dict[int, Sequence[float]] = {}
    for part in prompt.given:
        given |= {part.first + index: row.tolist() for index, row in enumerate(part.rows)}
    total, taps, frames = 0, [], list[Item]()
    for slot in range(len(prompt) + count - 1):
        if slot < len(prompt):
            item = tuple(prompt.items[slot].tolist())
            vector = given.get(slot)
            positions = [slot] * AXES if prompt.positions is None else prompt.positions[:, slot].tolist()
        else:
            place = slot - len(prompt)
            item, positions = frames[place], [slot + prompt.delta] * AXES
            vector = appended[min(place, len(appended) - 1)] if appended else None
        value = worth(item, vector, positions)
        total += value
        taps.append((total, value))
        if slot >= len(prompt) - 1:
            frames.append(frame(total, seed))
    return frames, taps
