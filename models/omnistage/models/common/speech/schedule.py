"""The codes that become sound together: a function of a window's number alone, never of the time at which codes came. No torch.

A window is a chunk of whole blocks that becomes sound, and the codes behind it that the window looks ahead at. The session keeps the state
that earlier blocks leave to a window. A replica that takes over has no such state, and begins early enough to make the same bits:

- if each window depends on all before it, some are refreshed: these have some blocks of context before their chunk instead of the
  state, computed once more in the first run too. Sound from there on depends on nothing before them, and a replica begins there;
- if a window depends on a known number of blocks before it, nothing is computed twice in the first run. A replica begins with a window
  that many blocks before the one whose sound is wanted, without state, and gives no sound before that one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Codes [begin - context, end + ahead) of a speech, of which [begin, end) become sound. fresh: it needs no state of an earlier window.
    last: the speech ends with its chunk."""

    begin: int
    end: int
    context: int
    ahead: int
    fresh: bool
    last: bool

    @property
    def first(self) -> int:
        return self.begin - self.context

    @property
    def past(self) -> int:
        return self.end + self.ahead


@dataclass(frozen=True, slots=True)
class Schedule:
    """sizes: blocks of the first chunk, the second and so on; the last size is repeated. Empty: the whole speech is one chunk. ahead:
    blocks that a window looks ahead. block: codes. context: blocks before its chunk that the sound of a window depends on; where windows
    are refreshed, that of a refreshed window. refresh: least number of blocks from one refresh to the next, and so the most that a replica
    that takes over computes again; 0: no window is refreshed."""

    sizes: tuple[int, ...]
    ahead: int
    block: int
    context: int
    refresh: int

    def window(self, number: int, codes: int, *, ended: bool) -> Window | None:
        """The window of a number, once all of its codes are there. codes: number of codes that are there. ended: there are no more codes.
        None: the window is not complete yet, or the speech ended before it."""
        begin, context, fresh = self.begin(number), self._context(number), self._is_fresh(number)
        if self.sizes:
            end = begin + self.sizes[min(number, self.growing)] * self.block
            if codes >= end + self.ahead * self.block:
                return Window(begin, end, context, self.ahead * self.block, fresh, False)
        if not ended or begin >= codes:
            return None
        # The rest has no further codes to look ahead at: all of it is the last chunk.
        return Window(begin, codes, context, 0, fresh, True)

    def begin(self, number: int) -> int:
        """The first code of the chunk of a window."""
        if not self.sizes:
            return 0
        growing = min(number, self.growing)
        return (sum(self.sizes[:growing]) + (number - growing) * self.sizes[-1]) * self.block

    def holding(self, code: int) -> int:
        """The window whose chunk has a code, for as long as the speech has not ended."""
        if not self.sizes:
            return 0
        blocks, number = code // self.block, 0
        while number < self.growing and blocks >= self.sizes[number]:
            blocks -= self.sizes[number]
            number += 1
        return number + (blocks // self.sizes[-1] if number == self.growing else 0)

    def entry(self, code: int) -> int:
        """The window with which a session begins that needs sound from a code on and has no state. The last window of a speech may reach
        beyond its own chunk, by less than the codes that it would look ahead at. Whether it does is unknown before the speech ends, so the
        code may belong to an earlier window."""
        if not self.sizes:
            return 0
        number = self.holding(max(code - self.ahead * self.block, 0))
        if not self.refresh:
            return self.holding(max(self.begin(number) - self.context * self.block, 0))
        # `growing` is the number of the first window of the last size.
        passed = number - self.growing
        return self.growing + passed // self._every * self._every if passed >= self._every else 0

    def first_code(self, number: int) -> int:
        """The first code that a window needs, besides the state of the window before it."""
        return self.begin(number) - self._context(number)

    @property
    def growing(self) -> int:
        """Number of windows before the chunks have their last size."""
        return len(self.sizes) - 1

    @property
    def cycle(self) -> int:
        """Number of windows after which a schedule repeats itself: one more than up to its first refresh, or to the second window of the
        last size if there is no refresh; 0: there is only one window."""
        return self.growing + (self._every if self.refresh else 1) + 1 if self.sizes else 0

    @property
    def _every(self) -> int:
        """Number of windows from one refresh to the next."""
        return -(-self.refresh // self.sizes[-1])

    def _is_fresh(self, number: int) -> bool:
        if number == 0 or not (self.sizes and self.refresh):
            return number == 0
        return (number - self.growing) % self._every == 0 and number > self.growing

    def _context(self, number: int) -> int:
        return self.context * self.block if number and self._is_fresh(number) else 0
