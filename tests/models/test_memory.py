"""Servers that start beside each other on one device take only memory that is there, in any order."""

from __future__ import annotations

import random

import pytest

from omnistage.models.memory import FILLED, free_bytes, part_of_cpu, part_of_gpu

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


def orders(rng: random.Random, servers: int) -> list[int]:
    order = 2 * list(range(servers))
    rng.shuffle(order)
    return order


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_no_order_of_starts_takes_more_than_there_is(servers: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        order = orders(rng, servers)
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
