"""A second client, independent of the SDK: records when messages arrive on a synchronous channel, and computes the figures from that."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field

import grpc

from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

THRESHOLD = 32768 * 10 ** (-40 / 20)


@dataclass
class EventArrivals:
    """The events of one answer, each with the seconds from the call to its arrival. ttft, ttfa: times to first text and sound."""

    events: list[tuple[float, omni_pb2.GenerateResponse]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(event.chunk.text.text for _, event in self.events if event.HasField("chunk"))

    @property
    def ttft_s(self) -> float:
        return next(at for at, event in self.events if event.HasField("chunk") and event.chunk.text.text)

    @property
    def ttfa_s(self) -> float:
        """Seconds to the chunk with the first 16-bit sample above -40 dBFS. Raises LookupError for a silent answer."""
        for at, event in self.events:
            data = event.chunk.audio.data if event.HasField("chunk") else b""
            if any(abs(sample) > THRESHOLD for (sample,) in struct.iter_unpack("<h", data)):
                return at
        raise LookupError("the answer is silent")

    @property
    def audio_s(self) -> float:
        sound = [event.chunk for _, event in self.events if event.HasField("chunk") and event.chunk.HasField("audio")]
        return sum(len(chunk.audio.data) / 2 / chunk.audio.channel_count / chunk.audio.sample_rate_hz for chunk in sound)

    @property
    def rtf(self) -> float:
        last = max(at for at, event in self.events if event.HasField("chunk") and event.chunk.audio.data)
        return last / self.audio_s


class RawClient:
    """A client of the router at `address`, with one synchronous channel and no option set."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        grpc.channel_ready_future(self._channel).result(timeout=10)
        self._stub = omni_pb2_grpc.OmniServiceStub(self._channel)

    def ask(self, question: str, *, seed: int, max_tokens: int) -> EventArrivals:
        message = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text=question)])
        thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=max_tokens, ignore_eos=True)
        request = omni_pb2.GenerateRequest(seed=seed, thinker=thinker)
        arrivals = EventArrivals()
        begin_s = time.perf_counter()
        for event in self._stub.Generate(request, timeout=60):
            arrivals.events.append((time.perf_counter() - begin_s, event))
        return arrivals

    def close(self) -> None:
        self._channel.close()
