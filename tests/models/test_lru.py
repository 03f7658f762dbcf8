"""The results that are kept are never more than is allowed, and are those that were used last."""

from __future__ import annotations

from functools import partial

import torch

from omnistage.models.memory import LruCache, TensorCache


def test_what_is_kept_longest_without_use_goes_first() -> None:
    kept = TensorCache(max_bytes=12)
    made = list[str]()

    def make(name: str, size: int = 1) -> torch.Tensor:
        made.append(name)
        return torch.full((size,), float(len(made)))

    for name in ("a", "b", "c", "a", "d", "a", "b"):
        kept.get(name, partial(make, name))
    assert made == ["a", "b", "c", "d", "b"], "a was used again, b and c were not"
    assert kept.get("large", partial(make, "large", 4)).nbytes == 16 and kept.bytes == 12, "what does not fit drives nothing out"


def test_a_value_that_is_kept_again_counts_once() -> None:
    kept = LruCache[torch.Tensor](max_bytes=12)
    for size in (1, 2, 1):
        kept.keep("a", torch.zeros(size))
    assert kept.bytes == 4 and kept.find("b") is None and kept.hits == 0
    kept.keep("b", torch.zeros(2))
    assert kept.find("a") is not None and kept.bytes == 12
    kept.keep("c", torch.zeros(1))
    assert [kept.find(name) is not None for name in "abc"] == [True, False, True] and kept.bytes == 8


def test_a_view_is_kept_without_what_it_is_a_part_of() -> None:
    whole = torch.zeros(100)
    kept, none = TensorCache(max_bytes=12), TensorCache(max_bytes=0)
    assert kept.get("row", lambda: whole[:2]).untyped_storage().nbytes() == 8
    assert none.get("row", lambda: whole[:2]).data_ptr() == whole.data_ptr(), "what is not kept is not copied"
