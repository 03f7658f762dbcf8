"""Reads the body of an edit: a form with files, or JSON with data: URLs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from omnistage.gateway.failure import invalid
from omnistage.gateway.fetching import Fetch
from omnistage.gateway.form import form_of, is_form, validate_body
from omnistage.gateway.pictures_schema import MOST_GIVEN, EditRequest, PictureReference, PictureRequest

GUIDES = {"mask": "mask_image", "control_image": "control_image"}
"""Fields of single pictures, and the client library's argument for each."""

PICTURES = ("image", "image[]")
"""The fields of pictures in a form; each may be there several times."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit that was asked for. pictures: those to draw from, each the bytes of a file, or a URL. field: the name of their field in
    the body. guides: further pictures, by their fields."""

    asked: PictureRequest
    pictures: list[bytes | str]
    field: str
    guides: dict[str, bytes | str]


async def read_edit(request: Request) -> Edit:
    """The edit in a request. Raises ApiError, RequestValidationError."""
    if is_form(request):
        return await _of_form(request)
    body = validate_body(EditRequest, request.scope["state"]["json"])
    pictures: list[bytes | str] = [url_of(reference, f"images[{n}]") for n, reference in enumerate(body.images)]
    body.images.clear()
    return Edit(body, pictures, "images", take_guides(body))


async def _of_form(request: Request) -> Edit:
    """The edit in a form. Raises ApiError, RequestValidationError."""
    pictures, guides, fields = list[bytes | str](), dict[str, bytes | str](), dict[str, str]()
    for name, value in await form_of(request, MOST_GIVEN + len(GUIDES)):
        if name in GUIDES and name not in guides and isinstance(value, bytes):
            guides[name] = value
        elif name in PICTURES and isinstance(value, bytes):
            pictures.append(value)
        elif name in PICTURES or name in GUIDES or isinstance(value, bytes):
            raise invalid(name[:128], "must be one file" if name in (*PICTURES, *GUIDES) else "is a file")
        else:
            fields[name] = value
    if not 0 < len(pictures) <= MOST_GIVEN:
        raise invalid("image", f"give 1 to {MOST_GIVEN} pictures, each as a file of that name")
    return Edit(validate_body(PictureRequest, fields), pictures, "image", guides)


def take_guides(body: PictureRequest) -> dict[str, bytes | str]:
    """Take the guides out of a body in JSON: URLs, by field. Raises ApiError."""
    references: dict[str, PictureReference | None] = {name: getattr(body, name, None) for name in GUIDES}
    guides: dict[str, bytes | str] = {name: url_of(reference, name) for name, reference in references.items() if reference is not None}
    for name in guides:
        setattr(body, name, None)
    return guides


def url_of(reference: PictureReference, field: str) -> str:
    """The URL of a picture in a body of JSON. field: the name of its field. Raises ApiError."""
    if reference.file_id is not None:
        raise invalid(f"{field}.file_id", "no files are kept here to be named; give the picture as a data: URL in image_url")
    if reference.image_url is None:
        raise invalid(f"{field}.image_url", "is missing; give the picture as a data: URL")
    return reference.image_url


async def fetch_pictures(pictures: Mapping[str, bytes | str], fetch: Fetch) -> list[bytes | str]:
    """The pictures as the client library takes them, bytes or data: URLs, in order. Other URLs are fetched, because the library would read
    any other text as a path. pictures: bytes or URLs, by field. Raises ApiError."""
    ready = list(pictures.values())
    for n, (field, picture) in enumerate(pictures.items()):
        if isinstance(picture, str) and picture[:5].lower() != "data:":
            ready[n] = await fetch(picture, f"{field}.image_url")
    return ready
