"""The memory of the engine. The cache holds keys and values of every computed row, in pages: `PagePool` counts the holders of each page,
`PrefixCache` finds kept pages by all the content from the first row to their last, and `KVCache` is the memory itself. `Scratch` bounds the
memory that products need for values between two products, and the import of this module bounds the number of compiled kernels."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from omnistage.engine.adapter import DecoderSpec
from omnistage.engine.devices import to_device

PAGE_ROWS = 32
"""Rows of a page. A run never crosses a page, so it has no more rows than that, and all its rows see the same number of pages."""


def pages_for(rows: int) -> int:
    """Number of pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)


class OutOfPages(RuntimeError):
    """No page is free. The caller must look at `PagePool.free` before it takes one."""


class PagePool:
    """Counts the holders of each page, which are sequences and the prefix cache. A page without a holder is free. The pool also counts the
    pages that only the prefix cache holds (`only_kept`). `_taken_pages`, `_freed_pages`: pages since the last call of `changes`."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page pool needs at least one page, got {total}")
        self._holders = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._kept_pages: set[int] = set()
        self._only_kept = 0
        self._taken_pages: list[int] = []
        self._freed_pages: list[int] = []

    @property
    def total(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def only_kept(self) -> int:
        """Number of pages that the prefix cache keeps and no sequence holds."""
        return self._only_kept

    def is_kept(self, page: int) -> bool:
        return page in self._kept_pages

    def holders(self, page: int) -> int:
        """Number of holders of a page."""
        return self._holders[page]

    def take(self) -> int:
        """Take a free page, of which the caller is then the only holder. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages("no page is free")
        page = self._free.pop()
        self._holders[page] = 1
        self._taken_pages.append(page)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Become a further holder of pages that have a holder already."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            # A page that only the prefix cache held gets a sequence as its second holder.
            self._only_kept -= self._holders[page] == 1 and page in self._kept_pages
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Stop holding pages; a page without a holder becomes free. Raises ValueError for a page that is free already."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} was given back twice")
            self._holders[page] -= 1
            # If one holder is left, and the page is kept, that holder is the prefix cache.
            self._only_kept += self._holders[page] == 1 and page in self._kept_pages
            if self._holders[page] == 0:
                self._free.append(page)
                self._freed_pages.append(page)

    def keep(self, page: int) -> None:
        """For the prefix cache: become a further holder of a page."""
        if page in self._kept_pages:
            raise ValueError(f"page {page} is kept already")
        self.share([page])
        self._kept_pages.add(page)

    def forget(self, page: int) -> None:
        """For the prefix cache: stop holding a page."""
        self._kept_pages.remove(page)
        self._only_kept -= self._holders[page] == 1
        self.give_back([page])

    def changes(self) -> tuple[list[int], list[int]]:
        """(pages that are held now, pages that are free now) among those that were taken or became free since the last call, for the owner
        of their memory."""
        in_use = [page for page in dict.fromkeys(self._taken_pages) if self._holders[page]]
        freed = [page for page in dict.fromkeys(self._freed_pages) if not self._holders[page]]
        self._taken_pages, self._freed_pages = [], []
        return in_use, freed


@dataclass(slots=True)
class _KeptPage:
    """A kept page. taps: the taps of its rows, [PAGE_ROWS, tap_width]; None: they are not kept."""

    page: int
    taps: torch.Tensor | None


