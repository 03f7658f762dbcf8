"""Which pipeline answers a request that names none: by what the request gives, and what it wants."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.router.pipeline import Pipeline
from omnistage.v1 import omni_pb2
from omnistage.wire.errors import StageError
from omnistage.wire.kinds import KINDS

MOST_NAMED = 8
"""Pipelines that an error tells of."""


def chosen(request: omni_pb2.GenerateRequest, pipelines: Mapping[str, Pipeline]) -> Pipeline:
    """The first pipeline, which is the default, if it can do what is asked, or if there is no other; else the only one that can.

    A pipeline can if it takes every medium of the request, has a stage for each of its params, and gives all outputs that it names. Raises
    BAD_REQUEST for the field `model`: where several can, with their names in the metadata `candidates`, and where none can, with what each
    one lacks."""
    default, *others = pipelines.values()
    if not others:
        return default
    given = media(request)
    lacks = {name: _lacks(pipeline, request, given) for name, pipeline in pipelines.items()}
    able = [name for name, lacking in lacks.items() if not lacking]
    if default.name in able:
        return default
    if len(able) == 1:
        return pipelines[able[0]]
    if able:
        named = able[:MOST_NAMED]
        raise StageError(
            "BAD_REQUEST",
            f"model: {', '.join(named)}: each of them could answer this; name one",
            metadata={"field": "model", "candidates": ",".join(named)},
        )
    told = "; ".join(f"{name} {lacking}" for name, lacking in list(lacks.items())[:MOST_NAMED])
    raise StageError("BAD_REQUEST", f"model: no pipeline does this: {told}", metadata={"field": "model"})


def media(request: omni_pb2.GenerateRequest) -> list[str]:
    """The kinds of media that a request gives, as pipelines name their inputs: text, image, audio, video; else that of the type."""
    parts = [part for message in request.thinker.messages for part in message.parts]
    types = [part.media.media_type for part in parts if part.HasField("media")]
    types += [part.media_type for part in parts if part.media_type]  # Of what is streamed.
    types += [image.media_type for image in request.diffusion.images]
    has_text = request.thinker.verbatim or request.diffusion.prompt or any(part.text for part in parts)
    return sorted({media_type.lower().partition("/")[0] for media_type in types} | ({"text"} if has_text else set()))


def _lacks(pipeline: Pipeline, request: omni_pb2.GenerateRequest, given: list[str]) -> str:
    """What keeps a pipeline from answering; empty: nothing."""
    kinds = {stage.kind for stage in pipeline.stages}
    told = [f"has no {kind}" for kind in KINDS if request.HasField(kind) and kind not in kinds]
    told += [f"takes no {_word(medium)}" for medium in given if medium not in pipeline.inputs]
    told += [f"gives no {_word(output)}" for output in sorted(set(request.outputs)) if output not in pipeline.offered]
    return ", ".join(told[:MOST_NAMED])


def _word(text: str) -> str:
    """Of a client, for a message of one line."""
    return text if text.isidentifier() and len(text) <= 16 else repr(text[:16])
