"""A kernel of attention over paged keys and values, in Triton. Import it only to run it: Triton is not installed everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from omnistage.engine.adapter import DecoderSpec
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.plan import PlannedRun

__all__ = ["TritonError", "attend", "tiles"]

TILE = 32
"""Queries of one program. A query is one row of one query head; the heads that share keys are next to each other. The number is fixed,
because a kernel with another number could give a row other bits. A decoding row needs one query for each head of its group. A run of 32
rows with 7 heads in a group needs seven programs, which all read its pages, six of them from the GPU's cache. With 64, the matrix units of
some GPUs use other instructions than with 32."""

_FIELDS = 5
"""Number of the numbers that describe a tile: see `tiles`."""

OPTIONS = {"num_warps": 4, "num_stages": 2}
"""Options of Triton's compiler."""

_LEAST_WIDTH = 16
"""A product in Triton has at least this many columns."""


def tiles(runs: Sequence[PlannedRun], group: int) -> tuple[torch.Tensor, int]:
    """(a table, int32 [numbers], that says what each program computes; the number of tiles). One program computes one tile for one head of
    keys. group: number of query heads that share keys.

    Each tile has _FIELDS numbers: the first row of its run in the step, the rows of the run, the slot of the run's first row, the index in
    this table at which the list of the run's pages begins, and the first query of the tile, counted in the run. After all tiles come the
    lists of pages."""
    tile_counts = [-(-run.count * group // TILE) for run in runs]  # rounded up
    total = sum(tile_counts)
    lists_start = total * _FIELDS
    fields: list[int] = []
    pages: list[int] = []
    for run, count in zip(runs, tile_counts, strict=True):
        for tile in range(count):
            fields += (run.first, run.count, run.start, lists_start + len(pages), tile * TILE)
        pages += run.pages
    return torch.tensor(fields + pages, dtype=torch.int32), total


def attend(spec: DecoderSpec, queries: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, total: int, result: torch.Tensor) -> None:
    """Write the attention of the rows of some runs into `result`. queries, result: [rows, query_heads, head_size], contiguous. pages: keys
    and values of one layer, as in `KVCache.layer`. table, total: the results of `tiles`, the table on the device."""
    if not total:
        return
    # Triton launches on the device of the thread, wherever the tensors are.
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        _attend[(total, spec.kv_heads)](
            queries,
            pages,
            table,
            result,
            GROUP=spec.query_heads // spec.kv_heads,
            KV_HEADS=spec.kv_heads,
            SIZE=spec.head_size,
            WIDTH=max(_LEAST_WIDTH, triton.next_power_of_2(spec.head_size)),
            PAGE=PAGE_ROWS,
            TILE=TILE,
            FIELDS=_FIELDS,
            **OPTIONS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    queries: tl.tensor,
    pages: tl.tensor,
    table_start: tl.tensor,
    result: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """The kernel: a program computes one tile of one run for the query heads that share one head of keys. It goes through the run's pages
    in order and corrects the softmax after each (Milakov and Gimelshein, Online normalizer calculation for softmax). Only numbers of this
    run decide what is computed. The tensors are as in `attend`. SIZE: of a head. WIDTH: SIZE rounded up to a power of two."""
    tile, head = table_start + tl.program_id(0) * FIELDS, tl.program_id(1)
    first, count, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    page_list, first_query = table_start + tl.load(tile + 3), tl.load(tile + 4)
    query_index = first_query + tl.arange(0, TILE)
    row, column, place = query_index // GROUP, tl.arange(0, WIDTH), tl.arange(0, PAGE)
    heads = (first + row).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + query_index % GROUP
    at = heads[:, None] * SIZE + column[None, :]
    is_asked = (row < count)[:, None] & (column < SIZE)[None, :]
    query = tl.load(queries + at, mask=is_asked, other=0.0)
    best_before = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, WIDTH], tl.float32)
    for number in range(start // PAGE + 1):
        # 64 bits: a layer may have more than 2**31 numbers.
        page = tl.load(page_list + number).to(tl.int64) * (2 * KV_HEADS)
        slot = number * PAGE + place
        # No slot after the run is read, so its contents, even NaN, have no part in any sum.
        is_held = (slot < start + count)[:, None] & (column < SIZE)[None, :]
        inside = place[:, None] * SIZE + column[None, :]
        keys = tl.load(pages + (page + head) * (PAGE * SIZE) + inside, mask=is_held, other=0.0)
        values = tl.load(pages + (page + KV_HEADS + head) * (PAGE * SIZE) + inside, mask=is_held, other=0.0)
        # "ieee": otherwise float32 would be cut to 10 bits. Every query sees slot 0, so `best` is finite after the first page.
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores = tl.where(slot[None, :] <= (start + row)[:, None], scores, float("-inf"))
        best = tl.maximum(best_before, tl.max(scores, 1))
        decay, weights = tl.exp(best_before - best), tl.exp(scores - best[:, None])
        total = total * decay + tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, sums * decay[:, None], input_precision="ieee")
        best_before = best
    tl.store(result + at, (sums / total[:, None]).to(result.dtype.element_ty), mask=is_asked)
