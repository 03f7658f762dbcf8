"""The body of an edit: a form with files, or JSON with data: URLs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from omnistage.gateway.failure import ApiError, invalid
from omnistage.gateway.fetching import Fetch
from omnistage.gateway.pictures_schema import MOST_GIVEN, EditRequest, PictureReference, PictureRequest

FORM, JSON = "multipart/form-data", "application/json"

MOST_FIELDS = 64
FIELD_BYTES = 1 << 20
"""Of a field that is no file."""

PIECE_BYTES = 1 << 20

GUIDES = {"mask": "mask_image", "control_image": "control_image"}
"""Fields of single pictures, and the arguments of the client library that they are."""

PICTURES = ("image", "image[]")
"""Their fields in a form; there may be several of either."""


@dataclass(frozen=True, slots=True)
class Edit:
    """pictures: the bytes of a file, or a URL. field: where they stand in the body. guides: more of them, by their fields."""

    asked: PictureRequest
    pictures: Sequence[bytes | str]
    field: str
    guides: Mapping[str, bytes | str]


class _InMemory(MultiPartParser):
    """What the guard has let in is in memory; nothing is written to disk."""

    spool_max_size = 1 << 40


async def read_edit(request: Request) -> Edit:
    """Raises ApiError, RequestValidationError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        return await _of_form(request)
    if kind == JSON:
        return _of_json(request.scope["state"]["json"])
    hint = f"Send a form, Content-Type: {FORM}, with files, or {JSON} with data: URLs."
    raise ApiError(400, f"the body is neither {FORM} nor {JSON}", code="invalid_body", hint=hint)


async def _of_form(request: Request) -> Edit:
    most = MOST_GIVEN + len(GUIDES)
    pieces = _pieces(await request.body())
    parser = _InMemory(request.headers, pieces, max_files=most, max_fields=MOST_FIELDS, max_part_size=FIELD_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the form cannot be read: {error.message}", code="invalid_body") from None
    pictures, guides, fields = list[bytes](), dict[str, bytes | str](), dict[str, str]()
    try:
        for name, value in form.multi_items():
            if name in GUIDES and name not in guides and isinstance(value, UploadFile):
                guides[name] = await value.read()
            elif name in PICTURES and isinstance(value, UploadFile):
                pictures.append(await value.read())
            elif name in PICTURES or name in GUIDES or isinstance(value, UploadFile):
                raise invalid(name[:128], "must be one file" if name in (*PICTURES, *GUIDES) else "is a file")
            else:
                fields[name] = value
    finally:
        await form.close()
    if not 0 < len(pictures) <= MOST_GIVEN:
        raise invalid("image", f"give 1 to {MOST_GIVEN} pictures, each as a file of that name")
    try:
        return Edit(PictureRequest.model_validate(fields), pictures, "image", guides)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    """So that neither others on the event loop wait for a large form, nor all of it is there once more."""
    for place in range(0, len(body), PIECE_BYTES):
        yield body[place : place + PIECE_BYTES]
        await asyncio.sleep(0)


def _of_json(body: object) -> Edit:
    try:
        asked = EditRequest.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    return Edit(asked, [_url(reference, f"images[{n}]") for n, reference in enumerate(asked.images)], "images", guides_of(asked))


def guides_of(asked: PictureRequest) -> dict[str, bytes | str]:
    """Of a body in JSON: URLs, by field. Raises ApiError."""
    references: dict[str, PictureReference | None] = {name: getattr(asked, name, None) for name in GUIDES}
    return {name: _url(reference, name) for name, reference in references.items() if reference is not None}


def _url(reference: PictureReference, where: str) -> str:
    if reference.file_id is not None:
        raise invalid(f"{where}.file_id", "no files are kept here to be named; give the picture as a data: URL in image_url")
    if reference.image_url is None:
        raise invalid(f"{where}.image_url", "is missing; give the picture as a data: URL")
    return reference.image_url


async def fetched(pictures: Mapping[str, bytes | str], fetch: Fetch) -> list[bytes | str]:
    """Pictures by their fields as the client library takes them: data: URLs stay. No other text may get there, where it would be a path.
    Raises ApiError."""
    made = list(pictures.values())
    for n, (field, given) in enumerate(pictures.items()):
        if isinstance(given, str) and given[:5].lower() != "data:":
            made[n] = await fetch(given, f"{field}.image_url")
    return made
