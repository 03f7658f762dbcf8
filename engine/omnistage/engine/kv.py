"""Where keys and values live: a pool of equal pages, the tensors behind them, and pages shared by prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from omnistage.engine.adapter import DecoderSpec

PAGE_TOKENS = 32
"""Tokens of a page. Also the rows of a prefill block (see attention.py), so that a shared page holds the same bits whoever computed it."""


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class OutOfPages(RuntimeError):
    """More pages were asked for than are free: the caller should have asked `free` first."""


class PagePool:
    """Counts who holds which page. A page is free when its last holder gave it back; giving back a free page is an error."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page pool needs at least one page, got {total}")
        self._holders = [0] * total
        self._free = list(range(total - 1, -1, -1))

    @property
    def total(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages."""
        if count > self.free:
            raise OutOfPages(f"{count} pages asked for, {self.free} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that someone else holds too."""
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> list[int]:
        """Let go of pages; returns those that became free."""
        freed: list[int] = []
        for page in pages:
            if self._holders[page] == 0:
                raise ValueError(f"page {page} was given back twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                freed.append(page)
        self._free.extend(freed)
        return freed


class PrefixCache:
    """Full pages of finished prompts, found again by the token ids from the start of the prompt to the end of the page.

    Holds each page it names. Bounded; the page that was not asked for the longest goes first. The key is the ids themselves, so two
    prompts can never be mistaken for one another.
    """

    def __init__(self, pool: PagePool, limit: int) -> None:
        self._pool = pool
        self._limit = min(limit, pool.total // 4)
        self._pages: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def unshared(self) -> int:
        """Pages that only this cache holds."""
        return sum(self._pool.holders(page) == 1 for page in self._pages.values())

    def find(self, prompt: Sequence[int]) -> list[int]:
        """Pages of the longest known beginning of `prompt`, held for the caller. At least one token of the prompt is left out, because
        its hidden row is needed."""
        pages: list[int] = []
        for end in range(PAGE_TOKENS, len(prompt), PAGE_TOKENS):
            key = tuple(prompt[:end])
            if key not in self._pages:
                break
            self._pages.move_to_end(key)
            pages.append(self._pages[key])
        self._pool.share(pages)
        return pages

    def remember(self, prompt: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Keep the full pages of a prompt that is in the cache now; returns pages that became free to make room."""
        for index, end in enumerate(range(PAGE_TOKENS, min(len(prompt), self._limit * PAGE_TOKENS + 1), PAGE_TOKENS)):
            key = tuple(prompt[:end])
            if key not in self._pages:
                self._pool.share(pages[index : index + 1])
                self._pages[key] = pages[index]
        return self.shrink(len(self._pages) - self._limit)

    def shrink(self, count: int) -> list[int]:
        """Forget the `count` oldest pages; returns those that nobody else holds, now free."""
        freed: list[int] = []
        for _ in range(min(count, len(self._pages))):
            _, page = self._pages.popitem(last=False)
            freed += self._pool.give_back([page])
        return freed


class KVCache:
    """The tensors behind the pages: for each layer [pages, 2 * kv_heads, PAGE_TOKENS, head_size], keys first.

    A page is zeroed when it is taken: masked places take part in products, and what is left there must be finite. With `poison`, a
    page is filled with NaN when it is freed, so that any use of a page that is not held shows at once.
    """

    def __init__(self, spec: DecoderSpec, pages: int, *, poison: bool = False) -> None:
        self._data = torch.empty(spec.layers, pages, 2 * spec.kv_heads, PAGE_TOKENS, spec.head_size, dtype=spec.dtype)
        self._layers = tuple(self._data.unbind())
        self._heads = tuple(layer.flatten(0, 1) for layer in self._layers)
        self._poison = poison
        if poison:
            self._data.fill_(float("nan"))

    def layer(self, index: int) -> torch.Tensor:
        """Pages of a layer: [pages, 2 * kv_heads, PAGE_TOKENS, head_size]."""
        return self._layers[index]

    def heads(self, index: int) -> torch.Tensor:
        """The same memory as [pages * 2 * kv_heads, PAGE_TOKENS, head_size]; a page's head is row page * 2 * kv_heads + head."""
        return self._heads[index]

    def write(self, index: int, pages: torch.Tensor, places: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store tokens in a layer. pages, places: int64 [n], page and place of each; keys_values: [n, 2 * kv_heads, head_size]."""
        self._layers[index][pages, :, places] = keys_values

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that were just taken."""
        if pages:
            self._data.index_fill_(1, torch.tensor(pages), 0.0)

    def retire(self, pages: Sequence[int]) -> None:
        """Mark pages that just became free."""
        if self._poison and pages:
            self._data.index_fill_(1, torch.tensor(pages), float("nan"))


def page_bytes(spec: DecoderSpec) -> int:
    """Bytes of one page over all layers."""
    return spec.layers * PAGE_TOKENS * 2 * spec.kv_heads * spec.head_size * spec.dtype.itemsize
