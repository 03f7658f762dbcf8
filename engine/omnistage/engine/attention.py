"""Attention over paged keys and values, in three forms that all give a row the same bits whoever its neighbours are.

* `PrefillAttention`: consecutive rows of one prompt, in blocks of PAGE_TOKENS rows that begin at multiples of PAGE_TOKENS. Each block
  is one call whose shape depends on the place in the prompt only, so neither the cut into chunks nor a shared prefix changes a bit.
* `BatchedDecodeAttention`: one row each of many sequences as one batched product over padded pages. More columns of scores change no
  other column, and masked weights are exact zeros; the weighted sum itself runs at each row's own number of pages. Holds for oneDNN's
  bfloat16 products and is measured by `batches_are_exact`.
* `SingleDecodeAttention`: the same rows one by one, each over exactly its own length; used where batches were found to differ
  (float32 products of MKL do).

A decode row that is recomputed (a resumed request) has the same shape as when it was first computed: both decode forms accept several
rows of one sequence, each of which sees only what lies before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import DecoderSpec
from omnistage.engine.kv import PAGE_TOKENS, KVCache, pages_for

_LEAST_PRODUCT = 16**3
"""PyTorch gives a batched product of up to so many multiplications, all its matrices together, to another kernel than larger ones."""

_TILE_PAGES = 256
"""Most padded pages of one batched product: bounds the copy of keys and values, and keeps it in the last-level cache."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a step: its place in its sequence, and the pages of that sequence."""

    position: int
    pages: Sequence[int]


