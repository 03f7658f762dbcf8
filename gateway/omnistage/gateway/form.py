"""Reads bodies that are forms, with files and fields, or JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from omnistage.gateway.failure import ApiError

B = TypeVar("B", bound=BaseModel)

FORM, JSON = "multipart/form-data", "application/json"

MOST_FIELDS = 64
FIELD_BYTES = 1 << 20
"""The most bytes of a field that is not a file."""

PIECE_BYTES = 1 << 20


class _InMemory(MultiPartParser):
    """Parses a form in memory: the guard has bounded the body, and nothing is written to disk."""

    spool_max_size = 1 << 40


def is_form(request: Request) -> bool:
    """Whether the body is a form; False: it is JSON. Raises ApiError if it is neither."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (FORM, JSON):
        hint = f"Send a form, Content-Type: {FORM}, with files, or {JSON} with data: URLs."
        raise ApiError(400, f"the body is neither {FORM} nor {JSON}", code="invalid_body", hint=hint)
    return kind == FORM


async def form_of(request: Request, most_files: int) -> list[tuple[str, bytes | str]]:
    """The names and values of a form, in order: the bytes of files, and texts. Raises ApiError."""
    pieces = _pieces(b"".join([piece async for piece in request.stream()]))  # `request.body` would hold it to the end of the request.
    parser = _InMemory(request.headers, pieces, max_files=most_files, max_fields=MOST_FIELDS, max_part_size=FIELD_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the form cannot be read: {error.message}", code="invalid_body") from None
    try:
        return [(name, await value.read() if isinstance(value, UploadFile) else value) for name, value in form.multi_items()]
    finally:
        await form.close()


def validate_body(kind: type[B], body: object) -> B:
    """The body as an object of the class `kind`. Raises RequestValidationError, which the app answers."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces without a second copy, so that other requests go on while a large form is parsed."""
    for place in range(0, len(body), PIECE_BYTES):
        yield body[place : place + PIECE_BYTES]
        await asyncio.sleep(0)
