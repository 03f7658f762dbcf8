"""The facts that the gateway gives of itself: its pipelines and voices, its state for programs that watch it, and GET /openapi.json.

The document there describes what the endpoints take and return, errors and streams too."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from omnistage.client.connection import Pipeline
from omnistage.client.errors import OmniError
from omnistage.client.options import ABOUT
from omnistage.gateway.accounts import ANSWERS
from omnistage.gateway.answering import EVENTS
from omnistage.gateway.body import new_router
from omnistage.gateway.door import Door, ThisDoor
from omnistage.gateway.failure import ApiError, is_ollama
from omnistage.gateway.offer import SPEAK
from omnistage.gateway.ollama import LINES
from omnistage.gateway.sound import MEDIA_TYPES

router = new_router("")

CREATED = int(time.time())
"""No server knows how old a pipeline is: all of them count as old as this process."""


@router.get("/v1/models", tags=["models"])
async def models(door: ThisDoor) -> dict[str, Any]:
    """All pipelines, also those that are still starting."""
    return {"object": "list", "data": [_model(one) for one in await door.offer.pipelines()]}


@router.get("/v1/models/{model:path}", tags=["models"])
async def model(door: ThisDoor, model: str) -> dict[str, Any]:
    """One pipeline, in its present state."""
    await door.offer.pipelines()
    return _model(await door.offer.pipeline(model))


@router.get("/v1/audio/voices", tags=["models"])
async def voices(door: ThisDoor) -> dict[str, Any]:
    """All voices, each with the pipelines that have it. Open WebUI and others read `voices`, and there `id` and `name`."""
    pipelines = await door.offer.pipelines()
    names = sorted({voice for one in pipelines for voice in one.voices})
    voices = [_voice(name, pipelines) for name in names]
    return {"object": "list", "data": voices, "voices": voices, "names": names}


@router.get("/v1/audio/models", tags=["models"])
async def speakers(door: ThisDoor) -> dict[str, Any]:
    """The pipelines that speak a text. Open WebUI lists them, and reads `models`."""
    models = [_model(one) for one in await door.offer.pipelines() if SPEAK.has(one)]
    return {"object": "list", "data": models, "models": models}


def _voice(name: str, pipelines: Sequence[Pipeline]) -> dict[str, Any]:
    """A voice in the shape of OpenAI's custom voices, with the models that speak with it."""
    models = [one.name for one in pipelines if name in one.voices]
    return {"id": name, "object": "audio.voice", "name": name, "created_at": CREATED, "models": models}


def _model(pipeline: Pipeline) -> dict[str, Any]:
    """A pipeline in OpenAI's shape, with its inputs and outputs."""
    facts = {name: getattr(pipeline, name) for name in ("names", "description", "state", "stages", "inputs", "outputs", "voices")}
    openai_facts = {"id": pipeline.name, "object": "model", "created": CREATED, "owned_by": "omnistage"}
    return {**openai_facts, **facts, "outputs_on_request": pipeline.on_request, "unsure_outputs": pipeline.unsure_outputs}


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["state"])
async def health() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "It cannot answer now.", "content": {"application/json": {}}}}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", tags=["state"], responses=NOT_READY)
async def ready(door: ThisDoor) -> Response:
    """The gateway takes requests, its router answers, and a pipeline is ready."""
    reason = await _not_ready(door)
    if reason:
        return JSONResponse({"status": "not ready", "why": reason}, 503, {"Retry-After": "1"})
    return JSONResponse({"status": "ready"})


@router.get("/metrics", tags=["state"], response_class=PlainTextResponse)
async def metrics(door: ThisDoor) -> Response:
    """Metrics of this process, for Prometheus."""
    return Response(generate_latest(door.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _not_ready(door: Door) -> str:
    """The reason why the gateway cannot answer now; empty if it can."""
    if not door.serves:
        return "it is ending"
    try:
        pipelines = await door.offer.pipelines()
    except OmniError as error:
        return error.message
    return "no pipeline is ready" if all(one.state == "starting" for one in pipelines) else ""


_JSON = "application/json"

_PYTHON = re.compile(r"[,;:] [^`.;]*(?:`[^`]*`[^`.;]*)+")
"""Parts of sentences that name something of the client library."""

_TEXT_OR_NOTHING = {"type": ["string", "null"]}

ERROR: Mapping[str, Any] = {
    "type": "object",
    "description": "What went wrong, in OpenAI's form, and beside it the reason of the router and what to do.",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "reason", "hint"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string", "enum": ["invalid_request_error", "server_error"]},
                "param": {**_TEXT_OR_NOTHING, "description": "the field that is wrong"},
                "code": {**_TEXT_OR_NOTHING, "description": "for programs"},
                "reason": {"type": "string", "description": "a name of omnistage.v1.ErrorReason, or the code in capitals"},
                "hint": {**_TEXT_OR_NOTHING, "description": "what to do"},
            },
        }
    },
    "example": ApiError(400, "temperature: must be at most 2", param="temperature", code="invalid_value").body,
}

