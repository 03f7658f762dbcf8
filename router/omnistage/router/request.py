"""From a client's GenerateRequest to a request that the rest of the router trusts. First the choice of the pipeline that answers it: the
named one, else the one that fits the request's inputs and outputs. Also whether a prompt becomes a drawing."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from omnistage.router.pipeline import PipelineFile, find_called
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import StageError, bad_request
from omnistage.wire.limits import MAX_TEXT_CHARACTERS, TooLarge, decode
from omnistage.wire.proto_values import KINDS

MISSING = {"thinker": "does not answer", "talker": "does not speak", "code2wav": "makes no sound"}
"""The lack of a pipeline that has no stage of a kind, in words, by kind."""

NO_TALKER = "has no Talker"
"""Why a pipeline with a Thinker alone gives no sound. A pipeline that draws may give sound even so."""

DRAWING = {
    "video": ("make films", "makes films", "makes no films"),
    "audio": ("make sound of a prompt", "makes sound of a prompt", "makes no sound of a prompt"),
}
"""The phrases of a refusal about pipelines that draw, by the wanted output: for several pipelines that can make it, for one pipeline that
can, and for one that cannot. An output that is not listed here counts as a picture."""
PICTURES = ("draw", "draws", "does not draw")

ABILITIES: Mapping[str, tuple[str, Callable[[PipelineFile], bool]]] = {
    "video": ("makes films", lambda pipeline: pipeline.draws and "video" in pipeline.offered),
    "sound": ("makes sound of a prompt", lambda pipeline: pipeline.draws and "audio" in pipeline.offered),
    "image": ("draws", lambda pipeline: pipeline.draws and "image" in pipeline.offered),
    "drawing": ("draws", lambda pipeline: pipeline.draws),
    "edit": ("draws from pictures", lambda pipeline: pipeline.draws and "image" in pipeline.inputs),
    "speech": ("speaks", lambda pipeline: "thinker" in pipeline.kinds and "audio" in pipeline.offered),
    "answer": ("answers", lambda pipeline: "thinker" in pipeline.kinds),
    "sees": ("looks at pictures", lambda pipeline: "thinker" in pipeline.kinds and "image" in pipeline.inputs),
    "hears": ("listens to sound", lambda pipeline: "thinker" in pipeline.kinds and "audio" in pipeline.inputs),
    "watches": ("watches films", lambda pipeline: "thinker" in pipeline.kinds and "video" in pipeline.inputs),
}
"""The abilities that a request may need of a pipeline: the words for a pipeline that has it, and whether one has it. The name of one that
no pipeline has goes to the client as metadata `lack`, and the client names a checkpoint for it."""

MAX_PIPELINES = 8
"""Largest number of pipelines that one error lists."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Says what a pipeline lacks for one request. missing_kinds: kinds of stages that the request has params for. missing_media: kinds of
    media in the request. missing_outputs: ports that the request names."""

    pipeline: PipelineFile
    request: omni_pb2.GenerateRequest
    missing_kinds: Sequence[str]
    missing_media: Sequence[str]
    missing_outputs: Sequence[str]

    @property
    def can_answer(self) -> bool:
        """Whether the pipeline lacks nothing."""
        return not (self.missing_kinds or self.missing_media or self.missing_outputs)

    @property
    def reasons(self) -> str:
        """Everything that the pipeline lacks, in words, such as "does not draw, takes no audio"."""
        reasons = [self.name_lack(kind) for kind in self.missing_kinds]
        reasons += [f"takes no {_word(medium)}" for medium in self.missing_media]
        reasons += [f"gives no {_word(output)}" for output in self.missing_outputs]
        return ", ".join(reasons[:MAX_PIPELINES])

    def name_lack(self, kind: str) -> str:
        """A phrase, such as "does not speak", for what the pipeline cannot do because it has no stage of this kind."""
        if kind == "diffusion":
            _, _, does_not_draw = _drawing(self.request.outputs)
            return does_not_draw
        if kind == "talker" and "thinker" in self.pipeline.kinds:
            return NO_TALKER
        return "does not speak a text" if kind == "thinker" and self.request.thinker.verbatim else MISSING[kind]


def find_fits(request: omni_pb2.GenerateRequest, pipelines: Mapping[str, PipelineFile]) -> dict[str, Fit]:
    """The fit of each pipeline for the request, by the pipeline's name."""
    kinds, media_kinds = [kind for kind in KINDS if request.HasField(kind)], media(request)
    return {
        name: Fit(
            pipeline,
            request,
            [kind for kind in kinds if kind not in pipeline.kinds],
            [medium for medium in media_kinds if medium not in pipeline.inputs],
            pipeline.missing_outputs(request.outputs),
        )
        for name, pipeline in pipelines.items()
    }


