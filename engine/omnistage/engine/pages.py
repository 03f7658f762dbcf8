"""Counts the holders of each page of the cache, and finds pages again by the content that led to them. It touches no tensor but kept
taps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAGE_ROWS = 32
"""Rows of a page, and most rows of a run: no run crosses a page, and all rows of a run see equally many pages."""


def pages_for(rows: int) -> int:
    """Pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)


class OutOfPages(RuntimeError):
    """More pages were asked for than are free: the caller must ask `free` first."""


class PagePool:
    """Counts the holders of each page. A page is free when its last holder gave it back; giving back a free page is an error. One special
    holder, the prefix cache, keeps pages: the pool always knows how many of the kept pages nobody else holds."""

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
        """Number of kept pages that nobody else holds."""
        return self._only_kept

    def is_kept(self, page: int) -> bool:
        return page in self._kept

    def holders(self, page: int) -> int:
        """Number of holders of a page."""
        return self._holders[page]

    def take(self) -> int:
        """Hold a free page."""
        if not self._free:
            raise OutOfPages("no page is free")
        page = self._free.pop()
        self._holders[page] = 1
        self._taken.append(page)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that another holder has too."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._only_kept -= self._holders[page] == 1 and page in self._kept
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Give back pages: a page that nobody else holds becomes free."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} was given back twice")
            self._holders[page] -= 1
            self._only_kept += self._holders[page] == 1 and page in self._kept
            if self._holders[page] == 0:
                self._free.append(page)
                self._freed.append(page)

    def keep(self, page: int) -> None:
        """Keep a page that another holder has."""
        if page in self._kept:
            raise ValueError(f"page {page} is kept already")
        self.share([page])
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Stop keeping a page."""
        self._kept.remove(page)
        self._only_kept -= self._holders[page] == 1
        self.give_back([page])

    def changes(self) -> tuple[list[int], list[int]]:
        """Pages that were taken and pages that became free since the last call, for the owner of their memory. A page that was both is in
        the first list if it is held now, in the second if it is not."""
        taken = [page for page in dict.fromkeys(self._taken) if self._holders[page]]
        freed = [page for page in dict.fromkeys(self._freed) if not self._holders[page]]
        self._taken, self._freed = [], []
        return taken, freed


@dataclass(slots=True)
class _Kept:
    """A kept page; taps: of its rows, [PAGE_ROWS, tap_width], None if they are not known."""

    page: int
    taps: torch.Tensor | None


class PrefixCache:
    """Full computed pages, found again by the key of everything that led to them (`Sequence.page_keys`).

    Holds each page it names. Bounded by `limit` pages; the page that was not asked for the longest goes first. With a page it keeps the
    taps of its rows, for sequences that want them.
    """

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
        """Kept pages for the longest run of `keys` from number `first` on, held for the caller, and the taps of those that end after slot
        `taps_from` (None: no taps). The caller has the pages before `first` already."""
        pages: list[int] = []
        taps: list[torch.Tensor] = []
        for index, key in enumerate(keys[first:], first):
            kept = self._kept.get(key)
            if kept is None:
                break
            if taps_from is not None and (index + 1) * PAGE_ROWS > taps_from:
                if kept.taps is None:
                    break
                taps.append(kept.taps)
            self._kept.move_to_end(key)
            pages.append(kept.page)
        self._pool.share(pages)
        return pages, taps

    def remember(self, key: bytes, page: int, taps: torch.Tensor | None) -> None:
        """Keep a full page, in the place of the oldest one if there are too many. taps: of its rows; they are added to a page that is kept
        without."""
        known = self._kept.get(key)
        if known is not None:
            known.taps = taps if known.taps is None else known.taps
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
        """Forget the oldest page that nobody else holds. Return whether there was one. Older pages are in use and go to the end: the search
        passes them once, and not again for each page."""
        if not self._pool.only_kept:
            return False
        while self._pool.holders(self._kept[key := next(iter(self._kept))].page) > 1:
            self._kept.move_to_end(key)
        self._forget(key)
        return True

    def _forget(self, key: bytes) -> None:
        self._pool.forget(self._kept.pop(key).page)
