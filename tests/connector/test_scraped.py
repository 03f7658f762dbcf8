"""Another thread reads the figures of an arena, as a scrape of the metrics does, while the arena's own thread works."""

from __future__ import annotations

import threading
from collections.abc import Callable

from omnistage.connector.arena import Arena


def test_reading_the_figures_changes_nothing(make_arena: Callable[..., Arena]) -> None:
    now = 0.0
    arena = make_arena(clock=lambda: now, grace_s=30.0)
    arena.quarantine(arena.allocate(10))
    now = 31.0
    assert arena.leases == 1 and arena.bytes_used > 0, "who only looks ends no grace"
    arena.settle()
    assert arena.leases == arena.bytes_used == 0


def test_a_thread_that_reads_the_figures_does_not_disturb_the_arena(make_arena: Callable[..., Arena]) -> None:
    """Every block is in quarantine, with a grace that ends at once: the reading thread must not take a block that the owner is about to
    free."""
    arena = make_arena(grace_s=0.0)
    over = threading.Event()
    seen: list[int] = []
    errors: list[BaseException] = []

    def scrape() -> None:
        try:
            while not over.is_set():
                seen.append(arena.leases + arena.bytes_used)
        except BaseException as error:
            errors.append(error)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        for _ in range(3000):
            for block in [arena.allocate(100) for _ in range(5)]:
                arena.quarantine(block)
            arena.settle()
    finally:
        over.set()
        scraper.join()
    assert errors == [] and seen
    assert arena.leases == arena.bytes_used == 0
