"""The result of one request: the figures of its answer, or the error. Times are seconds by the clock of this client."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise

from omnistage.cli.bench.question import BenchQuestion
from omnistage.cli.wording import word_error
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.errors import OmniError, ProtocolError, RequestError, UnavailableError
from omnistage.client.events import CONTINUITY_LIMIT_S, Done, Picture, Progress, TextDelta, ThoughtDelta

RETRY_S = 0.5
"""Seconds to wait after a refusal that names no delay."""


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """The arrival of a message with text. arrival_s: in seconds after t0. tokens: how many tokens the message has."""

    arrival_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one answer, as docs/bench.md explains them, in seconds; counts and rtf have no unit. None: the answer has nothing to
    measure."""

    tokens: int
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float
    audio_ttfp_s: float | None
    ttfa_s: float | None
    audio_s: float
    rtf: float | None
    rtf_generation: float | None
    underrun_s: float | None
    starved_s: float | None
    queued_s: float
    steps: int
    pictures: int
    failovers: int
    finish_reason: str

    @property
    def is_continuous(self) -> bool | None:
        """Whether a listener who plays the sound as it comes hears no noticeable gap; None without sound."""
        return None if self.underrun_s is None else self.underrun_s <= CONTINUITY_LIMIT_S


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes why there is no answer. error: name of the class of the error. retry_s: seconds after which to ask again; None: asking
    again does not help. is_refusal: the request itself was wrong."""

    error: str
    reason: str
    message: str
    hint: str
    retry_s: float | None
    is_refusal: bool

    @classmethod
    def of(cls, error: OmniError) -> Failure:
        """The failure that an error of the client stands for."""
        retry_s = None
        if isinstance(error, UnavailableError):
            retry_s = RETRY_S if error.retry_delay_s is None else error.retry_delay_s
        return cls(type(error).__name__, error.reason, *word_error(error), retry_s, isinstance(error, RequestError))


@dataclass(frozen=True, slots=True)
class Sample:
    """One request and its outcome. due_s, begun_s, ended_s: when it was due, began and ended, in seconds after its level began."""

    number: int
    seed: int
    due_s: float
    begun_s: float
    ended_s: float
    outcome: Measured | Failure

    @property
    def late_s(self) -> float:
        """Seconds by which this client began the request too late."""
        return self.begun_s - self.due_s


async def take(omni: AsyncOmni, question: BenchQuestion, due_s: float, t0: float) -> Sample:
    """Send a request, and measure its answer. due_s: when it was due. t0: time.perf_counter() at the beginning of the level. An error of
    the client or a server is a result, and is not raised."""
    begun_s = time.perf_counter() - t0
    outcome: Measured | Failure
    try:
        outcome = await _measure(omni, question)
    except OmniError as error:
        outcome = Failure.of(error)
    return Sample(question.number, question.seed, due_s, begun_s, time.perf_counter() - t0, outcome)


async def _measure(omni: AsyncOmni, question: BenchQuestion) -> Measured:
    """The figures of the answer to a question. Raises OmniError."""
    pieces: list[TokenArrival] = []
    steps = pictures = 0
    async with aclosing(question.stream(omni)) as events:
        async for event in events:
            match event:
                case TextDelta() | ThoughtDelta() if event.token_ids:
                    _add_piece(pieces, event.arrival_s, len(event.token_ids))
                case Progress():
                    steps = event.done
                case Picture() if event.preview_step is None:
                    pictures += 1
                case Done():
                    return _figures(event, pieces, steps, pictures)
    raise ProtocolError("the stream ended without its account")


def _add_piece(pieces: list[TokenArrival], arrival_s: float, tokens: int) -> None:
    """Add a piece of text to those that have come; pieces with the same time are of one message, and are joined."""
    if pieces and pieces[-1].arrival_s == arrival_s:
        tokens += pieces.pop().tokens
    pieces.append(TokenArrival(arrival_s, tokens))


def _figures(done: Done, pieces: list[TokenArrival], steps: int, pictures: int) -> Measured:
    """The figures of an answer that has ended. pieces: arrivals of its text."""
    timing = done.timing
    sounds = [chunk for chunk in timing.audio if chunk.samples]
    rest_s = timing.audio_s - sounds[0].duration_s if sounds else 0.0
    return Measured(
        tokens=sum(piece.tokens for piece in pieces),
        ttft_s=timing.ttft_s,
        tpot_s=per_token_s(pieces),
        itl_s=tuple(after.arrival_s - before.arrival_s for before, after in pairwise(pieces)),
        e2e_s=timing.e2e_s,
        audio_ttfp_s=sounds[0].arrival_s if sounds else None,
        ttfa_s=timing.ttfa_s,
        audio_s=timing.audio_s,
        rtf=timing.rtf if sounds else None,
        rtf_generation=(sounds[-1].arrival_s - sounds[0].arrival_s) / rest_s if rest_s > 0 else None,
        underrun_s=timing.underrun_s if sounds else None,
        starved_s=timing.starved_s if sounds else None,
        queued_s=done.usage.queued_s,
        steps=steps,
        pictures=pictures,
        failovers=len(done.failovers),
        finish_reason=done.finish_reason,
    )


def per_token_s(pieces: list[TokenArrival]) -> float | None:
    """Seconds per token from the first arrival to the last, without the tokens of the first message. None if there was only one message."""
    later = sum(piece.tokens for piece in pieces[1:])
    return (pieces[-1].arrival_s - pieces[0].arrival_s) / later if later else None
