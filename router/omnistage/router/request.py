"""From a client's GenerateRequest to a request that the rest of the router trusts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from omnistage.link.errors import StageError, bad_request
from omnistage.router.pipeline import Pipeline
from omnistage.v1 import omni_pb2, stage_pb2

MAX_TEXT_CHARACTERS = 1 << 20
_ID = re.compile(r"[A-Za-z0-9_-]{0,64}")


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A checked request. outputs: the ports the client gets. params: of every stage, defaults filled in."""

    pipeline: Pipeline
    outputs: frozenset[str]
    seed: int
    params: Mapping[str, stage_pb2.StageParams]


def validate(request: omni_pb2.GenerateRequest, pipelines: Mapping[str, Pipeline]) -> ValidRequest:
    """Check what the router itself needs; a stage checks the values of its own params. The first pipeline is the default.

    Raises StageError."""
    pipeline = next(iter(pipelines.values())) if not request.model else pipelines.get(request.model)
    if pipeline is None:
        raise StageError("UNKNOWN_MODEL", f"no model {request.model[:64]!r}; there are {', '.join(pipelines)}", metadata={"field": "model"})
    for name in ("conversation_id", "request_id"):
        if _ID.fullmatch(getattr(request, name)) is None:
            raise bad_request(name, "at most 64 characters of A-Z a-z 0-9 _ -")
    if request.request_id:
        raise bad_request("request_id", "this version does not know requests again; leave it out")
    if request.HasField("resume"):
        raise bad_request("resume", "this version cannot resume an answer; ask again without it")
    outputs = frozenset(request.outputs or pipeline.outputs)
    if not outputs <= set(pipeline.outputs):
        raise bad_request("outputs", f"{sorted(outputs - set(pipeline.outputs))}: {pipeline.name} gives {', '.join(pipeline.outputs)}")
    kinds = {stage.kind for stage in pipeline.stages}
    for kind in ("thinker", "talker", "code2wav", "diffusion"):
        if request.HasField(kind) and kind not in kinds:
            raise bad_request(kind, f"{pipeline.name} has no {kind}")
    if (
        len(request.thinker.verbatim) + sum(len(part.text) for turn in request.thinker.messages for part in turn.parts)
        > MAX_TEXT_CHARACTERS
    ):
        raise bad_request("thinker.messages", f"at most {MAX_TEXT_CHARACTERS} characters")
    seed = request.seed if request.HasField("seed") else secrets.randbits(63)
    return ValidRequest(pipeline, outputs, seed, _params(request, pipeline))


def _params(request: omni_pb2.GenerateRequest, pipeline: Pipeline) -> dict[str, stage_pb2.StageParams]:
    params = pipeline.default_params()
    for kind, values in params.items():
        given = getattr(request, kind)
        if kind == "thinker" and given.HasField("sampling"):
            _keep_absent_penalty(values.thinker.sampling, given.sampling)
        getattr(values, kind).MergeFrom(given)
    return params


def _keep_absent_penalty(defaults: stage_pb2.Sampling, given: stage_pb2.Sampling) -> None:
    """A client that says how to draw says it whole, but for what it can leave absent: then the pipeline's value stays."""
    kept = stage_pb2.Sampling()
    if defaults.HasField("repetition_penalty"):
        kept.repetition_penalty = defaults.repetition_penalty
    if defaults.HasField("top_p"):
        kept.top_p = defaults.top_p
    defaults.CopyFrom(kept)
