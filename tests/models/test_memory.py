"""The memory and the cores that a process takes: servers that start beside each other on one device take only memory that is there, in any
order; what is kept is never more than is allowed, and was used last."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from omnistage.models.devices import cores
from omnistage.models.memory import FILLED, LruCache, TensorCache, free_bytes, part_of_cpu, part_of_gpu
from omnistage.models.reports import bytes_told

GIB = 1 << 30
TOTAL = 80 * GIB
WEIGHTS = 7 * GIB


def taken(order: list[int], device: str, share: float) -> dict[int, int]:
    """The memory that each server takes. order: a server comes first when its weights are loaded, and again when it measures and takes."""
    free, loaded, found = TOTAL, set[int](), dict[int, int]()
    for server in order:
        if server not in loaded:
            loaded.add(server)
            free -= WEIGHTS
        else:
            part = part_of_gpu(free, TOTAL, WEIGHTS, FILLED, share) if device == "cuda" else part_of_cpu(free, WEIGHTS, share)
            found[server] = part
            free -= part
    return found


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_no_order_of_starts_takes_more_than_there_is(servers: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        order = rng.sample([*range(servers)] * 2, 2 * servers)
        on_gpu, on_cpu = (taken(order, device, 1 / servers) for device in ("cuda", "cpu"))
        assert sum(on_gpu.values()) + servers * WEIGHTS <= FILLED * TOTAL
        assert len({part // 1024 for part in on_gpu.values()}) == 1, "equal servers have equal parts of a GPU"
        assert on_gpu[0] + WEIGHTS >= FILLED * TOTAL / servers - 1
        assert sum(on_cpu.values()) + servers * WEIGHTS <= TOTAL
        assert min(on_cpu.values()) >= 0


def test_without_a_share_two_would_both_take_all() -> None:
    first, second = taken([0, 1, 0, 1], "cuda", 1.0).values()
    assert first + 2 * WEIGHTS > 0.8 * TOTAL and second < GIB


def test_a_gpu_that_others_use_has_what_is_left() -> None:
    free = 20 * GIB
    assert part_of_gpu(free, TOTAL, WEIGHTS, 0.9, 0.5) == int(free - (1 - 0.9) * TOTAL)
    assert part_of_gpu(4 * GIB, TOTAL, WEIGHTS, 0.9, 0.5) == 0


def test_a_share_of_this_machine_is_a_part_of_what_is_free() -> None:
    whole, half = free_bytes("cpu"), free_bytes("cpu", share=0.5)
    assert 0.25 * whole < half < 0.75 * whole


@pytest.mark.parametrize(
    ("size", "told"),
    [
        *((0, "0 B"), (5, "5 B"), (1023, "1023 B"), (2048, "2 KiB"), ((1 << 20) - 1, "1024 KiB"), (3 << 20, "3 MiB")),
        *((12_340_000, "11.77 MiB"), (3 << 29, "1.5 GiB"), (1 << 60, "1073741824 GiB")),
    ],
)
def test_bytes_are_told_with_their_unit(size: int, told: str) -> None:
    assert bytes_told(size) == told


# Caches ------------------------------------------------------------------------------------------------------------------------------


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


# Cores -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "least"), [("max 100000", 1 << 20), ("150000 100000", 1), ("50000 100000", 1), ("200000 100000", 2), ("9900000 100000", 99)]
)
def test_a_container_may_have_fewer(tmp_path: Path, quota: str, least: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert cores(tmp_path / "cpu.max") == min(least, len(os.sched_getaffinity(0)))


def test_without_containers_it_is_what_the_process_may_run_on(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, allowed)
