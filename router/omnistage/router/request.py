"""From a client's GenerateRequest to a request that the rest of the router trusts. First the choice of the pipeline that answers it: the
named one, else the one that fits the request's inputs and outputs. Also whether a prompt becomes a drawing."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from omnistage.router.pipeline import PipelineFile
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import StageError, bad_request
from omnistage.wire.limits import MAX_TEXT_CHARACTERS, TooLarge, decode
from omnistage.wire.proto_values import KINDS

MISSING = {"thinker": "does not answer", "talker": "does not speak", "code2wav": "makes no sound"}
"""The ability that a pipeline lacks if it has no stage of a kind, by kind."""

NO_TALKER = "has no Talker"
"""Why a pipeline with a Thinker alone gives no sound. A pipeline that draws may give sound even so."""

DRAWING = {
    "video": ("make films", "makes films", "makes no films"),
    "audio": ("make sound of a prompt", "makes sound of a prompt", "makes no sound of a prompt"),
}
"""The phrases of a refusal about pipelines that draw, by the wanted output: for several pipelines that can make it, for one pipeline that
can, and for one that cannot. An output that is not listed here counts as a picture."""
PICTURES = ("draw", "draws", "does not draw")

MOST_NAMED = 8
"""Largest number of pipelines that one error lists."""


def choose_pipeline(request: omni_pb2.GenerateRequest, pipelines: Mapping[str, PipelineFile]) -> PipelineFile:
    """Choose the pipeline that answers: the named pipeline; else the first, which is the default, if it can answer or there is no other;
    else the only pipeline that can answer.

    A pipeline can answer if it takes every medium of the request, has a stage for each of the request's params, and gives all outputs that
    the request names. If no pipeline can answer a prompt and the request can only mean pipelines that draw, the prompt becomes a drawing. A
    question about a picture that no pipeline takes does not. Then `request` itself is changed, because a copy would hold all of its media a
    second time.

    Raises UNKNOWN_MODEL; BAD_REQUEST for what cannot be drawn; BAD_REQUEST for the field `model`, with the candidates' names in the
    metadata `candidates` if several pipelines can answer, and with what each pipeline lacks if none can."""
    if request.model:
        chosen_pipeline = pipelines.get(request.model)
        if chosen_pipeline is None:
            text = f"no pipeline {request.model[:64]!r}; this router has {', '.join(pipelines)}"
            raise StageError("UNKNOWN_MODEL", text, metadata={"field": "model"})
        pool = {chosen_pipeline.name: chosen_pipeline}
    else:
        pool = dict(pipelines)
    if len(pool) > 1:
        kinds, media_kinds = [kind for kind in KINDS if request.HasField(kind)], media(request)
        lacks = {
            name: _lacks(pipeline, kinds, media_kinds, request.outputs, bool(request.thinker.verbatim)) for name, pipeline in pool.items()
        }
        able = [pipelines[name] for name, lack in lacks.items() if not lack]
        if not able and _only_drawing_is_meant(request, pool.values()):
            able = [pipeline for pipeline in pool.values() if not _lacks(pipeline, ["diffusion"], media_kinds, request.outputs)]
        pipeline = _only_able(able, pipelines) if able else _refuse_all(request, lacks, pipelines)
    else:
        (pipeline,) = pool.values()
    if pipeline.only_draws and _is_prompt(request):
        _draw(request, pipeline)
    return pipeline


def media(request: omni_pb2.GenerateRequest) -> list[str]:
    """The kinds of media that a request gives, as pipelines name their inputs: text, image, audio, video; for any other kind the first part
    of its media type."""
    parts = [part for message in request.thinker.messages for part in message.parts]
    types = [part.media.media_type for part in parts if part.HasField("media")]
    types += [part.media_type for part in parts if part.media_type]  # Types of streamed media.
    drawing = request.diffusion
    types += [image.media_type for image in drawing.images]
    types += [getattr(drawing, name).media_type for name in ("mask_image", "control_image") if drawing.HasField(name)]
    has_text = request.thinker.verbatim or request.diffusion.prompt or any(part.text for part in parts)
    return sorted({_medium(media_type) for media_type in types} | ({"text"} if has_text else set()))


def missing_ability(pipeline: PipelineFile, kind: str, is_verbatim: bool = False, outputs: Collection[str] = ()) -> str:
    """A phrase, such as "does not speak", for what a pipeline cannot do because it has no stage of this kind. is_verbatim: the request is a
    text to speak. outputs: the outputs that the request names."""
    if kind == "diffusion":
        return _drawing(outputs)[2]
    if kind == "talker" and "thinker" in pipeline.kinds:
        return NO_TALKER
    return "does not speak a text" if kind == "thinker" and is_verbatim else MISSING[kind]


def stage_refusal(request: omni_pb2.GenerateRequest, pipeline: PipelineFile, kind: str, pipelines: Collection[PipelineFile]) -> StageError:
    """The refusal of params for a stage that the pipeline lacks, with the pipelines that have that stage."""
    able = [one.name for one in pipelines if kind in one.kinds and not one.lacking(request.outputs)][:MOST_NAMED]
    others = f"{', '.join(able)} {'does' if len(able) == 1 else 'do'}" if able else "no other pipeline of this router does"
    ability = missing_ability(pipeline, kind, bool(request.thinker.verbatim), request.outputs)
    text = f"{pipeline.name} {ability}; {others}"
    return StageError("BAD_REQUEST", text, metadata={"field": kind})


def those_that_draw(pipelines: Collection[PipelineFile], outputs: Collection[str]) -> str:
    """The pipelines that draw these outputs, in words for a client that asked for them."""
    names = [pipeline.name for pipeline in pipelines if pipeline.draws and not pipeline.lacking(outputs)]
    do, does, _ = _drawing(outputs)
    return f"these {do}: {', '.join(names[:MOST_NAMED])}" if names else f"no pipeline of this router {does}"


def check_outputs(request: omni_pb2.GenerateRequest, pipeline: PipelineFile, pipelines: Collection[PipelineFile]) -> frozenset[str]:
    """The ports that the client gets. Raises BAD_REQUEST for an output that the pipeline does not give, with the pipelines that give all
    outputs of the request."""
    if request.HasField("diffusion") and not pipeline.draws:
        raise stage_refusal(request, pipeline, "diffusion", pipelines)
    if missing := pipeline.lacking(request.outputs):
        reason = f": it {NO_TALKER}" if "audio" in missing and pipeline.kinds == {"thinker"} else ""
        kinds = [kind for kind in KINDS if request.HasField(kind)]
        able = [one.name for one in pipelines if one.kinds.issuperset(kinds) and not one.lacking(request.outputs)][:MOST_NAMED]
        others = f"; {', '.join(able)} {'does' if len(able) == 1 else 'do'}" if able else ""
        text = f"{pipeline.name} gives {', '.join(pipeline.offered)}, not {', '.join(repr(name[:16]) for name in missing)}{reason}{others}"
        raise bad_request("outputs", text)
    return frozenset(request.outputs or pipeline.outputs) & {*pipeline.offered}


def _drawing(outputs: Collection[str]) -> tuple[str, str, str]:
    """The three words of `DRAWING` for these outputs."""
    return next((words for output, words in DRAWING.items() if output in outputs), PICTURES)


def _only_able(able: Sequence[PipelineFile], pipelines: Mapping[str, PipelineFile]) -> PipelineFile:
    """The default pipeline if it is among the able ones, else the only able one. Raises BAD_REQUEST if there are several and none is the
    default."""
    if able[0] is next(iter(pipelines.values())) or len(able) == 1:
        return able[0]
    names = [pipeline.name for pipeline in able[:MOST_NAMED]]
    raise StageError(
        "BAD_REQUEST",
        f"{', '.join(names)}: each of them could answer this; name one",
        metadata={"field": "model", "candidates": ",".join(names)},
    )


def _refuse_all(request: omni_pb2.GenerateRequest, lacks: Mapping[str, str], pipelines: Mapping[str, PipelineFile]) -> PipelineFile:
    """Refuse a request that no pipeline can answer. Raises BAD_REQUEST with what each pipeline lacks."""
    text = "; ".join(f"{name} {lack}" for name, lack in list(lacks.items())[:MOST_NAMED])
    if request.HasField("diffusion"):
        text += f"; {those_that_draw(pipelines.values(), request.outputs)}"
    raise StageError("BAD_REQUEST", f"no pipeline does this: {text}", metadata={"field": "model"})


def _lacks(
    pipeline: PipelineFile, kinds: Collection[str], media_kinds: Collection[str], outputs: Collection[str], is_verbatim: bool = False
) -> str:
    """The reason why a pipeline cannot answer; empty: it can. kinds: kinds of stages that it needs. media_kinds: media in the request."""
    lacks = [missing_ability(pipeline, kind, is_verbatim, outputs) for kind in kinds if kind not in pipeline.kinds]
    lacks += [f"takes no {_word(medium)}" for medium in media_kinds if medium not in pipeline.inputs]
    lacks += [f"gives no {_word(output)}" for output in pipeline.lacking(outputs)]
    return ", ".join(lacks[:MOST_NAMED])


def _only_drawing_is_meant(request: omni_pb2.GenerateRequest, pipelines: Collection[PipelineFile]) -> bool:
    """Whether the request is a prompt that only pipelines for drawings could serve, by its outputs and params."""
    draws = request.HasField("diffusion")
    candidates = [pipeline for pipeline in pipelines if not pipeline.lacking(request.outputs) and (pipeline.draws or not draws)]
    return _is_prompt(request) and all(pipeline.only_draws for pipeline in candidates)


def _is_prompt(request: omni_pb2.GenerateRequest) -> bool:
    """Whether the request may describe a drawing: it has one turn, of the user, with text and pictures only."""
    turns = request.thinker.messages
    if len(turns) != 1 or turns[0].role != "user" or request.thinker.verbatim or request.diffusion.prompt:
        return False
    return all(part.WhichOneof("content") == "text" or _medium(_type(part)) == "image" for part in turns[0].parts)


def _draw(request: omni_pb2.GenerateRequest, pipeline: PipelineFile) -> None:
    """Change a request that is a prompt into one for a drawing. Raises BAD_REQUEST for a field that a drawing has no use for, and for a
    film or a sound that the client did not name, because each takes minutes and answers no question."""
    (turn,) = request.thinker.messages
    if not request.outputs and "image" not in pipeline.offered:
        text = next((words[1] for output, words in DRAWING.items() if output in pipeline.offered), "does not answer")
        advice = f"name the outputs that are wanted, of {', '.join(pipeline.offered)}"
        raise bad_request("outputs", f"{pipeline.name} {text} and does not answer: {advice}")
    thinker = [field.name for field, _ in request.thinker.ListFields() if field.name != "messages"]
    fields = [f"thinker.{name}" for name in thinker] + [kind for kind in ("talker", "code2wav") if request.HasField(kind)]
    if fields:
        kind, _, name = fields[0].partition(".")
        message = getattr(request, kind)
        field = _deepest(fields[0], getattr(message, name) if name else message)
        raise bad_request(field, f"is for text and sound, and {pipeline.name} only draws: leave it out; it takes the fields of diffusion")
    if any(part.HasField("port") for part in turn.parts):
        port = next(part.port for part in turn.parts if part.HasField("port"))
        text = f"{pipeline.name} only draws, and what it draws from is not streamed: ask for a drawing, whose pictures are in the message"
        raise bad_request("thinker.messages.parts.port", text, port=port)
    for part in turn.parts:
        if part.HasField("media"):
            request.diffusion.images.add().CopyFrom(part.media)
    request.diffusion.prompt = "".join(part.text for part in turn.parts)
    request.ClearField("thinker")


def _deepest(field: str, value: object) -> str:
    """The path of the first set field, followed down to a value that is no message. value: a message or a value; field: its path."""
    while isinstance(value, Message) and (fields := value.ListFields()):
        descriptor, value = fields[0]
        field += f".{descriptor.name}"
    return field


def _type(part: stage_pb2.Part) -> str:
    """Media type of a part that is not text."""
    return part.media.media_type if part.HasField("media") else part.media_type


def _medium(media_type: str) -> str:
    return media_type.lower().partition("/")[0]


def _word(text: str) -> str:
    """The word of a client, shortened and without unsafe characters, for a message of one line."""
    return text if text.isidentifier() and len(text) <= 16 else repr(text[:16])


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