def choose_pipeline(request: omni_pb2.GenerateRequest, pipelines: Mapping[str, PipelineFile]) -> tuple[Fit, Collection[Fit]]:
    """Choose the pipeline that answers: the named one. If the request names none, the first, which is the default, if it can answer or
    there is no other; else the only one that can answer. Returns its fit, and the fits of all pipelines.

    A pipeline can answer if it takes every medium of the request, has a stage for each of the request's params, and gives all outputs that
    the request names. If no pipeline can answer a prompt and the request can only mean pipelines that draw, the prompt becomes a drawing. A
    question about a picture that no pipeline takes does not. Then `request` itself is changed, because a copy would hold all of its media a
    second time.

    Raises UNKNOWN_MODEL. Raises BAD_REQUEST for what cannot be drawn. Raises BAD_REQUEST for the field `model` if no pipeline can answer,
    with what each one lacks, or if several can, with their names in the metadata `candidates`."""
    fits = find_fits(request, pipelines)
    name = _choose_name(request, fits)
    pipeline = fits[name].pipeline
    if pipeline.only_draws and _is_prompt(request):
        _draw(request, pipeline)
        fits = find_fits(request, pipelines)
    return fits[name], fits.values()


def _choose_name(request: omni_pb2.GenerateRequest, fits: Mapping[str, Fit]) -> str:
    """The name of the pipeline that answers; see `choose_pipeline`. fits: of all pipelines, by name."""
    if request.model:
        return _find_named(request.model, [fit.pipeline for fit in fits.values()])
    default = next(iter(fits))
    candidates = [name for name, fit in fits.items() if fit.can_answer]
    if not candidates and _only_drawing_is_meant(request, fits.values()):
        candidates = [name for name, fit in fits.items() if fit.pipeline.draws and not (fit.missing_media or fit.missing_outputs)]
    # The candidates are in the order of the pipelines, so the default can only be the first of them.
    if len(fits) == 1 or default in candidates[:1]:
        return default
    if not candidates and (lack := _lack(request, fits.values())):
        raise StageError("BAD_REQUEST", f"nothing here {ABILITIES[lack][0]}", metadata={"field": "model", "lack": lack})
    if not candidates:
        text = "; ".join(f"{name} {fit.reasons}" for name, fit in list(fits.items())[:MAX_PIPELINES])
        if request.HasField("diffusion"):
            drawing_names = [fit.pipeline.name for fit in fits.values() if fit.pipeline.draws and not fit.missing_outputs][:MAX_PIPELINES]
            do_draw, _, _ = _drawing(request.outputs)
            text += f"; these {do_draw}: {', '.join(drawing_names)}" if drawing_names else ""
        raise StageError("BAD_REQUEST", f"no pipeline does this: {text}", metadata={"field": "model"})
    if len(candidates) > 1:
        raise _refuse_choice(candidates, "could answer this")
    return candidates[0]


def _find_named(name: str, pipelines: Sequence[PipelineFile]) -> str:
    """The own name of the pipeline that a request names. Raises UNKNOWN_MODEL, and BAD_REQUEST if several pipelines have this name besides
    their own."""
    called = [one.name for one in find_called(name, pipelines)]
    if len(called) > 1:
        raise _refuse_choice(called, f"is also called {name[:64]!r}")
    if not called:
        labels = ", ".join(f"{one.name} ({one.names[0][:64]})" if one.names else one.name for one in pipelines)
        raise StageError("UNKNOWN_MODEL", f"no pipeline {name[:64]!r}; this router has {labels}", metadata={"field": "model"})
    return called[0]


def _refuse_choice(candidates: Sequence[str], reason: str) -> StageError:
    """The refusal of a request that may mean several pipelines. reason: what each of them is or does."""
    names = candidates[:MAX_PIPELINES]
    text = f"{', '.join(names)}: each of them {reason}; name one"
    return StageError("BAD_REQUEST", text, metadata={"field": "model", "candidates": ",".join(names)})


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


