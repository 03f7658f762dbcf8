"""Checks of parameters that more than one kind of stage has. Ranges are those of stage.proto."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from omnistage.link.errors import StageError, bad_request, protocol_error
from omnistage.link.limits import MAX_LOGIT_BIASES
from omnistage.stage.logic import Start
from omnistage.v1 import chunk_pb2, stage_pb2

__all__ = ["HISTORY", "POSITIONS", "bad_request", "check_kind", "check_sampling", "earlier_output", "protocol_error", "refusals"]

POSITIONS = "resume.positions"
HISTORY = "resume.history"

MAX_LOGIT_BIAS = 100.0


class Refusal(Protocol):
    """How a model says which field of a request it cannot serve."""

    field: str
    description: str


@contextmanager
def refusals(kind: type[Exception]) -> Iterator[None]:
    """Turn a model's own exception for bad input, which has the form of Refusal, into BAD_REQUEST."""
    try:
        yield
    except kind as error:
        refusal = cast(Refusal, error)
        raise bad_request(refusal.field, refusal.description) from None


def check_sampling(sampling: stage_pb2.Sampling, field: str) -> None:
    """Raise BAD_REQUEST for a value out of range. NaN is in no range."""
    _in_range(sampling.temperature, 0, 2, f"{field}.temperature")
    _in_range(sampling.presence_penalty, -2, 2, f"{field}.presence_penalty")
    _in_range(sampling.frequency_penalty, -2, 2, f"{field}.frequency_penalty")
    if not 0 <= sampling.min_p < 1:
        raise bad_request(f"{field}.min_p", "must be at least 0 and below 1")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise bad_request(f"{field}.top_p", "must be above 0 and at most 1")
    if sampling.HasField("repetition_penalty") and not 0 < sampling.repetition_penalty <= 100:
        raise bad_request(f"{field}.repetition_penalty", "must be above 0 and at most 100")
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise bad_request(f"{field}.logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
    for bias in sampling.logit_bias.values():
        _in_range(bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, f"{field}.logit_bias")


def check_kind(params: stage_pb2.StageParams, kind: str) -> None:
    """The params must be of this stage's kind; none at all means its defaults."""
    given = params.WhichOneof("kind")
    if given not in (None, kind):
        raise StageError("BAD_REQUEST", f"open.params: this is a {kind}, the params are for a {given}", metadata={"field": "open.params"})


def earlier_output(start: Start, port: str) -> chunk_pb2.Chunk:
    """All that a checkpoint port has put out already, as one chunk from item 0. Raises BAD_REQUEST if it does not reach to where the port
    is to go on: whoever resumes a stage says both."""
    first = start.first.get(port, 0)
    history = start.history.get(port, chunk_pb2.Chunk(port=port))
    if history.first != 0 or history.count != first:
        reach = f"items {history.first} to {history.first + history.count}"
        raise bad_request(HISTORY, f"{reach} of port {port!r} are there, and its position says that it goes on at item {first}")
    return history


def _in_range(value: float, low: float, high: float, field: str) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise bad_request(field, f"must be from {low} to {high}")
