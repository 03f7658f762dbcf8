"""From a client's GenerateRequest to a request that the rest of the router trusts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from omnistage.router.choice import check_outputs, choose_pipeline, stage_refusal
from omnistage.router.pipeline import PipelineFile
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.decoding import TooLarge, decode
from omnistage.wire.errors import bad_request
from omnistage.wire.kinds import KINDS
from omnistage.wire.limits import MAX_TEXT_CHARACTERS

_ID = re.compile(r"[A-Za-z0-9_-]{0,64}")

DRAWN_SEEDS = 10**9
"""Seeds drawn for clients that give none are below this number, because people read them and type them."""


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A checked request. outputs: the ports that the client gets. params: of every stage, by kind, with defaults filled in. resume: the
    part of an interrupted answer that the client has; the stages check its contents. revisions: of the stages that began that answer, in
    their order; empty: any. batches: the client takes several chunks in one message. ports: on which the client streams parts of the
    request."""

    pipeline: PipelineFile
    outputs: frozenset[str]
    seed: int
    params: Mapping[str, stage_pb2.StageParams]
    request_id: str
    resume: stage_pb2.Resume | None
    revisions: Sequence[str]
    batches: bool
    ports: Sequence[str]


async def parse(data: bytes, turn: Callable[[], AbstractAsyncContextManager[None]]) -> omni_pb2.GenerateRequest:
    """The request in these bytes. turn: makes a context manager that is entered while a large request is decoded.

    Raises BAD_REQUEST for bytes that are no request, or that hold more of something than limits.py allows; raises the errors of `turn`."""
    try:
        return await decode(data, omni_pb2.GenerateRequest, turn)
    except TooLarge as error:
        raise bad_request(error.field, error.description) from None
    except DecodeError:
        raise bad_request("request", "these bytes are no GenerateRequest") from None


def is_id(text: str) -> bool:
    """Whether the text can name a request or a conversation."""
    return _ID.fullmatch(text) is not None


def validate(request: omni_pb2.GenerateRequest, pipelines: Mapping[str, PipelineFile]) -> ValidRequest:
    """Check what the router itself needs; a stage checks the values of its own params. `choice` chooses the pipeline, and may turn the
    request into a drawing.

    Raises StageError."""
    characters = len(request.thinker.verbatim) + sum(len(part.text) for turn in request.thinker.messages for part in turn.parts)
    if characters > MAX_TEXT_CHARACTERS:
        raise bad_request("thinker.messages", f"at most {MAX_TEXT_CHARACTERS} characters")
    pipeline = choose_pipeline(request, pipelines)
    for name in ("conversation_id", "request_id"):
        if not is_id(getattr(request, name)):
            raise bad_request(name, "at most 64 characters of A-Z a-z 0-9 _ -")
    outputs = check_outputs(request, pipeline, pipelines.values())
    for kind in KINDS:
        if request.HasField(kind) and kind not in pipeline.kinds:
            raise stage_refusal(request, pipeline, kind, pipelines.values())
    _check_resume(request, outputs, pipeline)
    seed = request.seed if request.HasField("seed") else secrets.randbelow(DRAWN_SEEDS)
    return ValidRequest(
        pipeline,
        outputs,
        seed,
        _params(request, pipeline),
        request.request_id,
        request.resume if request.HasField("resume") else None,
        tuple(request.revisions),
        request.batches,
        tuple(part.port for turn in request.thinker.messages for part in turn.parts if part.HasField("port")),
    )


def _check_resume(request: omni_pb2.GenerateRequest, outputs: frozenset[str], pipeline: PipelineFile) -> None:
    """Raise BAD_REQUEST unless `resume` and `revisions` fit the request's seed and outputs. outputs: ports that the client gets."""
    if not request.HasField("resume"):
        if request.revisions:
            raise bad_request("revisions", "belong to a request with resume")
        return
    if not request.HasField("seed"):
        raise bad_request("seed", "give the seed of the interrupted answer, from its Started; another one says something else")
    if len(request.revisions) > len(pipeline.stages):
        raise bad_request("revisions", f"{pipeline.name} has {len(pipeline.stages)} stages")
    ports = {position.port for position in request.resume.positions} | {chunk.port for chunk in request.resume.history}
    if not ports <= outputs:
        raise bad_request("resume", f"{sorted(ports - outputs)[:8]} are not among the outputs that are asked for")


def _params(request: omni_pb2.GenerateRequest, pipeline: PipelineFile) -> dict[str, stage_pb2.StageParams]:
    """The params of every stage, by kind: the pipeline's defaults, overwritten by the values of the request."""
    params = pipeline.default_params()
    for kind, values in params.items():
        stage_params = getattr(request, kind)
        if "sampling" in stage_params.DESCRIPTOR.fields_by_name and stage_params.HasField("sampling"):
            _clear_replaced(getattr(values, kind).sampling)
        for field, _ in stage_params.ListFields():
            if field.name in _REPLACED_WHOLE:
                getattr(values, kind).ClearField(field.name)
        getattr(values, kind).MergeFrom(stage_params)
    if "talker" in params and "code2wav" in params and not params["code2wav"].code2wav.voice:
        params["code2wav"].code2wav.voice = params["talker"].talker.voice
    if "talker" in params and request.thinker.verbatim:
        talker = params["talker"].talker
        talker.plain = talker.plain or not talker.markdown
    return params


_REPLACED_WHOLE = frozenset({"stop", "constraint", "images", "sigmas"})
"""Fields in which a client's value replaces the pipeline's: a merge would append, and could exceed the limits of a request."""


def _clear_replaced(defaults: stage_pb2.Sampling) -> None:
    """Clear all default sampling values but `repetition_penalty` and `top_p`: a client that sends sampling sends all the others, and may
    leave these two out."""
    remaining = stage_pb2.Sampling()
    if defaults.HasField("repetition_penalty"):
        remaining.repetition_penalty = defaults.repetition_penalty
    if defaults.HasField("top_p"):
        remaining.top_p = defaults.top_p
    defaults.CopyFrom(remaining)
