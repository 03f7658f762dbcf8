"""Decides which codes become sound together, and holds the codes of a speech while a window still needs them. Only a window's number
decides, never the time at which codes came. No torch.

A window is a chunk of whole blocks that becomes sound, and some codes after it which that sound depends on. The session keeps the state
that earlier blocks leave to a window. A replica that takes over has no such state, so it begins early enough to make the same bits:

- If each window depends on all windows before it, some windows are refreshed: they use no state, but compute some blocks of context before
their chunk once more, in the first run too. So sound from a refreshed window on depends on nothing before that context, and a replica
begins with such a window.

- If a window depends on a known number of blocks before it, nothing is computed twice in the first run. A replica begins without state,
this many blocks before the window whose sound is wanted, and gives no sound before that window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import BadRequest

ALL_CODES = 1 << 62
"""For `Schedule.window`: a number of codes that are enough for any window."""


@dataclass(frozen=True, slots=True)
class Window:
    """The window of the codes [begin - context, end + ahead_codes) of a speech, of which the chunk [begin, end) becomes sound. fresh:
    whether it needs no state of an earlier window. last: whether the speech ends with its chunk."""

    begin: int
    end: int
    context: int
    ahead_codes: int
    fresh: bool
    last: bool

    @property
    def first(self) -> int:
        """Number of the first code that the window sees."""
        return self.begin - self.context

    @property
    def past(self) -> int:
        """Number of the last code that the window sees, plus 1."""
        return self.end + self.ahead_codes


@dataclass(frozen=True, slots=True)
class Schedule:
    """Cuts a speech into windows. sizes: numbers of blocks of the first chunk, the second and so on; the last number is repeated; empty:
    the whole speech is one chunk. ahead_blocks: how many blocks after its chunk a window sees. block: number of codes in a block. context:
    number of blocks before its chunk on which the sound of a window depends; if windows are refreshed, of a refreshed window. refresh:
    least number of blocks from one refresh to the next, and so the largest number that a replica which takes over computes again; 0: no
    window is refreshed."""

    sizes: tuple[int, ...]
    ahead_blocks: int
    block: int
    context: int
    refresh: int

    def window(self, number: int, codes: int, *, has_ended: bool) -> Window | None:
        """The window of this number. codes: number of codes that have come. has_ended: no more codes come. None: codes of the window are
        still missing, or the speech ended before it."""
        begin, context, fresh = self.begin(number), self._context(number), self._is_fresh(number)
        if self.sizes:
            end = begin + self.sizes[min(number, self.growing)] * self.block
            if codes >= end + self.ahead_blocks * self.block:
                return Window(begin, end, context, self.ahead_blocks * self.block, fresh, False)
        if not has_ended or begin >= codes:
            return None
        # No codes follow after the speech, so all the rest is the last chunk.
        return Window(begin, codes, context, 0, fresh, True)

    def begin(self, number: int) -> int:
        """The first code of the chunk of the window of this number."""
        if not self.sizes:
            return 0
        growing = min(number, self.growing)
        return (sum(self.sizes[:growing]) + (number - growing) * self.sizes[-1]) * self.block

    def holding(self, code: int) -> int:
        """The number of the window whose chunk contains a code, if the speech is long enough."""
        if not self.sizes:
            return 0
        blocks = code // self.block
        for number in range(self.growing):
            if blocks < self.sizes[number]:
                return number
            blocks -= self.sizes[number]
        return self.growing + blocks // self.sizes[-1]

    def entry(self, code: int) -> int:
        """The number of the window with which a session without state begins if it needs sound from `code` on. The last chunk of a speech
        may be longer than planned, by less than the codes that its window would look ahead at, so `code` may belong to an earlier window
        than `holding` returns. That is unknown before the speech ends."""
        if not self.sizes:
            return 0
        number = self.holding(max(code - self.ahead_blocks * self.block, 0))
        if not self.refresh:
            return self.holding(max(self.begin(number) - self.context * self.block, 0))
        # Refreshed windows are `_every` windows apart, counted from the first window of the last size, whose number is `growing`.
        passed = number - self.growing
        return 0 if passed < self._every else number - passed % self._every

    def first_code(self, number: int) -> int:
        """The first code that a window needs, apart from the state of the window before it."""
        return self.begin(number) - self._context(number)

    @property
    def growing(self) -> int:
        """Number of windows before the first window with the last size, which is also the number of that window."""
        return len(self.sizes) - 1

    @property
    def cycle(self) -> int:
        """Number of windows after which a schedule repeats itself; 0 if there is only one window. With refreshes, it counts the windows up
        to and including the first refreshed one. Without refreshes, it counts them up to the second window of the last size."""
        if not self.sizes:
            return 0
        return self.growing + (self._every if self.refresh else 1) + 1

    @property
    def _every(self) -> int:
        """Number of windows from one refresh to the next."""
        return -(-self.refresh // self.sizes[-1])

    def _is_fresh(self, number: int) -> bool:
        """Whether a window needs no state: the first window, and each refreshed window."""
        if number == 0:
            return True
        if not (self.sizes and self.refresh):
            return False
        passed = number - self.growing
        return passed > 0 and passed % self._every == 0

    def _context(self, number: int) -> int:
        """Number of codes before its chunk that a window computes once more."""
        return self.context * self.block if number and self._is_fresh(number) else 0


class Codes:
    """Holds the frames of codes of a speech. first: number of the first frame that is needed; earlier frames may come and are dropped.
    width: number of codes in a frame. `_past`: see `end_frame`; None: no frame came."""

    def __init__(self, first: int, width: int) -> None:
        self._first = first
        self._frames = np.empty((0, width), np.int64)
        self._past: int | None = None

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def end_frame(self) -> int:
        """Number of the last frame that came, plus 1; 0: none came."""
        return self._past or 0

    @property
    def past(self) -> int:
        """Number of the last frame that is held, plus 1."""
        return self._first + len(self)

    def add(self, first: int, frames: NDArray[np.int64]) -> None:
        """Add the next frames, [n, width]. first: number of the first of these frames; only the first call uses it. Raises BadRequest if
        the first needed frame was skipped."""
        if not len(frames):
            return
        if self._past is None:
            if first > self._first:
                raise BadRequest("codes", f"code {self._first} and those behind it are needed; the first that came is number {first}")
            self._past = first
        needless = max(self._first - self._past, 0)
        self._past += len(frames)
        self._frames = np.concatenate((self._frames, frames[needless:]))

    def between(self, first: int, past: int) -> NDArray[np.int64]:
        """The held frames from number `first` up to, and without, number `past`."""
        return self._frames[first - self._first : past - self._first]

    def forget(self, place: int) -> None:
        """Drop the frames before number `place`."""
        self._frames = self._frames[place - self._first :]
        self._first = place
