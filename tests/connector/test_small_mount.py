"""A mount that is too small or full: tensors go inline, and no signal kills the process. The tests run in a mount namespace of their
own."""

import pytest

from helpers.mounts import run_on_mount

PREAMBLE = """
    import os
    import signal
    import time
    import numpy as np
    from helpers.mounts import BALLAST, leave_free
    from omnistage.connector.arena import Arena, Share
    from omnistage.connector.shm import READERS
    from omnistage.connector.transport import Receiver, Sender
    from omnistage.v1 import tensor_pb2
    MIB = 1 << 20

    def connect(arena):
        sender, receiver = Sender(arena, inline_limit=0, share=Share(1 << 30)), Receiver()
        sender.accept(receiver.answer(sender.offers()))
        return sender, receiver

    def send(sender, receiver, array):
        views = [receiver.unpack(tensor) for tensor in sender.pack(array)]
        assert np.array_equal(views[-1].array, array)
        return views[-1]
"""

FILLS_UP_WHILE_RUNNING = """
    now = 0.0
    arena = Arena.create(max_bytes=8 * MIB, segment_bytes=4 * MIB, clock=lambda: now)
    sender, receiver = connect(arena)
    assert sender.reason == "", sender.reason
    leave_free(2 * MIB)
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 256, 700_000, np.uint8) for _ in range(12)]
    views = [send(sender, receiver, array) for array in arrays]
    assert 0 < sender.outstanding < 5, sender.outstanding
    assert sender.inline_fallbacks == 12 - sender.outstanding
    for view, array in zip(views, arrays):
        assert np.array_equal(view.array, array)
    BALLAST.unlink()
    before = sender.outstanding
    now = 0.5
    views.append(send(sender, receiver, arrays[0]))
    assert sender.outstanding == before
    now = 2.0
    views.append(send(sender, receiver, arrays[0]))
    assert sender.outstanding == before + 1
    arena.close()
    assert os.listdir("/dev/shm") == []
"""

FULL_WHEN_A_SEGMENT_IS_MADE = """
    arena = Arena.create(max_bytes=8 * MIB, segment_bytes=4 * MIB)
    leave_free(0)
    sender, receiver = connect(arena)
    assert "full" in sender.reason or "no block" in sender.reason, sender.reason
    send(sender, receiver, np.arange(1000, dtype=np.int64))
    assert sender.outstanding == arena.leases == 0
    arena.close()
    assert os.listdir("/dev/shm") == [BALLAST.name]
"""

A_LARGE_TENSOR_DOES_NOT_FIT = """
    arena = Arena.create(max_bytes=60 * MIB, segment_bytes=MIB)
    leave_free(23 * MIB)
    sender, receiver = connect(arena)
    large = send(sender, receiver, np.arange(4 * MIB, dtype=np.int64))
    assert sender.inline_fallbacks == 1
    small = send(sender, receiver, np.arange(MIB // 8, dtype=np.int64))
    assert sender.outstanding == 1
    arena.close()
"""

BELOW_TWO_SEGMENTS = """
    arena = Arena.create()
    assert arena is None
    sender, receiver = connect(arena)
    send(sender, receiver, np.arange(1000, dtype=np.int64))
"""

GETS_ROOM_WHEN_ITS_OWNER_IS_DEAD = """
    def fill(pipe):
        arena = Arena.create(max_bytes=12 * MIB, segment_bytes=4 * MIB)
        assert arena is not None
        for _ in range(9):
            arena.allocate(900_000)
        os.write(pipe, b"x")
        time.sleep(60)

    now = 0.0
    arena = Arena.create(max_bytes=8 * MIB, segment_bytes=4 * MIB, clock=lambda: now)
    sender, receiver = connect(arena)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        fill(theirs)
    assert os.read(ours, 1) == b"x"
    leave_free(0)

    def send_one():
        send(sender, receiver, np.arange(400_000, dtype=np.int32))
        return sender.outstanding

    assert send_one() == 0, "there was room"
    for name in os.listdir("/dev/shm"):
        os.utime(f"/dev/shm/{name}", (1, 1))
    now = 20.0
    assert send_one() == 0, "the filler is alive"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    now = 25.0
    assert send_one() == 0, "one sweep in ten seconds is enough"
    now = 40.0
    assert send_one() == 1
    arena.close()
    assert os.listdir("/dev/shm") == [BALLAST.name]
"""
"""The files of a killed process are removed at the first refusal; then the tensor goes through shared memory after all."""

MAPPED_BY_AN_IDLE_READER = """
    import asyncio
    from omnistage.stage.server import tidy

    def used():
        mount = os.statvfs("/dev/shm")
        return (mount.f_blocks - mount.f_bfree) * mount.f_frsize

    ours, theirs = os.pipe()
    back, forth = os.pipe()
    child = os.fork()
    if child == 0:
        arena = Arena.create(max_bytes=16 * MIB, segment_bytes=4 * MIB)
        sender = Sender(arena, inline_limit=0)
        os.write(theirs, sender.offers()[0].SerializeToString())
        sender.accept(tensor_pb2.Answer.FromString(os.read(back, 4096)))
        assert sender.reason == "", sender.reason
        os.write(theirs, sender.pack(np.ones(3 * MIB, np.uint8))[0].SerializeToString())
        time.sleep(60)

    receiver = Receiver()
    os.write(forth, receiver.answer([tensor_pb2.Offer.FromString(os.read(ours, 4096))]).SerializeToString())
    view = receiver.unpack(tensor_pb2.Tensor.FromString(os.read(ours, 4096)))
    assert view.array.sum() == 3 * MIB
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for name in os.listdir("/dev/shm"):
        os.utime(f"/dev/shm/{name}", (1, 1))
    asyncio.run(tidy(None))
    assert os.listdir("/dev/shm") == []
    assert used() >= 3 * MIB and view.array.sum() == 3 * MIB, "a view is in use"
    view.release()
    del view
    asyncio.run(tidy(None))
    assert used() < MIB and len(READERS) == 0, used()
"""
"""The sweep removes the files of a killed producer, but a mapping of them holds the memory; the tidying of a stage drops the mapping. A
view in use keeps it."""

STORIES = {
    "a mount that fills up while running ends inline": ("8m", FILLS_UP_WHILE_RUNNING),
    "a mount that is full when a segment is made ends inline": ("8m", FULL_WHEN_A_SEGMENT_IS_MADE),
    "a large tensor that does not fit goes inline": ("64m", A_LARGE_TENSOR_DOES_NOT_FIT),
    "a mount below two segments is inline only": ("64m", BELOW_TWO_SEGMENTS),
    "a full mount gets room when its owner is dead": ("16m", GETS_ROOM_WHEN_ITS_OWNER_IS_DEAD),
    "memory of a killed producer that an idle reader has mapped is given back": ("64m", MAPPED_BY_AN_IDLE_READER),
}


@pytest.mark.parametrize(("size", "story"), STORIES.values(), ids=STORIES)
def test_a_small_mount(size: str, story: str) -> None:
    run_on_mount(size, PREAMBLE, story)
