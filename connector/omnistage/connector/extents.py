"""Free ranges of segments. Neighbours are joined, so memory that was cut into small blocks becomes whole again when they are free."""

from bisect import bisect_left, insort


class Extents:
    """The free ranges of all segments. A range is found by its size in O(log n) and by its start or end in O(1). All are in bytes."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # size, segment, start
        self._end_of: dict[tuple[int, int], int] = {}  # by segment and start
        self._start_of: dict[tuple[int, int], int] = {}  # by segment and end

    def add(self, segment: int, start: int, end: int) -> tuple[int, int]:
        """Add a free range, which overlaps none that is here, and join it with its neighbours. Return start and end of the joined range."""
        before = self._start_of.get((segment, start))
        if before is not None:
            self.remove(segment, before)
            start = before
        after = self._end_of.get((segment, end))
        if after is not None:
            self.remove(segment, end)
            end = after
        self._end_of[segment, start] = end
        self._start_of[segment, end] = start
        insort(self._by_size, (end - start, segment, start))
        return start, end

    def take(self, size: int) -> tuple[int, int] | None:
        """Take `size` bytes from the smallest range that has them. Return their segment and start; None if there is no such range."""
        place = bisect_left(self._by_size, (size, 0, 0))
        if place == len(self._by_size):
            return None
        _, segment, start = self._by_size[place]
        end = self.remove(segment, start)
        if end - start > size:
            self.add(segment, start + size, end)
        return segment, start

    def remove(self, segment: int, start: int) -> int:
        """Remove the range that begins at `start`. Return its end."""
        end = self._end_of.pop((segment, start))
        del self._start_of[segment, end]
        del self._by_size[bisect_left(self._by_size, (end - start, segment, start))]
        return end

    def forget(self, segment: int) -> None:
        """Remove all ranges of a segment."""
        for owner, start in [key for key in self._end_of if key[0] == segment]:
            self.remove(owner, start)
