"""No stream takes the whole arena: beyond the stream's share its tensors go inline, and those of others go through shared memory."""

from collections.abc import Callable

import numpy as np

from helpers.pipes import settled
from omnistage.connector.arena import Arena, Share, class_bytes
from omnistage.connector.transport import Receiver, Sender

MIB = 1 << 20
SIZE = 200_000


def connect(arena: Arena, share: Share | None = None) -> tuple[Sender, Receiver]:
    sender, receiver = Sender(arena, inline_limit=0, share=share), Receiver()
    sender.accept(receiver.answer(sender.offers()))
    return sender, receiver


def test_a_reader_that_gives_nothing_back_has_its_share_and_no_more(make_arena: Callable[..., Arena], random: np.random.Generator) -> None:
    arena = make_arena(max_bytes=8 * MIB, segment_bytes=MIB)
    slow, views = connect(arena), []
    for _ in range(60):
        array = random.integers(0, 256, SIZE, np.uint8)
        view = [slow[1].unpack(message) for message in slow[0].pack(array)][-1]
        assert view is not None
        views.append((view, array))
    fits = 2 * MIB // class_bytes(SIZE)
    assert slow[0].outstanding == fits
    assert (slow[0].over_share, slow[0].inline_fallbacks) == (60 - fits, 0)
    assert arena.bytes_used == slow[0].share.used <= arena.max_bytes // 4
    assert all(np.array_equal(view.array, array) for view, array in views)
    for _ in range(3):
        other = connect(arena)
        assert other[0].pack(np.zeros(SIZE, np.uint8))[0].WhichOneof("place") == "shared_memory"
        assert other[0].over_share == 0


def test_a_stream_goes_on_through_shared_memory_when_its_reader_does(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=8 * MIB, segment_bytes=MIB)
    sender, receiver = connect(arena)
    array = np.zeros(MIB, np.uint8)
    for _ in range(10):
        views = [receiver.unpack(message) for _ in range(2) for message in sender.pack(array)]
        assert sender.over_share == 0
        del views
        release = receiver.take_release()
        assert release is not None
        sender.release(release)
        assert sender.share.used == 0


def test_one_tensor_always_fits_however_large_it_is(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=8 * MIB, segment_bytes=MIB)
    sender, _ = connect(arena)
    array = np.zeros(5 * MIB, np.uint8)
    assert sender.pack(array)[0].WhichOneof("place") == "shared_memory"
    assert sender.pack(array[:10])[0].WhichOneof("place") == "inline"
    assert (sender.outstanding, sender.over_share) == (1, 1)


def test_a_log_counts_as_long_as_it_keeps_a_tensor_on_whatever_stream_it_goes(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=8 * MIB, segment_bytes=MIB)
    old, _ = connect(arena)
    log = [old.store(np.zeros(SIZE, np.uint8)) for _ in range(20)]
    kept = sum(parcel.block is not None for parcel in log)
    assert kept == 2 * MIB // class_bytes(SIZE)
    old.close(clean=True)
    assert settled(arena).leases == kept
    new, _ = connect(arena, old.share)
    for parcel in log:
        new.post(parcel)
    assert new.store(np.zeros(SIZE, np.uint8)).block is None
    log[0].drop()
    assert new.store(np.zeros(SIZE, np.uint8)).block is None, "its reader has it"
    new.close(clean=True)
    assert old.share.used == (kept - 1) * class_bytes(SIZE)


def test_a_quarantine_counts(make_arena: Callable[..., Arena]) -> None:
    now = 0.0
    arena = make_arena(max_bytes=8 * MIB, segment_bytes=MIB, clock=lambda: now)
    broken, _ = connect(arena)
    broken.pack(np.zeros(2 * MIB, np.uint8))
    broken.close(clean=False)
    again, _ = connect(arena, broken.share)
    assert again.store(np.zeros(SIZE, np.uint8)).block is None
    now = 30.0
    assert settled(arena).leases == 0
    assert again.store(np.zeros(SIZE, np.uint8)).block is not None
