"""`python -m helpers.stranger ADDRESS`: another user of this host who offers a Talker memory of his own, and takes it away under it.

He has the probe proven if he can, cuts his file short and sends a reference into it. He prints how the stage answered the offer, and why,
and then how the session ended.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from helpers.run import open_of
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2

NOBODY = 65534


def main() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    arena = Arena.create(max_bytes=8 << 20, segment_bytes=4 << 20)
    assert arena is not None
    sender = Sender(arena, inline_limit=0)
    block = arena.allocate(40_000)
    arena.publish(block)
    slot = tensor_pb2.SharedMemorySlot(arena=arena.uuid, segment=0, offset=block.offset, length=40_000, generation=block.generation)
    tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=[1250, 8], shared_memory=slot)
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)
        description = stub.Describe(stage_pb2.DescribeRequest(), timeout=30)
        opening = stage_pb2.RunRequest(open=open_of(description, offers=sender.offers()))
        chunk = stage_pb2.RunRequest(chunk=chunk_pb2.Chunk(port="hidden", count=1250, last=True, tensor=tensor))

        def requests() -> Iterator[stage_pb2.RunRequest]:
            yield opening
            went.wait(30)
            yield chunk

        went = threading.Event()
        call = stub.Run(requests(), timeout=30)
        opened = next(call)
        answer = opened.opened.answer
        print(tensor_pb2.TransportKind.Name(answer.kind), answer.reason, sep="|", flush=True)
        os.truncate(Path("/dev/shm") / f"omnistage-{arena.uuid.hex()}-0", 4096)
        went.set()
        ended = ""
        try:
            for message in call:
                ended = message.ended.reason or ended
        except grpc.RpcError as error:
            print(ended or f"no Ended, {error.code().name}", flush=True)
    for file in Path("/dev/shm").glob(f"omnistage-{arena.uuid.hex()}-*"):
        file.unlink()  # Nobody else may.
    os._exit(0)  # The arena's own map is cut short too.


if __name__ == "__main__":
    main()
