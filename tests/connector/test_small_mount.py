"""A mount that is too small or full: tensors go inline, and no signal kills the process. The tests run in a mount namespace of their
own."""

from helpers.mounts import run_on_mount

PREAMBLE = """
    import os
    import numpy as np
    from omnistage.connector.arena import Arena, Share
    from omnistage.connector.transport import Receiver, Sender
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


def run_on_small_mount(size: str, script: str) -> str:
    return run_on_mount(size, PREAMBLE, script)


def test_a_mount_that_fills_up_while_running_ends_inline() -> None:
    script = """
        now = 0.0
        arena = Arena.create(max_bytes=8 * MIB, segment_bytes=4 * MIB, clock=lambda: now)
        sender, receiver = connect(arena)
        assert sender.reason == "", sender.reason
        with open("/dev/shm/ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, 5 * MIB)
        random = np.random.default_rng(0)
        arrays = [random.integers(0, 256, 700_000, np.uint8) for _ in range(12)]
        views = [send(sender, receiver, array) for array in arrays]
        assert 0 < sender.outstanding < 5, sender.outstanding
        assert sender.inline_fallbacks == 12 - sender.outstanding
        for view, array in zip(views, arrays):
            assert np.array_equal(view.array, array)
        os.unlink("/dev/shm/ballast")
        before = sender.outstanding
        now = 0.5
        views.append(send(sender, receiver, arrays[0]))
        assert sender.outstanding == before
        now = 2.0
        views.append(send(sender, receiver, arrays[0]))
        assert sender.outstanding == before + 1
        arena.close()
        print(os.listdir("/dev/shm"))
    """
    assert run_on_small_mount("8m", script).strip() == "[]"


def test_a_mount_that_is_full_when_a_segment_is_made_ends_inline() -> None:
    script = """
        arena = Arena.create(max_bytes=8 * MIB, segment_bytes=4 * MIB)
        with open("/dev/shm/ballast", "wb") as ballast:
            free = os.statvfs("/dev/shm")
            os.posix_fallocate(ballast.fileno(), 0, free.f_bavail * free.f_frsize)
        sender, receiver = connect(arena)
        assert "full" in sender.reason or "no block" in sender.reason, sender.reason
        send(sender, receiver, np.arange(1000, dtype=np.int64))
        assert sender.outstanding == arena.leases == 0
        arena.close()
        print(os.listdir("/dev/shm"))
    """
    assert run_on_small_mount("8m", script).strip() == "['ballast']"


def test_a_large_tensor_that_does_not_fit_goes_inline() -> None:
    script = """
        arena = Arena.create(max_bytes=60 * MIB, segment_bytes=MIB)
        with open("/dev/shm/ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, 40 * MIB)
        sender, receiver = connect(arena)
        view = send(sender, receiver, np.arange(4 * MIB, dtype=np.int64))
        assert sender.inline_fallbacks == 1
        small = send(sender, receiver, np.arange(MIB // 8, dtype=np.int64))
        assert sender.outstanding == 1
        arena.close()
    """
    run_on_small_mount("64m", script)


def test_a_mount_below_two_segments_is_inline_only_and_says_so_once() -> None:
    script = """
        import logging
        logging.basicConfig(format="%(message)s")
        arena = Arena.create()
        assert arena is None
        sender, receiver = connect(arena)
        send(sender, receiver, np.arange(1000, dtype=np.int64))
        import sys
        sys.stderr.flush()
    """
    run_on_small_mount("64m", script)


def test_a_full_mount_gets_room_when_its_owner_is_dead() -> None:
    """The files of a killed process are removed at the first refusal; then the tensor goes through shared memory after all."""
    script = """
        import signal
        import time

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
        with open("/dev/shm/ballast", "wb") as ballast:
            free = os.statvfs("/dev/shm")
            os.posix_fallocate(ballast.fileno(), 0, free.f_bavail * free.f_frsize)

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
        print(os.listdir("/dev/shm"))
    """
    assert run_on_small_mount("16m", script).strip() == "['ballast']"


def test_memory_of_a_killed_producer_that_an_idle_reader_has_mapped_is_given_back() -> None:
    """The sweep removes the files, but a mapping of them holds the memory; the tidying of a stage drops the mapping. A view in use keeps
    it."""
    script = """
        import asyncio
        import signal
        import time
        from omnistage.connector.shm import READERS
        from omnistage.stage.server import tidy
        from omnistage.v1 import tensor_pb2

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
    run_on_small_mount("64m", script)
