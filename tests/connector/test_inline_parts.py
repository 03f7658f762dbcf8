"""Tensors in parts: which orders and sizes are right."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from omnistage.connector.tensors import PART_BYTES, InvalidReference
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2


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
