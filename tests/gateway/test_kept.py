"""Values that are kept for a while."""

from __future__ import annotations

from omnistage.gateway.kept import ExpiringCache


def test_it_is_found_by_its_name_alone() -> None:
    kept: ExpiringCache[str] = ExpiringCache(100)
    names = {kept.put("host", "picture", 10)[0] for _ in range(5)}
    assert len(names) == 5 and all(kept.get(name) == "picture" for name in names)
    assert kept.get("picture") is None


def test_the_oldest_make_way() -> None:
    kept: ExpiringCache[int] = ExpiringCache(100)
    names = [kept.put("host", number, 40)[0] for number in range(4)]
    assert [kept.get(name) for name in names] == [None, None, 2, 3]


def test_nobody_makes_what_is_kept_for_others_go() -> None:
    kept: ExpiringCache[int] = ExpiringCache(100)
    honest, _ = kept.put("honest", 1, 30)
    names = [kept.put("greedy", number, 20)[0] for number in range(8)]
    assert kept.get(honest) == 1 and [kept.get(name) for name in names] == [None] * 5 + [5, 6, 7]


def test_what_is_larger_than_all_is_not_kept() -> None:
    kept: ExpiringCache[str] = ExpiringCache(100)
    name, _ = kept.put("host", "film", 101)
    assert kept.get(name) is None
    small, _ = kept.put("host", "picture", 100)
    assert kept.get(small) == "picture"


def test_its_time_ends() -> None:
    kept: ExpiringCache[str] = ExpiringCache(100, kept_s=0)
    name, _ = kept.put("host", "picture", 100)
    assert kept.get(name) is None
    kept.put("host", "another", 100)
