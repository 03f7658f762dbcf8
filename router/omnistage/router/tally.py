"""The figures of one answer so far: for its usage, the metrics, the log and the trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from omnistage.host.spans import Attributes
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.kinds import KINDS, kind_name


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica that was lost and replaced. lost: its address. replica: address of its replacement. at_s: moment when this router heard of
    it, in time.monotonic() seconds. pause_s: seconds from the loss to the replacement."""

    stage: str
    lost: str
    replica: str
    why: str
    pause_s: float
    at_s: float

    @property
    def attributes(self) -> Attributes:
        """Attributes for the event of a trace."""
        values: Attributes = {"stage": self.stage, "lost": self.lost, "replica": self.replica, "why": self.why, "pause_s": self.pause_s}
        return {f"omnistage.{name}": value for name, value in values.items()}


class Tally:
    """Counts of one answer. Seconds are counted from the creation of this object; `begun_s` and `opened_s` are time.monotonic() seconds."""

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.opened_s: float | None = None
        """When all stages had taken the session; None: not yet."""
        self.first: dict[str, float] = {}
        """Seconds to the first item that the client gets, by kind of item: thought, text, audio and others."""
        self.tokens = 0
        """Tokens of text that were made, wanted or not."""
        self.thought_tokens = 0
        """How many of `tokens` are thoughts before the answer."""
        self.prompt_tokens: int | None = None
        """Tokens of the prompt; None: no stage has reported them yet. A stage reports them when it is done."""
        self.cached_tokens: int | None = None
        """How many of `prompt_tokens` were found already computed; None: no stage has reported it yet."""
        self.unspoken = 0
        """Characters of the text that the voice has no sound for, as reported by the stages that are done."""
        self.sound_s = 0.0
        """Seconds of sound that the client got."""
        self.last_sound_s = 0.0
        """Seconds to the last item of sound."""
        self.pictures = 0
        """Whole pictures that the client got, each layer counted; no previews."""
        self.frames = 0
        """Frames of film that the client got."""
        self.finish_reason = chunk_pb2.FINISH_REASON_UNSPECIFIED
        self.losses: list[Loss] = []
        self.replicas: dict[str, list[str]] = {}
        """Addresses of the replicas that have taken part, by stage, each at its first use."""
        self._first_stage = ""
        self.reports: dict[stage_pb2.StageKind, stage_pb2.Report] = {}

    def opened(self, stage: str, address: str) -> None:
        """Note that all stages have taken the session. stage, address: the kind and the address of the first one."""
        self.opened_s = time.monotonic()
        self._first_stage = stage
        self._used(stage, address)

    def made(self, chunks: Sequence[chunk_pb2.Chunk]) -> None:
        """Count chunks that came from the stages, wanted or not."""
        for chunk in chunks:
            if chunk.HasField("text"):
                self.tokens += chunk.count
                self.thought_tokens += chunk.count if chunk.text.HasField("thought") else 0
                self.finish_reason = chunk.text.finish_reason or self.finish_reason

    def gave(self, chunks: Sequence[chunk_pb2.Chunk]) -> None:
        """Count chunks that the client gets."""
        for chunk in chunks:
            content = chunk.WhichOneof("payload") or ""
            if content == "text" and chunk.text.HasField("thought"):
                content = "thought"
            if chunk.count:
                self.first.setdefault(content, time.monotonic() - self.begun_s)
            match content:
                case "audio" if chunk.audio.sample_rate_hz:
                    self.sound_s += chunk.count / chunk.audio.sample_rate_hz
                    self.last_sound_s = time.monotonic() - self.begun_s
                case "image":  # The count of a preview is 0.
                    self.pictures += chunk.count
                case "video":
                    self.frames += chunk.count

    def replaced(self, failover: stage_pb2.Failover) -> Loss:
        """Note that a replica was lost and another one goes on."""
        stage = kind_name(failover.kind) if failover.kind in KINDS.values() else "unknown"
        pause_s = failover.pause.ToTimedelta().total_seconds()
        loss = Loss(stage, failover.lost, failover.replica, failover.reason, pause_s, time.monotonic())
        self.losses.append(loss)
        self._used(stage, failover.lost)
        self._used(stage, failover.replica)
        return loss

    def reported(self, report: stage_pb2.Report) -> None:
        """Note that a stage is done. The address in its report is noted as a replica that has taken part, except for the first stage, for
        which `opened` has noted the address that was called."""
        self.reports[report.kind] = report
        if report.HasField("prompt_tokens"):
            self.prompt_tokens, self.cached_tokens = report.prompt_tokens, report.cached_tokens
        self.unspoken = sum(each.unspoken for each in self.reports.values())
        if report.kind in KINDS.values() and kind_name(report.kind) != self._first_stage:
            self._used(kind_name(report.kind), report.replica)

    def _used(self, stage: str, address: str) -> None:
        """Note that the replica at this address takes part, unless it is noted already."""
        addresses = self.replicas.setdefault(stage, [])
        if address not in addresses:
            addresses.append(address)
