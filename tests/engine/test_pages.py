"""The holders of a page, and which page goes when another one is needed."""

from __future__ import annotations

import pytest

from omnistage.engine.memory import OutOfPages, PagePool, PrefixCache


def test_a_page_is_freed_exactly_once() -> None:
    pool = PagePool(3)
    pages = [pool.take(), pool.take()]
    assert pool.changes() == (pages, [])
    pool.share(pages[:1])
    pool.give_back(pages)
    assert pool.changes() == ([], pages[1:])
    pool.give_back(pages[:1])
    assert pool.changes() == ([], pages[:1])
    assert pool.free == 3
    with pytest.raises(ValueError, match="twice"):
        pool.give_back(pages[:1])
    with pytest.raises(ValueError, match="free"):
        pool.share(pages)
    again = pool.take()
    pool.give_back([again])
    assert pool.changes() == ([], [again])
    for _ in range(3):
        pool.take()
    with pytest.raises(OutOfPages):
        pool.take()


def test_pages_that_only_the_cache_holds_are_counted_and_go_first_however_many_others_hold() -> None:
    pool = PagePool(100)
    prefixes = PrefixCache(pool, 100)
    pages = [pool.take() for _ in range(100)]
    for page in pages:
        prefixes.remember(b"%d" % page, page, None)
    assert pool.only_kept == 0 and not prefixes.make_room()
    with pytest.raises(ValueError, match="kept already"):
        pool.keep(pages[0])
    for index in range(40, 60):
        pool.give_back(pages[index : index + 1])
        assert pool.only_kept == 1
        assert prefixes.make_room() and pool.free == index - 39 and pool.only_kept == 0
    assert len(prefixes) == 80 and not pool.is_kept(pages[40]) and pool.is_kept(pages[60])
    pool.give_back([*pages[:40], *pages[60:]])
    assert pool.only_kept == 80
    prefixes.shrink(80)
    assert (pool.only_kept, pool.free) == (0, 100)