OLLAMA_ERROR: Mapping[str, Any] = {
    "type": "object",
    "description": "What went wrong, in Ollama's form.",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {"error": {"type": "string", "minLength": 1}},
}

_RETRY_AFTER = {"description": "seconds after which to ask again", "schema": {"type": "integer", "minimum": 0}}

_SOUND = tuple(sorted(set(MEDIA_TYPES.values())))

ALSO: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": (EVENTS,),
    "/v1/completions": (EVENTS,),
    "/v1/responses": (EVENTS,),
    "/v1/audio/speech": (EVENTS, *_SOUND),
    "/v1/audio/generate": (EVENTS, *_SOUND),
    "/v1/images/generations": (EVENTS,),
    "/v1/images/edits": (_JSON, EVENTS),
    "/api/chat": (LINES,),
    "/api/generate": (LINES,),
}
"""Media types that an answer may have, in addition to those that FastAPI knows, by the path of its endpoint."""

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"model": "smol", "messages": [{"role": "user", "content": "What is a kite?"}], "max_completion_tokens": 48},
    "/v1/completions": {"model": "smol", "prompt": "What is a kite?", "max_tokens": 48},
    "/v1/responses": {"model": "smol", "input": "What is a kite?", "max_output_tokens": 48},
    "/v1/audio/speech": {"model": "tts-1", "voice": "alloy", "input": "Good morning."},
    "/v1/audio/generate": {"prompt": "rain on a tin roof", "seconds": 10, "response_format": "flac"},
    "/v1/videos": {"prompt": "a paper boat on a pond", "size": "832x480", "seconds": 5},
    "/v1/images/generations": {"prompt": "a red circle on a blue background"},
    "/api/chat": {"model": "smol", "messages": [{"role": "user", "content": "What is a kite?"}]},
    "/api/generate": {"model": "smol", "prompt": "What is a kite?"},
    "/api/show": {"model": "smol"},
}


def document(app: FastAPI) -> None:
    """Add the endpoint of the OpenAPI document. It is made and serialized once: it has some 100 KB, and anybody may ask for it."""

    @cache
    def serialized() -> bytes:
        document_fields = app.openapi()
        for path, operations in document_fields["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        components = document_fields.setdefault("components", {})
        for schema in components.get("schemas", {}).values():
            _describe(schema.get("properties", {}))
        for name in ("HTTPValidationError", "ValidationError"):
            components.get("schemas", {}).pop(name, None)
        components.setdefault("schemas", {}).update(Error=ERROR, OllamaError=OLLAMA_ERROR)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "Any key: whose the request is."}}
        document_fields["security"] = [{}, {"key": []}]
        return json.dumps(document_fields, separators=(",", ":")).encode()

    document_router = new_router("")

    @document_router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """Give the document."""
        return Response(serialized(), media_type=_JSON)

    app.include_router(document_router)


def _describe(fields: dict[str, dict[str, Any]]) -> None:
    """Give fields that are options of the client library the words that the contract has for them. fields: schemas by name."""
    for name, schema in fields.items():
        forms = schema.get("anyOf", [schema])
        # An object, or words, of an interface is another thing of the same name.
        if name not in ABOUT or any("$ref" in form or ("enum" in form and not ABOUT[name].allowed) for form in forms):
            continue
        default = "" if ABOUT[name].default == "none" else f" Default: {ABOUT[name].default}."
        schema.setdefault("description", _PYTHON.sub("", ABOUT[name].meaning) + default)


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Complete one operation of the document: errors, media types, words about fields, an example."""
    responses = operation["responses"]
    responses.pop("422", None)
    if path.startswith(ANSWERS):
        name = "OllamaError" if is_ollama(path) else "Error"
        error = {"content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
        responses.setdefault("4XX", {"description": "The request is wrong.", **error})
        responses.setdefault("503", {"description": "It passes: ask again.", "headers": {"Retry-After": _RETRY_AFTER}, **error})
        responses.setdefault("500", {"description": "A fault of the server.", **error})
    content = responses["200"].setdefault("content", {})
    for media_type in ALSO.get(path, ()):
        content.setdefault(media_type, {"schema": {}})
    bodies = operation.get("requestBody", {}).get("content", {})
    for form in bodies.values():
        _describe(form["schema"].get("properties", {}))
    body = bodies.get(_JSON)
    if body is not None and path in EXAMPLES:
        body.setdefault("example", EXAMPLES[path])
