"""The account of a request: at its end, one line in the log (docs/logs.md) and one span (docs/tracing.md) say how it ended."""

from __future__ import annotations

import time

import structlog

from omnistage.host.spans import Span, Value
from omnistage.router.admission import Place
from omnistage.router.tally import Tally
from omnistage.v1 import chunk_pb2
from omnistage.wire.errors import StageError

log = structlog.get_logger(__name__)

BUG = {"reason": "INTERNAL"}

_FINISH = {
    chunk_pb2.FINISH_REASON_STOP: "stop",
    chunk_pb2.FINISH_REASON_LENGTH: "length",
    chunk_pb2.FINISH_REASON_INTERRUPTED: "interrupted",
}

_STANDARD = {"tokens": "gen_ai.usage.output_tokens", "prompt_tokens": "gen_ai.usage.input_tokens"}
"""Figures for which OpenTelemetry's conventions have a name; every other attribute of a span is `omnistage.*`."""


class Account:
    """The account of one request from its arrival on. Call `asks`, `waits`, `placed` and `answers` as the request gets that far, then
    `ended` or `failed`, and `close` in any case.

    client: the text of `clients.client_text`. Neither the line nor the span holds anything of the question or the answer.
    """

    def __init__(self, client: str, span: Span) -> None:
        self._client = client
        self._begun_s = time.monotonic()
        self._waits_since: float | None = None
        self._place: Place | None = None
        self._request_id = self._pipeline = self._session_id = ""
        self._error = {"reason": "CANCELLED"}
        self.span = span
        self.tally = Tally()

    def asks(self, pipeline: str, request_id: str) -> None:
        """Note that the request asks for this pipeline. pipeline, request_id: empty if the check of the request did not get so far."""
        self._pipeline, self._request_id = pipeline, request_id

    def waits(self) -> None:
        """Note that the request asks for a place now."""
        self._waits_since = time.monotonic()

    def placed(self, place: Place) -> None:
        """Note that the request has a place: it is an answer from now on."""
        self._place = place
        self.tally = Tally()

    def answers(self, session_id: str) -> None:
        """Note that the stages are asked next, in a session with this id."""
        self._session_id = session_id

    def ended(self) -> None:
        """Note that the whole answer was sent."""
        self._error = {"reason": "OK"}

    def failed(self, error: StageError | None) -> None:
        """Note that the request ended with this error; None: a bug of the router ended it. The account keeps only the texts of the error,
        because the error itself would keep its frames in memory."""
        self._error = BUG if error is None else error.for_log()

    @property
    def reason(self) -> str:
        """How the request ended, as noted so far: OK, INTERNAL, a name in ErrorReason, or CANCELLED if nobody waits for the answer any
        more."""
        return self._error["reason"]

    def close(self) -> None:
        """Write the line and end the span."""
        figures = self._figures() if self._place is not None else {}
        request = {"request_id": self._request_id or None, "pipeline": self._pipeline or None, "client": self._client}
        line = {**request, **self._error, **figures, "total_s": _round_s(time.monotonic() - self._begun_s)}
        log.info("request.refused" if self._place is None else "answer.done", **line)
        self._trace({name: value for name, value in line.items() if name not in ("reason", "total_s")})

    def _figures(self) -> dict[str, object]:
        """Figures of an answer that had a place, as fields of its log line."""
        assert self._place is not None
        tally = self.tally
        return {
            "session_id": self._session_id or None,
            "finish_reason": _FINISH.get(tally.finish_reason),
            "tokens": tally.tokens,
            "thought_tokens": tally.thought_tokens,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "queued_s": _round_s(self._place.queued_s),
            "ttft_s": self._to_first("text"),
            "ttfa_s": self._to_first("audio"),
            "audio_s": _round_s(tally.sound_s),
            "unspoken": tally.unspoken,
            "pictures": tally.pictures,
            "frames": tally.frames,
            "failovers": len(tally.losses),
            "replicas": tally.replicas,
        }

    def _to_first(self, content: str) -> float | None:
        """Seconds from the request's arrival to the first item of this kind; None: there was no such item."""
        return _round_s(self.tally.begun_s + self.tally.first[content] - self._begun_s) if content in self.tally.first else None

    def _trace(self, line: dict[str, object]) -> None:
        """End the span with its phases and with the fields of the line, except its reason and its length."""
        span, tally, now_s = self.span, self.tally, time.monotonic()
        if not span.trace_id:
            return
        if self._waits_since is not None and (self._place is None or self._place.queued_s):
            ended_s, reason = (now_s, self.reason) if self._place is None else (tally.begun_s, "OK")
            span.phase("queue", self._waits_since, ended_s, reason=reason)
        if self._session_id:
            span.phase("open", tally.begun_s, tally.opened_s or now_s, reason="OK" if tally.opened_s else self.reason)
        for content, first_s in tally.first.items():
            span.event(f"first_{content}", at_s=tally.begun_s + first_s)
        for loss in tally.losses:
            span.event("failover", loss.attributes, at_s=loss.at_s)
        span.end(self.reason, {_STANDARD.get(name, f"omnistage.{name}"): value for name, value in line.items() if isinstance(value, Value)})


def _round_s(seconds: float) -> float:
    return round(seconds, 4)
