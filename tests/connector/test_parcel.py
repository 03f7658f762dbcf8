"""A tensor that a log keeps and several streams read is free when the last of them is done with it, in any order and way. No stream takes
the whole arena: beyond its share its tensors go inline, and those of others go through shared memory."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.pipes import settled
from omnistage.connector.arena import Arena, class_bytes
from omnistage.connector.tensors import ConnectorError, StaleReference
from omnistage.connector.transport import Parcel, Receiver, Sender, TensorView
from omnistage.v1 import tensor_pb2

GRACE_S = 30.0
SIZE = 50_000
WAYS = ("release", "clean", "broken")


def copy_of(messages: list[tensor_pb2.Tensor]) -> tensor_pb2.Tensor:
    (message,) = messages
    return tensor_pb2.Tensor.FromString(message.SerializeToString())


def give_back(pair, view: TensorView) -> None:
    view.release()
    assert pair.give_back() == 1


@pytest.mark.parametrize("ways", list(itertools.product(WAYS, WAYS)), ids="-".join)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_block_is_free_only_when_both_streams_and_the_log_are_done(
    arena: Arena, clock, make_pair, order: tuple[int, ...], ways: tuple[str, str]
) -> None:
    pairs = [make_pair(arena=arena), make_pair(arena=arena)]
    parcel = pairs[0].sender.store(np.full(SIZE, 7, np.uint8))
    views = [pair.receiver.unpack(copy_of(pair.sender.post(parcel))) for pair in pairs]
    witness = np.frombuffer(parcel.block.segment.map, np.uint8, SIZE, parcel.block.payload_offset).view()
    broken = False
    for done, who in enumerate(order):
        assert settled(arena).leases == 1
        assert (witness == 7).all()
        if who == 2:
            parcel.drop()
            parcel.drop()
        elif ways[who] == "release":
            give_back(pairs[who], views[who])
        else:
            pairs[who].sender.close(clean=ways[who] == "clean")
            broken = broken or ways[who] == "broken"
        assert settled(arena).leases == (1 if done < 2 or broken else 0)
    if broken:
        clock.now = GRACE_S - 0.1
        assert settled(arena).leases == 1 and (witness == 7).all()
        clock.now = GRACE_S
        assert settled(arena).leases == 0
    assert (witness == 0xFF).all()
    assert arena.bytes_used == pairs[0].sender.share.used == 0
    del witness
    pairs[0].sender.close(clean=True)
    pairs[1].sender.close(clean=False)
    assert settled(arena).leases == 0


@pytest.mark.parametrize(
    ("posted_s", "back_s"), [(0.0, 0.0), (0.0, GRACE_S), (GRACE_S, GRACE_S)], ids=["in the grace", "until after it", "after it"]
)
def test_a_log_replays_on_a_new_stream(arena: Arena, clock, make_pair, posted_s: float, back_s: float) -> None:
    """The grace of the broken stream ends no view of the new one. A drop leaves the reader its bytes."""
    old, new = make_pair(arena=arena), make_pair(arena=arena)
    parcel = old.sender.store(np.full(SIZE, 7, np.uint8))
    first = copy_of(old.sender.post(parcel))
    old.sender.close(clean=False)
    clock.now = posted_s
    assert settled(arena).leases == 1
    again = copy_of(new.sender.post(parcel))
    assert again == first, "no second copy"
    parcel.drop()
    view = new.receiver.unpack(again)
    clock.now = back_s
    assert settled(arena).leases == 1 and (view.array == 7).all()
    give_back(new, view)
    with pytest.raises(StaleReference):
        old.receiver.unpack(first)
    assert settled(arena).leases == (back_s < GRACE_S)
    clock.now = GRACE_S
    assert settled(arena).leases == 0


@pytest.mark.parametrize("size", [1, SIZE, 3 << 20])
def test_a_parcel_in_shared_memory_goes_inline_on_a_stream_that_is_inline(make_pair, size: int) -> None:
    pair = make_pair()
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    parcel = pair.sender.store(array)
    assert parcel.block is not None and parcel.size == size
    sender, receiver = Sender(None), Receiver()
    messages = sender.post(parcel)
    assert {message.WhichOneof("place") for message in messages} == {"inline"}
    views = [receiver.unpack(message) for message in messages]
    assert views[-1] is not None
    parcel.drop()
    assert np.array_equal(views[-1].array, array)
    assert pair.arena.leases == 0


def test_an_inline_parcel_goes_inline_everywhere(make_pair) -> None:
    pair = make_pair()
    array = np.arange(100_000, dtype=np.int32)
    parcel = Sender(None).store(array)
    view = [pair.receiver.unpack(message) for message in pair.sender.post(parcel)][-1]
    assert np.array_equal(view.array, array)
    assert pair.sender.outstanding == pair.arena.leases == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_dropped_parcel_cannot_be_posted(make_pair, shared: bool) -> None:
    pair = make_pair()
    parcel = (pair.sender if shared else Sender(None)).store(np.zeros(SIZE, np.uint8))
    parcel.drop()
    for sender in (pair.sender, Sender(None)):
        with pytest.raises(ConnectorError, match="dropped"):
            sender.post(parcel)
    assert pair.arena.leases == pair.sender.outstanding == 0


def test_a_tensor_is_posted_on_a_stream_again_only_when_its_reader_has_given_it_back(make_pair) -> None:
    pair = make_pair()
    parcel = pair.sender.store(np.full(SIZE, 7, np.uint8))
    view = pair.receiver.unpack(copy_of(pair.sender.post(parcel)))
    with pytest.raises(ConnectorError, match="posted on this stream before"):
        pair.sender.post(parcel)
    give_back(pair, view)
    view = pair.receiver.unpack(copy_of(pair.sender.post(parcel)))
    assert (view.array == 7).all()
    parcel.drop()
    give_back(pair, view)
    assert pair.arena.leases == 0


def test_a_block_that_is_free_cannot_be_held(arena: Arena) -> None:
    block = arena.allocate(100)
    arena.free(block)
    with pytest.raises(ConnectorError, match="free block"):
        arena.hold(block)


# Shares -------------------------------------------------------------------------------------------------------------------------------

MIB = 1 << 20
LARGE = 200_000


@pytest.fixture
def small_arena(make_arena: Callable[..., Arena], clock) -> Arena:
    """A stream may take 2 MiB of it."""
    return make_arena(max_bytes=8 * MIB, segment_bytes=MIB, clock=clock)


def fits(parcel: Parcel) -> bool:
    return parcel.block is not None


def test_a_reader_that_gives_nothing_back_has_its_share_and_no_more(small_arena: Arena, make_pair, random: np.random.Generator) -> None:
    slow, arrays = make_pair(arena=small_arena), [random.integers(0, 256, LARGE, np.uint8) for _ in range(60)]
    views = [slow.transfer(array) for array in arrays]
    room = 2 * MIB // class_bytes(LARGE)
    assert (slow.sender.outstanding, slow.sender.over_share, slow.sender.inline_fallbacks) == (room, 60 - room, 0)
    assert small_arena.bytes_used == slow.sender.share.used <= small_arena.max_bytes // 4
    assert all(np.array_equal(view.array, array) for view, array in zip(views, arrays, strict=True))
    for _ in range(3):
        other = make_pair(arena=small_arena)
        assert fits(other.sender.store(np.zeros(LARGE, np.uint8))) and other.sender.over_share == 0


def test_a_stream_goes_on_through_shared_memory_when_its_reader_does(small_arena: Arena, make_pair) -> None:
    pair = make_pair(arena=small_arena)
    for _ in range(10):
        views = [pair.transfer(np.zeros(MIB, np.uint8)) for _ in range(2)]
        assert pair.sender.over_share == 0
        del views
        assert pair.give_back() == 2 and pair.sender.share.used == 0


def test_one_tensor_always_fits_however_large_it_is(small_arena: Arena, make_pair) -> None:
    sender = make_pair(arena=small_arena).sender
    array = np.zeros(5 * MIB, np.uint8)
    assert [sender.pack(each)[0].WhichOneof("place") for each in (array, array[:10])] == ["shared_memory", "inline"]
    assert (sender.outstanding, sender.over_share) == (1, 1)


def test_a_log_counts_as_long_as_it_keeps_a_tensor_on_whatever_stream_it_goes(small_arena: Arena, make_pair) -> None:
    old = make_pair(arena=small_arena).sender
    log = [old.store(np.zeros(LARGE, np.uint8)) for _ in range(20)]
    room = 2 * MIB // class_bytes(LARGE)
    assert sum(map(fits, log)) == room
    old.close(clean=True)
    assert settled(small_arena).leases == room
    new = make_pair(arena=small_arena, share=old.share).sender
    for parcel in log:
        new.post(parcel)
    assert not fits(new.store(np.zeros(LARGE, np.uint8)))
    log[0].drop()
    assert not fits(new.store(np.zeros(LARGE, np.uint8))), "its reader has it"
    new.close(clean=True)
    assert old.share.used == (room - 1) * class_bytes(LARGE)


def test_a_quarantine_counts(small_arena: Arena, clock, make_pair) -> None:
    broken = make_pair(arena=small_arena).sender
    broken.pack(np.zeros(2 * MIB, np.uint8))
    broken.close(clean=False)
    again = make_pair(arena=small_arena, share=broken.share).sender
    assert not fits(again.store(np.zeros(LARGE, np.uint8)))
    clock.now = GRACE_S
    assert settled(small_arena).leases == 0
    assert fits(again.store(np.zeros(LARGE, np.uint8)))


# Any story of three logs and four streams ----------------------------------------------------------------------------------------------


@dataclass
class HoldersOfBlocks:
    """The holders of each block, written down without the connector: the log of a parcel, streams that have not given it back, and ends of
    graces."""

    logged: set[int] = field(default_factory=set)
    posted: set[tuple[int, int]] = field(default_factory=set)
    doomed: list[tuple[float, int]] = field(default_factory=list)

    def leases(self, now: float) -> int:
        self.doomed = [(end, parcel) for end, parcel in self.doomed if end > now]
        return len(self.logged | {parcel for _, parcel in self.posted} | {parcel for _, parcel in self.doomed})


steps = st.tuples(st.sampled_from(["store", "post", "post", "release", "close", "break", "drop", "wait"]), st.integers(0, 3))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(story=st.lists(steps, max_size=60), pick=st.randoms(use_true_random=False))
def test_any_story_ends_with_every_block_free(make_arena: Callable[..., Arena], make_pair, story, pick) -> None:
    clock = [0.0]
    arena = make_arena(poison=True, clock=lambda: clock[0], grace_s=GRACE_S)
    pairs = [make_pair(arena=arena) for _ in range(4)]
    parcels: list[Parcel] = []
    views: dict[tuple[int, int], TensorView] = {}
    model = HoldersOfBlocks()
    for step, number in story:
        if step == "store":
            model.logged.add(len(parcels))
            parcels.append(pairs[number].sender.store(np.full(SIZE, len(parcels), np.uint8)))
        elif step == "post":
            open_to = sorted(parcel for parcel in model.logged if (number, parcel) not in model.posted)
            if open_to:
                key = (number, pick.choice(open_to))
                views[key] = pairs[number].receiver.unpack(copy_of(pairs[number].sender.post(parcels[key[1]])))
                model.posted.add(key)
        elif step == "release" and model.posted:
            key = pick.choice(sorted(model.posted))
            give_back(pairs[key[0]], views.pop(key))
            model.posted.discard(key)
        elif step in ("close", "break"):
            ended = {key for key in model.posted if key[0] == number}
            pairs[number].sender.close(clean=step == "close")
            model.posted -= ended
            views = {key: view for key, view in views.items() if key not in ended}
            if step == "break":
                model.doomed += [(clock[0] + GRACE_S, parcel) for _, parcel in ended]
            pairs[number] = make_pair(arena=arena)
        elif step == "drop" and model.logged:
            dropped = pick.choice(sorted(model.logged))
            parcels[dropped].drop()
            model.logged.discard(dropped)
        elif step == "wait":
            clock[0] += 11.0
        assert settled(arena).leases == model.leases(clock[0])
        assert all((view.array == parcel % 256).all() for (_, parcel), view in views.items())
    views.clear()
    for pair in pairs:
        pair.sender.close(clean=True)
    for parcel in parcels:
        parcel.drop()
    clock[0] += GRACE_S
    assert settled(arena).leases == arena.bytes_used == 0
    arena.close()