class PrefixCache:
    """Keeps full computed pages, to be found by a key: a hash of everything that their contents depend on (`Sequence.page_keys`).

    It is a holder of each page that it keeps. limit: largest number of pages; beyond it, the page that was not found for the longest time
    is forgotten. With a page it keeps the taps of its rows, for sequences that want them."""

    def __init__(self, pool: PagePool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._entries: OrderedDict[bytes, _KeptPage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def limit(self) -> int:
        return self._limit

    def find(self, keys: Sequence[bytes], taps_from: int | None, first: int = 0) -> tuple[list[int], list[torch.Tensor]]:
        """(the kept pages for `keys[first:]`, up to the first key without a page; the taps of those pages that end after slot `taps_from`).
        The caller becomes a holder of the pages. taps_from: None: no taps are wanted; a page that lacks wanted taps ends the search. first:
        the caller has the pages before this index already."""
        pages: list[int] = []
        taps: list[torch.Tensor] = []
        for index, key in enumerate(keys[first:], first):
            page = self._entries.get(key)
            if page is None:
                break
            if taps_from is not None and (index + 1) * PAGE_ROWS > taps_from:
                if page.taps is None:
                    break
                taps.append(page.taps)
            self._entries.move_to_end(key)
            pages.append(page.page)
        self._pool.share(pages)
        return pages, taps

    def remember(self, key: bytes, page: int, taps: torch.Tensor | None) -> None:
        """Keep a full page; if there are then too many, forget the oldest page. taps: the taps of its rows; None: there are none. If a page
        is kept for this key already, it only gets the taps that it lacks."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.taps = taps if entry.taps is None else entry.taps
            return
        if self._limit:
            self._pool.keep(page)
            self._entries[key] = _KeptPage(page, taps)
        self.shrink(len(self._entries) - self._limit)

    def shrink(self, count: int) -> None:
        """Forget the `count` oldest pages."""
        for _ in range(min(count, len(self._entries))):
            self._forget(next(iter(self._entries)))

    def make_room(self) -> bool:
        """Forget the oldest page that no sequence holds. Returns whether there was such a page. Older pages that are in use move to the
        end, so that the next search does not pass them again."""
        if not self._pool.only_kept:
            return False
        key, oldest = next(iter(self._entries.items()))
        while self._pool.holders(oldest.page) > 1:
            self._entries.move_to_end(key)
            key, oldest = next(iter(self._entries.items()))
        self._forget(key)
        return True

    def _forget(self, key: bytes) -> None:
        self._pool.forget(self._entries.pop(key).page)


class KVCache:
    """The memory of the pages: for each layer [pages, 2 * kv_heads, PAGE_ROWS, head_size], keys first.

    A page is zeroed when a sequence takes it: masked slots take part in products, so their numbers must be finite. poison: fill a page with
    NaN when it becomes free, so that any use of a page without a holder shows at once."""

    def __init__(self, spec: DecoderSpec, pages: int, *, poison: bool = False) -> None:
        self._data = torch.empty(spec.layers, pages, 2 * spec.kv_heads, PAGE_ROWS, spec.head_size, dtype=spec.dtype, device=spec.device)
        self._layers = tuple(self._data.unbind())
        self._heads = tuple(layer.flatten(0, 1) for layer in self._layers)
        self._poison = poison
        if poison:
            self._data.fill_(float("nan"))

    def layer(self, index: int) -> torch.Tensor:
        """Pages of a layer: [pages, 2 * kv_heads, PAGE_ROWS, head_size]."""
        return self._layers[index]

    def heads(self, index: int) -> torch.Tensor:
        """The memory of `layer` as [pages * 2 * kv_heads, PAGE_ROWS, head_size]: row page * 2 * kv_heads + n is head n of a page."""
        return self._heads[index]

    def write(self, index: int, pages: torch.Tensor, places: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store n rows in a layer. pages, places: the page of each row and its slot there, int64 [n]. keys_values: [n, 2 * kv_heads,
        head_size]."""
        self._layers[index][pages, :, places] = keys_values

    def follow(self, new: Sequence[int], freed: Sequence[int]) -> None:
        """Zero the pages that were taken since the last step; with `poison`, spoil those that became free (`PagePool.changes`)."""
        if new:
            self._data.index_fill_(1, to_device(torch.tensor(new), self._data.device), 0.0)
        if self._poison and freed:
            self._data.index_fill_(1, to_device(torch.tensor(freed), self._data.device), float("nan"))


def page_bytes(spec: DecoderSpec) -> int:
    """Bytes of one page in all layers together."""
    return spec.layers * PAGE_ROWS * 2 * spec.kv_heads * spec.head_size * spec.dtype.itemsize


KEPT_KERNELS = 256
"""Number of compiled products that oneDNN keeps, and of their descriptions that PyTorch keeps for each thread. By default both keep 1,024,
and each takes a MB: a prompt of 24,000 tokens, whose attention has another shape for each page, took a gigabyte for good. A step of 64
sequences whose contexts all have different lengths needs 128 for attention, and some dozens for other products: with fewer, each layer
would compile all of them again, which takes five times as long as attending."""

ONEDNN_KEEPS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"

# Both libraries read them at their first product.
os.environ.setdefault(ONEDNN_KEEPS, str(KEPT_KERNELS))
os.environ.setdefault("LRU_CACHE_CAPACITY", str(KEPT_KERNELS))


@contextmanager
def kernels_kept(count: int) -> Iterator[None]:
    """Use it around the first product of a process: oneDNN then keeps `count` compiled products, unless the environment sets another
    number. Processes that are started after this context do not inherit the number."""
    value = os.environ[ONEDNN_KEEPS]
    if value == str(KEPT_KERNELS):
        os.environ[ONEDNN_KEEPS] = str(count)
    try:
        yield
    finally:
        os.environ[ONEDNN_KEEPS] = value


class Scratch:
    """Memory that is used again and again, one piece for each use, because new memory for each product would cost more than the product.
    Memory for a prompt that grows page by page would never fit into memory that was freed before, so a process would grow by a gigabyte for
    good. Not shared between threads."""

    def __init__(self) -> None:
        self._pieces: dict[str, torch.Tensor] = {}

    def take(self, use: str, shape: Sequence[int], model: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape, with the dtype and device of `model` and undefined contents. It is valid until the next call with the
        same `use`."""
        size = torch.Size(shape).numel()
        piece = self._pieces.get(use)
        if piece is None or piece.dtype != model.dtype or piece.device != model.device or piece.numel() < size:
            self._pieces.pop(use, None)
            # The old piece is freed before the new one is made. This has a quarter more than needed: a growing prompt then needs new memory
            # a few times only, not at every page.
            del piece
            piece = self._pieces[use] = torch.empty(size + size // 4, dtype=model.dtype, device=model.device)
        return piece[:size].view(*shape)
