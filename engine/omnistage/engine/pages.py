"""Counts the holders of each page of the cache, and finds kept pages by all the content from the first row to their last. The only tensors
here are the taps that are kept with pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAGE_ROWS = 32
"""Rows of a page. A run never crosses a page, so it has no more rows than that, and all its rows see the same number of pages."""


def pages_for(rows: int) -> int:
    """Number of pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)


class OutOfPages(RuntimeError):
    """No page is free. The caller must look at `PagePool.free` before it takes one."""


class PagePool:
    """Counts the holders of each page, which are sequences and the prefix cache. A page without a holder is free. The pool also counts the
    pages that only the prefix cache holds (`only_kept`). `_taken`, `_freed`: pages since the last call of `changes`."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page pool needs at least one page, got {total}")
        self._holders = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._kept: set[int] = set()
        self._only_kept = 0
        self._taken: list[int] = []
        self._freed: list[int] = []

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
        return page in self._kept

    def holders(self, page: int) -> int:
        """Number of holders of a page."""
        return self._holders[page]

    def take(self) -> int:
        """Take a free page, of which the caller is then the only holder. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages("no page is free")
        page = self._free.pop()
        self._holders[page] = 1
        self._taken.append(page)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Become a further holder of pages that have a holder already."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._only_kept -= self._holders[page] == 1 and page in self._kept
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Stop holding pages; a page without a holder becomes free. Raises ValueError for a page that is free already."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} was given back twice")
            self._holders[page] -= 1
            self._only_kept += self._holders[page] == 1 and page in self._kept
            if self._holders[page] == 0:
                self._free.append(page)
                self._freed.append(page)

    def keep(self, page: int) -> None:
        """For the prefix cache: become a further holder of a page."""
        if page in self._kept:
            raise ValueError(f"page {page} is kept already")
        self.share([page])
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """For the prefix cache: stop holding a page."""
        self._kept.remove(page)
        self._only_kept -= self._holders[page] == 1
        self.give_back([page])

    def changes(self) -> tuple[list[int], list[int]]:
        """(pages that are held now, pages that are free now) among those that were taken or became free since the last call, for the owner
        of their memory."""
        in_use = [page for page in dict.fromkeys(self._taken) if self._holders[page]]
        freed = [page for page in dict.fromkeys(self._freed) if not self._holders[page]]
        self._taken, self._freed = [], []
        return in_use, freed


@dataclass(slots=True)
class _Kept:
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
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

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
            page = self._kept.get(key)
            if page is None:
                break
            if taps_from is not None and (index + 1) * PAGE_ROWS > taps_from:
                if page.taps is None:
                    break
                taps.append(page.taps)
            self._kept.move_to_end(key)
            pages.append(page.page)
        self._pool.share(pages)
        return pages, taps

    def remember(self, key: bytes, page: int, taps: torch.Tensor | None) -> None:
        """Keep a full page; if there are then too many, forget the oldest page. taps: the taps of its rows; None: there are none. If a page
        is kept for this key already, it only gets the taps that it lacks."""
        entry = self._kept.get(key)
        if entry is not None:
            entry.taps = taps if entry.taps is None else entry.taps
            return
        if self._limit:
            self._pool.keep(page)
            self._kept[key] = _Kept(page, taps)
        self.shrink(len(self._kept) - self._limit)

    def shrink(self, count: int) -> None:
        """Forget the `count` oldest pages."""
        for _ in range(min(count, len(self._kept))):
            self._forget(next(iter(self._kept)))

    def make_room(self) -> bool:
        """Forget the oldest page that no sequence holds. Returns whether there was such a page. Older pages that are in use move to the
        end, so that the next search does not pass them again."""
        if not self._pool.only_kept:
            return False
        while self._pool.holders(self._kept[key := next(iter(self._kept))].page) > 1:
            self._kept.move_to_end(key)
        self._forget(key)
        return True

    def _forget(self, key: bytes) -> None:
        self._pool.forget(self._kept.pop(key).page)
