"""Makes GET /openapi.json, the description of what the endpoints take and return, errors and streams too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from omnistage.gateway.answering import EVENTS
from omnistage.gateway.parsed import new_router
from omnistage.gateway.sound import MEDIA_TYPES

_JSON = "application/json"

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
                "reason": {
                    "type": "string",
                    "description": "a name of omnistage.v1.ErrorReason, or the code in capitals",
                },
                "hint": {**_TEXT_OR_NOTHING, "description": "what to do"},
            },
        }
    },
    "example": {
        "error": {
            "message": "temperature: must be at most 2",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
            "reason": "BAD_REQUEST",
            "hint": None,
        }
    },
}

_RETRY_AFTER = {"description": "seconds after which to ask again", "schema": {"type": "integer", "minimum": 0}}

_SOUND = tuple(sorted(set(MEDIA_TYPES.values())))

ALSO: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": (EVENTS,),
    "/v1/responses": (EVENTS,),
    "/v1/audio/speech": (EVENTS, *_SOUND),
    "/v1/audio/generate": (EVENTS, *_SOUND),
    "/v1/images/generations": (EVENTS,),
    "/v1/images/edits": (EVENTS,),
}
"""Media types that an answer may have in addition to JSON, by the path of its endpoint."""

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"model": "smol", "messages": [{"role": "user", "content": "What is a kite?"}], "max_completion_tokens": 48},
    "/v1/responses": {"model": "smol", "input": "What is a kite?", "max_output_tokens": 48},
    "/v1/audio/speech": {"model": "tts-1", "voice": "alloy", "input": "Good morning."},
    "/v1/audio/generate": {"prompt": "rain on a tin roof", "seconds": 10, "response_format": "flac"},
    "/v1/videos": {"prompt": "a paper boat on a pond", "size": "832x480", "seconds": 5},
    "/v1/images/generations": {"prompt": "a red circle on a blue background"},
}


def document(app: FastAPI) -> None:
    """Add the endpoint of the OpenAPI document. It is made and serialized once: it has some 100 KB, and anybody may ask for it."""
    router = new_router("", "document")

    @cache
    def serialized() -> bytes:
        document_fields = app.openapi()
        for path, operations in document_fields["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        components = document_fields.setdefault("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            components.get("schemas", {}).pop(name, None)
        components.setdefault("schemas", {})["Error"] = ERROR
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "Any key: whose the request is."}}
        document_fields["security"] = [{}, {"key": []}]
        return json.dumps(document_fields, separators=(",", ":")).encode()

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """Give the document."""
        return Response(serialized(), media_type=_JSON)

    app.include_router(router)


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Complete one operation of the document: errors, media types, an example."""
    responses = operation["responses"]
    responses.pop("422", None)
    if path.startswith("/v1/"):
        error = {"content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
        responses.setdefault("4XX", {"description": "The request is wrong.", **error})
        responses.setdefault("503", {"description": "It passes: ask again.", "headers": {"Retry-After": _RETRY_AFTER}, **error})
        responses.setdefault("500", {"description": "A fault of the server.", **error})
    content = responses["200"].setdefault("content", {})
    for media_type in ALSO.get(path, ()):
        content.setdefault(media_type, {"schema": {}})
    body = operation.get("requestBody", {}).get("content", {}).get(_JSON)
    if body is not None and path in EXAMPLES:
        body.setdefault("example", EXAMPLES[path])