def check_outputs(request: omni_pb2.GenerateRequest, fit: Fit, fits: Collection[Fit]) -> frozenset[str]:
    """The ports that the client gets of the pipeline of `fit`. fits: of all pipelines. Raises BAD_REQUEST for an output that the pipeline
    does not give, with the pipelines that give all outputs of the request."""
    pipeline = fit.pipeline
    if request.HasField("diffusion") and not pipeline.draws:
        raise _refuse_stage(fit, "diffusion", fits)
    if fit.missing_outputs:
        reason = f": it {NO_TALKER}" if "audio" in fit.missing_outputs and pipeline.kinds == {"thinker"} else ""
        able = _names([other for other in fits if not other.missing_kinds and not other.missing_outputs])
        advice = f"; {able}" if able else ""
        missing = ", ".join(repr(name[:16]) for name in fit.missing_outputs)
        fault = f"{pipeline.name} gives {', '.join(pipeline.offered)}, not {missing}{reason}{advice}"
        # No variable here keeps the error: both would keep each other, and all media of the request.
        raise _with_lack(bad_request("outputs", fault), request, fits)
    # The progress may be named beside other outputs even if the pipeline does not offer it.
    return frozenset(request.outputs or pipeline.outputs) & {*pipeline.offered}


def _refuse_stage(fit: Fit, kind: str, fits: Collection[Fit]) -> StageError:
    """The refusal of params for a stage that the pipeline lacks, with the pipelines that have that stage."""
    able = _names([other for other in fits if kind in other.pipeline.kinds and not other.missing_outputs])
    text = f"{fit.pipeline.name} {fit.name_lack(kind)}; {able or 'no other pipeline of this router does'}"
    return _with_lack(StageError("BAD_REQUEST", text, metadata={"field": kind}), fit.request, fits)


def _names(fits: Sequence[Fit]) -> str:
    """The pipelines that do what another one does not, as a clause such as "toy, toy-omni do"; empty if there is none."""
    names = [fit.pipeline.name for fit in fits[:MAX_PIPELINES]]
    return f"{', '.join(names)} {'does' if len(names) == 1 else 'do'}" if names else ""


def _wants(request: omni_pb2.GenerateRequest) -> Iterator[str]:
    """Yields the names of the ABILITIES that a request needs."""
    is_drawing = request.HasField("diffusion")
    of_outputs = {"video": "video", "image": "image", "text": "answer", "audio": "sound" if is_drawing else "speech"}
    yield from (of_outputs[output] for output in request.outputs if output in of_outputs)
    if is_drawing:
        yield "drawing"
    if request.HasField("talker") or request.HasField("code2wav"):
        yield "speech"
    if request.thinker.messages and not is_drawing and not _is_prompt(request):
        yield "answer"
    of_media = {"image": "edit"} if is_drawing else {"image": "sees", "audio": "hears", "video": "watches"}
    yield from (of_media[medium] for medium in media(request) if medium in of_media)


def _lack(request: omni_pb2.GenerateRequest, fits: Collection[Fit]) -> str:
    """The first of the ABILITIES that a request needs and no pipeline has; empty if each is there, but not all in one pipeline."""
    return next((want for want in _wants(request) if not any(ABILITIES[want][1](fit.pipeline) for fit in fits)), "")


def _with_lack(refusal: StageError, request: omni_pb2.GenerateRequest, fits: Collection[Fit]) -> StageError:
    """The refusal, with the name of what no pipeline here can do for the request, if there is such a thing, so that clients can say which
    checkpoint does it."""
    if lack := _lack(request, fits):
        refusal.metadata["lack"] = lack
    return refusal


def _drawing(outputs: Collection[str]) -> tuple[str, str, str]:
    """The three phrases of `DRAWING` for these outputs."""
    return next((phrases for output, phrases in DRAWING.items() if output in outputs), PICTURES)


def _only_drawing_is_meant(request: omni_pb2.GenerateRequest, fits: Collection[Fit]) -> bool:
    """Whether the request is a prompt that only pipelines for drawings could serve, by its outputs and params."""
    must_draw = request.HasField("diffusion")
    candidates = [fit.pipeline for fit in fits if not fit.missing_outputs and (fit.pipeline.draws or not must_draw)]
    return _is_prompt(request) and all(pipeline.only_draws for pipeline in candidates)


def _is_prompt(request: omni_pb2.GenerateRequest) -> bool:
    """Whether the request may describe a drawing: it has one turn, of the user, with text and pictures only."""
    turns = request.thinker.messages
    if len(turns) != 1 or turns[0].role != "user" or request.thinker.verbatim or request.diffusion.prompt:
        return False
    return all(part.WhichOneof("content") == "text" or _medium(_type(part)) == "image" for part in turns[0].parts)


