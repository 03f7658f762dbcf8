"""A process that reads tensors out of another one's memory, and does with them what the test says."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection

from helpers.pipes import receive
from omnistage.connector.arena import Arena
from omnistage.connector.tensors import ConnectorError
from omnistage.connector.transport import Receiver, Sender, TensorView
from omnistage.v1 import tensor_pb2

MIB = 1 << 20


def read(connection: Connection) -> None:
    """Have an arena, agree on a stream, and obey."""
    _read(connection, Arena.create(max_bytes=2 * MIB, segment_bytes=MIB))


def read_without_arena(connection: Connection) -> None:
    """The same as a process that makes no tensors, such as a router."""
    _read(connection, None)


def _read(connection: Connection, arena: Arena | None) -> None:
    receiver = Receiver()
    answer = receiver.answer([tensor_pb2.Offer.FromString(receive(connection))])
    connection.send_bytes(answer.SerializeToString())
    connection.send_bytes(b"".join(offer.SerializeToString() for offer in Sender(arena).offers()))
    views: list[TensorView] = []
    with suppress(EOFError):  # the test is over
        while True:
            command = connection.recv_bytes()
            if command == b"sums":
                connection.send_bytes(",".join(str(int(view.array.sum())) for view in views).encode())
            elif command == b"release":
                while views:
                    views.pop().release()
                connection.send_bytes((receiver.take_release() or tensor_pb2.Release()).SerializeToString())
            elif command == b"arena":
                connection.send_bytes(arena.uuid if arena is not None else b"")
            elif command == b"end":
                break
            else:
                try:
                    view = receiver.unpack(tensor_pb2.Tensor.FromString(command))
                except ConnectorError as error:
                    connection.send_bytes(type(error).__name__.encode())
                else:
                    assert view is not None
                    views.append(view)
                    connection.send_bytes(b"held")
    if arena is not None:
        arena.close()


def agree(connection: Connection, arena: Arena) -> Sender:
    """The sender of a stream to a process that runs `read`."""
    sender = Sender(arena, inline_limit=0)
    connection.send_bytes(sender.offers()[0].SerializeToString())
    answer = tensor_pb2.Answer.FromString(receive(connection))
    offer = receive(connection)
    sender.accept(answer, [tensor_pb2.Offer.FromString(offer)] if offer else [])
    assert sender.reason == ""
    return sender


def ask(connection: Connection, command: bytes) -> bytes:
    connection.send_bytes(command)
    return receive(connection)


def hand_over(connection: Connection, messages: list[tensor_pb2.Tensor]) -> bytes:
    """Have the reader take a tensor; "held" or the name of its error."""
    (message,) = messages
    return ask(connection, message.SerializeToString())


def take_back(connection: Connection, sender: Sender) -> None:
    sender.release(tensor_pb2.Release.FromString(ask(connection, b"release")))
