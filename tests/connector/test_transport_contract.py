"""The promises of every transport; each test runs on all transports. Tensors in parts: which orders and sizes are right."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omnistage.connector.tensors import PART_BYTES, Array, ConnectorError, InvalidReference
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

DTYPES = ["<f4", "<f2", "<i8", "<i4", "<i2", "|u1", "|b1"]
MIB = 1 << 20

# One pair serves all examples of a test on purpose: blocks must be given back and used again without a trace.
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
shapes = hnp.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=4)


def same_bytes(received: Array, sent: Array) -> bool:
    """Equal type, shape and bits; NaN equals NaN."""
    return received.dtype == sent.dtype and received.shape == sent.shape and received.tobytes() == sent.tobytes()


@many
@example(np.zeros((3, 0, 5), np.int64))
@example(np.array(True))
@given(array=st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes)))
def test_any_dtype_and_shape_comes_back_bit_for_bit(pair, array: Array) -> None:
    view = pair.transfer(array)
    assert same_bytes(view.array, array)
    assert not view.array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view.array[...] = 0
    view.release()
    pair.give_back()
    assert pair.sender.outstanding == pair.receiver.view_count == 0


@pytest.mark.parametrize("size", [1, 65535, 65536, MIB - 1, MIB, MIB + 1, 3 * MIB + 77])
def test_sizes_around_every_limit(pair, random: np.random.Generator, size: int) -> None:
    array = random.integers(0, 256, size, np.uint8)
    view = pair.transfer(array)
    assert same_bytes(view.array, array)


def test_bfloat16_travels_as_its_bits(pair, random: np.random.Generator) -> None:
    bits = random.integers(0, 65536, (7, 5000), np.uint16)
    view = pair.transfer(bits, tensor_pb2.ELEMENT_TYPE_BFLOAT16)
    assert view.element_type == tensor_pb2.ELEMENT_TYPE_BFLOAT16
    assert same_bytes(view.array, bits)


@pytest.mark.parametrize("cut", [np.s_[::2], np.s_[:, ::-1], np.s_[3:5, 7], np.s_[..., None]])
def test_layout_in_memory_does_not_matter(pair, random: np.random.Generator, cut: Any) -> None:
    array = random.standard_normal((301, 207), np.float32)[cut]
    assert same_bytes(pair.transfer(array).array, np.ascontiguousarray(array).reshape(array.shape))
    assert same_bytes(pair.transfer(array.T).array, array.T.copy(order="C"))
    assert same_bytes(pair.transfer(array.astype(">f4")).array, array.copy(order="C"))


def test_the_sender_may_change_its_array_after_pack(pair) -> None:
    array = np.zeros(100_000, np.int32)
    messages = pair.messages(array)
    array[:] = 7
    view = [pair.receiver.unpack(message) for message in messages][-1]
    assert not view.array.any()


def test_a_released_view_cannot_be_used(pair) -> None:
    view = pair.transfer(np.zeros(100_000, np.int32))
    view.release()
    view.release()
    with pytest.raises(ConnectorError, match="released"):
        _ = view.array


def test_memory_is_given_back_once_and_used_again(pair) -> None:
    array = np.zeros(100_000, np.int32)
    for _ in range(1000):
        view = pair.transfer(array)
        view.release()
        pair.give_back()
        assert pair.receiver.take_release() is None
    assert pair.sender.outstanding == 0
    if pair.arena is not None:
        assert pair.arena.leases == pair.arena.bytes_used == 0
        assert pair.arena.bytes_total == MIB


def test_an_alias_keeps_its_values_after_the_release(pair, random: np.random.Generator) -> None:
    array = random.standard_normal((300, 300), np.float32)
    view = pair.transfer(array)
    alias = view.array[5:9]
    view.release()
    pair.give_back()
    others = [pair.transfer(np.full((300, 300), 9, np.float32)) for _ in range(3)]
    assert same_bytes(alias, array[5:9])
    del alias, others
    pair.give_back()
    assert pair.sender.outstanding == pair.receiver.view_count == 0


def test_a_view_that_is_forgotten_is_given_back(pair) -> None:
    pair.transfer(np.zeros(100_000, np.int32))
    gc.collect()
    pair.give_back()
    assert pair.sender.outstanding == 0


@pytest.mark.parametrize("clean", [True, False])
def test_close_takes_everything_back(pair, clean: bool) -> None:
    views = [pair.transfer(np.full(50_000, number, np.int32)) for number in range(5)]
    pair.receiver.close()
    assert [int(view.array[-1]) for view in views] == [0, 1, 2, 3, 4]
    pair.sender.close(clean=clean)
    pair.sender.close(clean=clean)
    assert pair.sender.outstanding == 0
    with pytest.raises(ConnectorError, match="closed"):
        pair.receiver.unpack(tensor_pb2.Tensor())


def test_pack_after_close_holds_nothing(pair) -> None:
    pair.sender.close(clean=True)
    assert all(message.WhichOneof("place") == "inline" for message in pair.sender.pack(np.zeros(100_000, np.int32)))
    assert pair.sender.outstanding == 0
    assert pair.sender.offers() == []


def test_repeated_and_made_up_releases_are_ignored_and_counted(pair) -> None:
    view = pair.transfer(np.zeros(100_000, np.int32))
    view.release()
    release = pair.receiver.take_release() or tensor_pb2.Release()
    pair.sender.release(release)
    before = pair.sender.ignored_releases
    pair.sender.release(release)
    pair.sender.release(tensor_pb2.Release(slots=[tensor_pb2.Slot(segment=9, offset=1, generation=2)]))
    assert pair.sender.ignored_releases == before + len(release.slots) + 1
    assert pair.sender.outstanding == 0


@pytest.mark.parametrize("array", [np.zeros(3, np.float64), np.zeros(3, np.complex64), np.zeros(3, np.uint16), np.array(["a"])])
def test_what_the_contract_cannot_carry_is_refused(pair, array: Array) -> None:
    with pytest.raises(ConnectorError, match="cannot be sent"):
        pair.sender.pack(array)
    with pytest.raises(ConnectorError, match="cannot be sent"):
        pair.sender.pack(np.zeros(3, np.int32), element_type=tensor_pb2.ELEMENT_TYPE_BFLOAT16)
    with pytest.raises(ConnectorError, match="at most 8"):
        pair.sender.pack(np.zeros((1,) * 9, np.float32))


def test_a_bool_that_is_neither_0_nor_1_is_refused(pair) -> None:
    for message in pair.messages(np.full(100_000, 2, np.uint8)):
        message.element_type = tensor_pb2.ELEMENT_TYPE_BOOL
        with pytest.raises(InvalidReference, match="BOOL"):
            pair.receiver.unpack(message)
    pair.give_back()
    assert pair.sender.outstanding == 0


def test_more_bytes_than_the_limit_are_refused(pair) -> None:
    small = Receiver(byte_limit=1000)
    small.answer(pair.sender.offers())
    with pytest.raises(InvalidReference, match="1000 bytes"):
        small.unpack(pair.messages(np.zeros(300_000, np.int32))[0])


def three_parts() -> list[tensor_pb2.Tensor]:
    parts = Sender(None).pack(np.arange(5 * PART_BYTES // 4, dtype=np.int16).reshape(-1, 2, 5))
    assert len(parts) == 3
    return parts


def test_no_part_is_longer_than_1_mib_and_they_follow_each_other() -> None:
    end = 0
    for part in three_parts():
        assert part.inline.offset == end
        assert 0 < len(part.inline.data) <= PART_BYTES
        end += len(part.inline.data)
    assert end == part.inline.total_bytes


def test_only_the_right_order_gives_a_tensor() -> None:
    """No part comes again, and none is left out."""
    parts = three_parts()
    for order in itertools.product(range(3), repeat=3):
        receiver = Receiver()
        if order == (0, 1, 2):
            assert [receiver.unpack(parts[number]) is None for number in order] == [True, True, False]
        else:
            with pytest.raises(InvalidReference):
                for number in order:
                    receiver.unpack(parts[number])


def test_ports_do_not_mix() -> None:
    parts = three_parts()
    receiver = Receiver()
    views = [receiver.unpack(part, port=port) for part in parts for port in ("hidden", "codes")]
    assert views[:4] == [None] * 4
    assert views[4] is not None and views[5] is not None
    assert np.array_equal(views[4].array, views[5].array)


CHANGES: dict[str, Callable[[tensor_pb2.Tensor], None]] = {
    "shape": lambda part: part.shape.append(1),
    "element type": lambda part: setattr(part, "element_type", tensor_pb2.ELEMENT_TYPE_FLOAT16),
    "total": lambda part: setattr(part.inline, "total_bytes", part.inline.total_bytes + 1),
    "longer data": lambda part: setattr(part.inline, "data", part.inline.data + b"x"),
    "empty data": lambda part: setattr(part.inline, "data", b""),
    "no data": lambda part: part.ClearField("inline"),
    "overrun": lambda part: setattr(part.inline, "offset", part.inline.total_bytes - 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_part_that_differs_from_the_first_is_refused(change: Callable[[tensor_pb2.Tensor], None]) -> None:
    first, second, _ = three_parts()
    receiver = Receiver()
    assert receiver.unpack(first) is None
    change(second)
    with pytest.raises(InvalidReference):
        receiver.unpack(second)


def test_a_promise_of_much_costs_only_up_to_the_limit() -> None:
    inline = tensor_pb2.InlinePart(data=b"x", total_bytes=1 << 40)
    huge = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_UINT8, shape=[1 << 40], inline=inline)
    with pytest.raises(InvalidReference, match="held at once"):
        Receiver().unpack(huge)


def test_unfinished_tensors_count_against_the_limit() -> None:
    receiver = Receiver(byte_limit=4 * PART_BYTES)
    assert receiver.unpack(three_parts()[0], port="a") is None
    with pytest.raises(InvalidReference, match="held at once"):
        receiver.unpack(three_parts()[0], port="b")