def _draw(request: omni_pb2.GenerateRequest, pipeline: PipelineFile) -> None:
    """Change a request that is a prompt into one for a drawing. Raises BAD_REQUEST; see `_check_drawable`."""
    _check_drawable(request, pipeline)
    (turn,) = request.thinker.messages
    for part in turn.parts:
        if part.HasField("media"):
            request.diffusion.images.add().CopyFrom(part.media)
    request.diffusion.prompt = "".join(part.text for part in turn.parts)
    request.ClearField("thinker")


def _check_drawable(request: omni_pb2.GenerateRequest, pipeline: PipelineFile) -> None:
    """Raises BAD_REQUEST for a field that a drawing has no use for, and for a film or a sound that the client did not name, because each
    takes minutes and answers no question. request: a prompt."""
    if not request.outputs and "image" not in pipeline.offered:
        does_draw = next((does for output, (_, does, _) in DRAWING.items() if output in pipeline.offered), "does not answer")
        advice = f"name the outputs that are wanted, of {', '.join(pipeline.offered)}"
        raise bad_request("outputs", f"{pipeline.name} {does_draw} and does not answer: {advice}")
    set_names = [field.name for field, _ in request.thinker.ListFields() if field.name != "messages"]
    useless_fields = [f"thinker.{name}" for name in set_names] + [kind for kind in ("talker", "code2wav") if request.HasField(kind)]
    if useless_fields:
        kind, _, name = useless_fields[0].partition(".")
        message = getattr(request, kind)
        field = _deepest(useless_fields[0], getattr(message, name) if name else message)
        raise bad_request(field, f"is for text and sound, and {pipeline.name} only draws: leave it out; it takes the fields of diffusion")
    streamed_ports = [part.port for part in request.thinker.messages[0].parts if part.HasField("port")]
    if streamed_ports:
        text = f"{pipeline.name} only draws, and what it draws from is not streamed: ask for a drawing, whose pictures are in the message"
        raise bad_request("thinker.messages.parts.port", text, port=streamed_ports[0])


def _deepest(field: str, value: object) -> str:
    """The path of the first set field within a message, followed down to a value that is no message. value: the message, or a value that
    is none. field: its path."""
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
    request. lack: the name of what no pipeline here does, if the pipeline does not take the media of the request; a stage refuses them."""

    pipeline: PipelineFile
    outputs: frozenset[str]
    seed: int
    params: Mapping[str, stage_pb2.StageParams]
    request_id: str
    resume: stage_pb2.Resume | None
    revisions: Sequence[str]
    batches: bool
    ports: Sequence[str]
    lack: str = ""

    def add_lack(self, refusal: StageError) -> None:
        """Note in a stage's refusal of media that no pipeline here takes such media for this request."""
        if self.lack and refusal.metadata.get("field", "").endswith(MEDIA_FIELDS):
            refusal.metadata["lack"] = self.lack


MEDIA_FIELDS = (".media", ".media_type", ".images")
"""Ends of the names of fields with media, by which stages refuse them."""


async def parse(data: bytes, turn: Callable[[], AbstractAsyncContextManager[None]]) -> omni_pb2.GenerateRequest:
    """The request in these bytes. turn: makes a context manager that is entered while a large request is decoded.

    Raises BAD_REQUEST for bytes that are no request, or that hold more of something than the contract allows; raises the errors of
    `turn`."""
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
    """Choose the pipeline, and check what the router itself needs; a stage checks the values of its own params. The choice may turn the
    request into a drawing.

    Raises StageError."""
    characters = len(request.thinker.verbatim) + sum(len(part.text) for turn in request.thinker.messages for part in turn.parts)
    if characters > MAX_TEXT_CHARACTERS:
        raise bad_request("thinker.messages", f"at most {MAX_TEXT_CHARACTERS} characters")
    fit, fits = choose_pipeline(request, pipelines)
    pipeline = fit.pipeline
    for name in ("conversation_id", "request_id"):
        if not is_id(getattr(request, name)):
            raise bad_request(name, "at most 64 characters of A-Z a-z 0-9 _ -")
    outputs = check_outputs(request, fit, fits)
    if fit.missing_kinds:
        raise _refuse_stage(fit, fit.missing_kinds[0], fits)
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
        _lack(request, fits) if fit.missing_media else "",
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
    # A text that is spoken as it was given is plain, unless the request or the pipeline says that it is Markdown.
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