class _Places:
    """Where the keys and values of a step's rows go."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._pages = torch.tensor([row.pages[row.position // PAGE_TOKENS] for row in rows])
        self._places = torch.tensor([row.position % PAGE_TOKENS for row in rows])

    def store(self, cache: KVCache, layer: int, keys_values: torch.Tensor) -> None:
        """Rows beyond those that were given are padding and are not stored."""
        cache.write(layer, self._pages, self._places, keys_values[: len(self._pages)])


class PrefillAttention:
    """Attention for rows `start` .. `start + count - 1` of one sequence; `start` is a multiple of PAGE_TOKENS."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, pages: Sequence[int], start: int, count: int) -> None:
        if start % PAGE_TOKENS:
            raise ValueError(f"a prefill chunk begins at a multiple of {PAGE_TOKENS}, got {start}")
        self._cache, self._kv_heads, self._group, self._count = cache, spec.kv_heads, spec.query_heads // spec.kv_heads, count
        self._places = _Places([Row(position, pages) for position in range(start, start + count)])
        self._table = torch.tensor(pages[: pages_for(start + count)])
        self._blocks = []
        for first in range(0, count, PAGE_TOKENS):
            rows = min(PAGE_TOKENS, count - first)
            seen = start + first + torch.arange(rows)[:, None] >= torch.arange(start + first + rows)[None]
            mask = torch.zeros(seen.shape, dtype=spec.dtype).masked_fill_(~seen, float("-inf"))
            self._blocks.append((first, rows, mask.repeat(self._group, 1)))

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        self._places.store(self._cache, layer, keys_values)
        held = self._cache.layer(layer).index_select(0, self._table).transpose(0, 1).flatten(1, 2)
        keys, values = held[: self._kv_heads], held[self._kv_heads :]
        head_size = queries.shape[-1]
        result = torch.zeros_like(queries)
        for first, rows, mask in self._blocks:
            block = queries[first : first + rows].view(rows, self._kv_heads, self._group, head_size)
            # The heads that share keys are stacked as rows of one query: [kv_heads, group * rows, head_size].
            stacked = block.permute(1, 2, 0, 3).reshape(1, self._kv_heads, -1, head_size)
            length = mask.shape[1]
            attended = functional.scaled_dot_product_attention(
                stacked, keys[None, :, :length], values[None, :, :length], attn_mask=mask, scale=1.0
            )
            unstacked = attended.view(self._kv_heads, self._group, rows, head_size).permute(2, 0, 1, 3)
            result[first : first + rows] = unstacked.reshape(rows, -1, head_size)
        return result.view(queries.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: torch.Tensor | slice
    count: int
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    runs: tuple[tuple[int, int, int], ...]


class BatchedDecodeAttention:
    """Attention for single rows, many at a time. Rows of similar length share a product; the grouping changes no bit."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, rows: Sequence[Row]) -> None:
        self._cache, self._kv_heads, self._group = cache, spec.kv_heads, spec.query_heads // spec.kv_heads
        self._places = _Places(rows)
        self._tiles = [self._tile(rows, members, spec.dtype) for members in _group_by_length(rows)]

    def _tile(self, rows: Sequence[Row], members: list[int], dtype: torch.dtype) -> _Tile:
        width = max(pages_for(rows[index].position + 1) for index in members)
        tables = [list(rows[index].pages[: pages_for(rows[index].position + 1)]) for index in members]
        # A short row repeats its own first page: held, finite, and masked.
        table = torch.tensor([pages + pages[:1] * (width - len(pages)) for pages in tables])
        positions = torch.tensor([rows[index].position for index in members])
        hidden = torch.arange(width * PAGE_TOKENS)[None] > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        # All rows in order are a plain slice: no copy of the queries.
        places = slice(0, len(rows)) if members == list(range(len(rows))) else torch.tensor(members)
        # Rows of `KVCache.heads`, ordered by sequence, head, page: what is gathered is a plain batch of matrices.
        heads = (table * 2 * self._kv_heads)[:, None] + torch.arange(2 * self._kv_heads)[:, None]
        keys, values = heads[:, : self._kv_heads].flatten(), heads[:, self._kv_heads :].flatten()
        runs, first = [], 0
        for pages, run in groupby(map(len, tables)):
            last = first + len(list(run)) * self._kv_heads
            runs.append((first, last, pages * PAGE_TOKENS))
            first = last
        return _Tile(places, len(members), keys, values, mask.repeat_interleave(self._kv_heads, 0)[:, None], tuple(runs))

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        self._places.store(self._cache, layer, keys_values)
        head_size, pages = queries.shape[-1], self._cache.heads(layer)
        result = torch.zeros_like(queries)
        for tile in self._tiles:
            # Batches of one matrix per sequence and key head: [count * kv_heads, ...].
            batch = tile.count * self._kv_heads
            keys = pages.index_select(0, tile.keys).view(batch, -1, head_size)
            values = pages.index_select(0, tile.values).view(batch, -1, head_size)
            scores = torch.bmm(queries[tile.rows].view(batch, self._group, head_size), keys.transpose(1, 2)).add_(tile.mask)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(queries.dtype)
            # Zeros appended to a sum may change how the library orders it: here, and only here, each row keeps its own length.
            sums = [
                torch.bmm(weights[first:last, :, :length].contiguous(), values[first:last, :length].contiguous())
                for first, last, length in tile.runs
            ]
            result[tile.rows] = torch.cat(sums).view(tile.count, -1, head_size)
        return result.view(queries.shape[0], -1)


class SingleDecodeAttention:
    """Attention for single rows, one product each."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, rows: Sequence[Row]) -> None:
        self._cache, self._kv_heads, self._group = cache, spec.kv_heads, spec.query_heads // spec.kv_heads
        self._places = _Places(rows)
        self._rows = [(row.position + 1, torch.tensor(row.pages[: pages_for(row.position + 1)])) for row in rows]

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        self._places.store(self._cache, layer, keys_values)
        result, head_size = torch.zeros_like(queries), queries.shape[-1]
        for index, (length, table) in enumerate(self._rows):
            held = self._cache.layer(layer).index_select(0, table).transpose(0, 1).flatten(1, 2)[:, :length]
            grouped = queries[index].view(self._kv_heads, self._group, head_size)
            weights = torch.softmax(torch.matmul(grouped, held[: self._kv_heads].transpose(1, 2)), -1)
            result[index] = torch.matmul(weights, held[self._kv_heads :]).view(-1, head_size)
        return result.view(queries.shape[0], -1)


def _group_by_length(rows: Sequence[Row]) -> list[list[int]]:
    """Row indices in groups whose padded size is at most twice their real size and within one tile."""
    widths = [pages_for(row.position + 1) for row in rows]
    ordered = sorted(range(len(rows)), key=widths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    widest = 0
    for index in ordered:
        width = widths[index]
        if not groups or 2 * width < widest or (len(groups[-1]) + 1) * widest > _TILE_PAGES:
            groups.append([])
            widest = width
        groups[-1].append(index)
    return groups


def batches_are_exact(spec: DecoderSpec) -> bool:
    """Measure on this CPU whether `BatchedDecodeAttention` gives a row the same bits alone and among others, at several lengths.

    A model whose smallest product could fall to the other kernel when it is alone is not exact, however rarely that shows.
    """
    if spec.query_heads * spec.head_size * PAGE_TOKENS <= _LEAST_PRODUCT:
        return False
    generator = torch.Generator().manual_seed(0)
    small = DecoderSpec(1, spec.query_heads, spec.kv_heads, spec.head_size, spec.vocab_size, spec.context, spec.dtype)
    positions = (5, 40, 95, 130, 17, 63, 64, 200)
    cache = KVCache(small, sum(pages_for(position + 1) for position in positions))
    cache.layer(0).copy_(torch.randn(cache.layer(0).shape, generator=generator))
    rows, taken = [], 0
    for position in positions:
        needed = pages_for(position + 1)
        rows.append(Row(position, range(taken, taken + needed)))
        taken += needed
    queries = torch.randn(len(rows), spec.query_heads, spec.head_size, generator=generator).to(spec.dtype)
    stored = torch.randn(len(rows), 2 * spec.kv_heads, spec.head_size, generator=generator).to(spec.dtype)
    together = BatchedDecodeAttention(cache, small, rows)(0, queries, stored)
    return all(
        torch.equal(BatchedDecodeAttention(cache, small, [row])(0, queries[i : i + 1], stored[i : i + 1]), together[i : i + 1])
        for i, row in enumerate(rows)
    )
