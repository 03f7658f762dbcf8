"""Thousands of tensors pass through one arena and leave nothing: no memory, no files, no descriptors."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from helpers import lengths
from helpers.pipes import SHARED_MEMORY, names, settled
from helpers.processes import open_files
from omnistage.connector.arena import Arena
from omnistage.connector.shm import READERS
from omnistage.connector.transport import Parcel

MIB = 1 << 20
PER_STREAM = 500
SIZES = (10, 3000, 8000, 8000, 20_000, 70_000)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mounted_bytes(arena: Arena) -> int:
    return sum((SHARED_MEMORY / name).stat().st_blocks * 512 for name in names(arena.uuid))


def use_streams(make_pair, arena: Arena, count: int) -> None:
    """Use `count` streams. Each one sends, logs, replays some of its log on a second stream, and ends in one way or another."""
    arrays = [np.zeros(size, np.uint8) for size in SIZES]
    for stream in range(count):
        pair, second = make_pair(arena=arena), make_pair(arena=arena)
        log: list[Parcel] = []
        for turn in range(PER_STREAM):
            parcel = pair.sender.store(arrays[turn % len(arrays)])
            (message,) = pair.sender.post(parcel)
            pair.receiver.unpack(message)
            pair.sender.release(pair.receiver.take_release())
            log.append(parcel)
            if len(log) == 8:
                second.sender.post(log[0])
                for kept in log:
                    kept.drop()
                log.clear()
        for kept in log:
            kept.drop()
        pair.sender.close(clean=stream % 3 > 0)
        second.sender.close(clean=stream % 5 > 0)
        pair.receiver.close()
        second.receiver.close()


@lengths.rounds(20, 180)
def test_transfers_leave_memory_files_and_descriptors_as_they_were(make_arena: Callable[..., Arena], make_pair, rounds: int) -> None:
    arena = make_arena(max_bytes=64 * MIB, segment_bytes=4 * MIB, grace_s=0.0)
    use_streams(make_pair, arena, 20)
    gc.collect()
    resident, mounted, files = resident_bytes(), mounted_bytes(arena), open_files()
    mapped = len(READERS)
    use_streams(make_pair, arena, rounds)
    gc.collect()
    assert settled(arena).leases == arena.bytes_used == 0
    assert mounted_bytes(arena) == mounted
    assert (len(READERS), open_files() - files) == (mapped, set())
    assert resident_bytes() - resident < 8 * MIB
