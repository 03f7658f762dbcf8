"""The state of an answer at the client: how far each port is, and all text. With it another router can go on with the answer."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.client.errors import ProtocolError
from omnistage.v1 import chunk_pb2, omni_pb2


@dataclass(slots=True)
class _Port:
    """How far one port is. seq: number of its next chunk. item: position of its next item. ended: whether its last chunk has come."""

    seq: int = 0
    item: int = 0
    ended: bool = False

    def advance(self, chunk: chunk_pb2.Chunk) -> None:
        """Count a chunk. Raises ProtocolError if it leaves a gap, repeats items, or comes after the last chunk."""
        if self.ended:
            raise ProtocolError(f"port {chunk.port}: a chunk came after the last")
        if chunk.seq != self.seq:
            raise ProtocolError(f"port {chunk.port}: chunk {chunk.seq} came, {self.seq} is next")
        if chunk.first != self.item:
            kind = "gap" if chunk.first > self.item else "repeat"
            raise ProtocolError(f"port {chunk.port}: {kind}, position {chunk.first} came, {self.item} is next")
        self.seq += 1
        self.item += chunk.count
        self.ended = chunk.last


class Received:
    """The state of one answer, whose connections may have changed."""

    def __init__(self) -> None:
        self.started: omni_pb2.Started | None = None
        """The first message of the latest connection."""
        self.finish_reason = chunk_pb2.FINISH_REASON_UNSPECIFIED
        """Why the text ended."""
        self._ports: dict[str, _Port] = {}
        self._text_port = ""
        """The name of the port on which text came; empty while none has come."""
        # Pieces in lists: a whole answer may be long, and adding each piece to a message would copy it again and again.
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def open_ports(self) -> list[str]:
        """Ports that have begun and not ended."""
        return sorted(name for name, port in self._ports.items() if not port.ended)

    @property
    def tokens(self) -> int | None:
        """Number of tokens of the text; None if the request asked for no text."""
        text = self._ports.get(self._text_port)
        return None if text is None else text.item

    def has_ended(self, port: str) -> bool:
        return port in self._ports and self._ports[port].ended

    def has_items(self, port: str) -> bool:
        return port in self._ports and self._ports[port].item > 0

    def start(self, started: omni_pb2.Started) -> None:
        """Take the first message of a connection. Raises ProtocolError if it belongs to another answer than before."""
        if self.started is not None and (started.seed, started.model) != (self.started.seed, self.started.model):
            raise ProtocolError(
                f"seed {self.started.seed} of {self.started.model} was to go on, seed {started.seed} of {started.model} answered"
            )
        self.started = started

    def take(self, chunk: chunk_pb2.Chunk) -> None:
        """Take the next chunk of a port. Raises ProtocolError if it is not the next one."""
        self._ports.setdefault(chunk.port, _Port()).advance(chunk)
        if chunk.HasField("text"):
            self._text_port = chunk.port
            self._texts.append(chunk.text.text)
            self._token_ids.extend(chunk.text.token_ids)
            self._logprobs.extend(chunk.text.logprobs)
            self.finish_reason = chunk.text.finish_reason

    def request(self, whole_request: omni_pb2.GenerateRequest) -> omni_pb2.GenerateRequest:
        """The request for the next connection: `whole_request` itself if no answer has started, else a request for the rest of the
        answer."""
        if self.started is None:
            return whole_request
        request = omni_pb2.GenerateRequest()
        request.CopyFrom(whole_request)
        request.model = self.started.model
        request.seed = self.started.seed
        request.revisions[:] = self.started.revisions
        for name, port in self._ports.items():
            request.resume.positions.add(port=name, seq=port.seq, first=port.item, ended=port.ended)
        text = self._ports.get(self._text_port)
        if text is not None:
            # One chunk has the whole text: a router does not need to know how it was cut into pieces.
            history = request.resume.history.add(port=self._text_port, count=text.item, last=text.ended)
            history.text.text = "".join(self._texts)
            history.text.token_ids.extend(self._token_ids)
            history.text.logprobs.extend(self._logprobs)
            history.text.finish_reason = self.finish_reason
        request.resume.SetInParent()  # even if no chunk has come: the answer has started, so it is resumed
        return request
