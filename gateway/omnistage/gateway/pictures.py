"""POST /v1/images/generations and /v1/images/edits, and GET of the pictures that their URLs name.

The body of an edit is a form with files, or JSON with data: URLs."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response

from omnistage.client.answer import Answer
from omnistage.client.events import Done, Event, Failover, Picture, Progress, Usage
from omnistage.gateway.answering import Pieces, as_event, collect_whole, stream_response, unless_gone
from omnistage.gateway.body import Body, DrawnBody, Ignored, form_of, is_form, new_router, validate_body, value_of_json
from omnistage.gateway.door import Door, visitor_of
from omnistage.gateway.failure import ApiError, fields_of, in_words_of, invalid
from omnistage.gateway.fetching import Fetch
from omnistage.gateway.kept import KEPT_S, ExpiringCache
from omnistage.gateway.offer import DRAW
from omnistage.gateway.report import account_fields, failover_fields, picture_usage

MAX_PICTURES = 8
"""The most pictures of one answer, layers not counted."""
MAX_INPUT_PICTURES = 16
"""The most pictures to draw from."""
MAX_SIGMAS = 1000


SIZE = "^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"


def size_of(value: str) -> str:
    """`value`, if it is WIDTHxHEIGHT or auto."""
    if not re.fullmatch(SIZE, value):
        raise PydanticCustomError("size", "give WIDTHxHEIGHT in pixels, such as 512x512, or auto")
    return value


def sides_of(size: str | None) -> tuple[int, int] | tuple[None, None]:
    """Width and height in pixels; None: the model chooses."""
    if size is None or size == "auto":
        return None, None
    width, _, height = size.partition("x")
    return int(width), int(height)


class PictureReference(Body):
    """A picture in JSON."""

    _media: ClassVar[tuple[str, ...]] = ("image_url",)

    image_url: str | None = None
    file_id: str | None = None


Sigmas = Annotated[list[float], BeforeValidator(value_of_json), Field(min_length=1, max_length=MAX_SIGMAS)]


class PictureRequest(DrawnBody):
    """Fields that both bodies have."""

    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_PICTURES)] | None = None
    size: Annotated[str, AfterValidator(size_of), Field(json_schema_extra={"pattern": SIZE})] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None

    complexity: Ignored = None
    input_fidelity: Ignored = None
    moderation: Ignored = None
    output_compression: Ignored = None
    quality: Ignored = None
    safety_identifier: Ignored = None
    style: Ignored = None
    user: Ignored = None

    layers: int | None = None
    sigmas: Sigmas | None = None
    strength: float | None = None
    control_image: PictureReference | None = None
    include_events: bool | None = None

    @property
    def sides(self) -> tuple[int, int] | tuple[None, None]:
        """Width and height in pixels; None: the model chooses."""
        return sides_of(self.size)


class EditRequest(PictureRequest):
    """The body of an edit in JSON."""

    images: Annotated[list[PictureReference], Field(min_length=1, max_length=MAX_INPUT_PICTURES)]
    mask: PictureReference | None = None


FILE = {"type": "string", "format": "binary"}


def edit_bodies() -> dict[str, Any]:
    """The description of an edit's body in our document: the body may come in two forms."""
    fields = PictureRequest.model_json_schema()
    form = {**fields["properties"], "image": {"anyOf": [FILE, {"type": "array", "items": FILE, "maxItems": MAX_INPUT_PICTURES}]}}
    form |= {"mask": FILE, "control_image": FILE}
    picture = PictureReference.model_json_schema()
    listed = {"type": "array", "items": picture, "minItems": 1, "maxItems": MAX_INPUT_PICTURES}
    body = {**fields, "properties": {**fields["properties"], "images": listed, "mask": picture}, "required": ["prompt", "images"]}
    content = {
        "multipart/form-data": {"schema": {"type": "object", "properties": form, "required": ["prompt", "image"]}},
        "application/json": {"schema": body},
    }
    return {"requestBody": {"required": True, "content": content}}


GUIDES = {"mask": "mask_image", "control_image": "control_image"}
"""Fields of single pictures, and the client library's argument for each."""

PICTURES = ("image", "image[]")
"""The fields of pictures in a form; each may be there several times."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit that was asked for. pictures: those to draw from, each the bytes of a file, or a URL. field: the name of their field in
    the body. guides: further pictures, by their fields."""

    body: PictureRequest
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
    for name, value in await form_of(request, MAX_INPUT_PICTURES + len(GUIDES)):
        if name in GUIDES and name not in guides and isinstance(value, bytes):
            guides[name] = value
        elif name in PICTURES and isinstance(value, bytes):
            pictures.append(value)
        elif name in PICTURES or name in GUIDES or isinstance(value, bytes):  # No file, a second file, or a file in place of a text.
            raise invalid(name[:128], "must be one file" if name in (*PICTURES, *GUIDES) else "is a file")
        else:
            fields[name] = value
    if not 0 < len(pictures) <= MAX_INPUT_PICTURES:
        raise invalid("image", f"give 1 to {MAX_INPUT_PICTURES} pictures, each as a file of that name")
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
    fetched = list(pictures.values())
    for n, (field, picture) in enumerate(pictures.items()):
        if isinstance(picture, str) and picture[:5].lower() != "data:":
            fetched[n] = await fetch(picture, f"{field}.image_url")
    return fetched


FIELDS = fields_of(
    "prompt",
    {
        "width": "size",
        "height": "size",
        "preview_side": "partial_images",
        "results": "n",
        "media_type": "output_format",
        "previews": "partial_images",
        "mask_image": "mask",
    },
)
"""The field of this interface, by the name that the client library and the stages use."""

FILES_BYTES = 64 << 20
"""The most bytes of all pictures that have URLs."""

PICTURE: dict[int | str, dict[str, Any]] = {200: {"content": {f"image/{form}": {} for form in ("png", "jpeg", "webp")}}}
"""The answer in our document."""

FILE_HEADERS = {
    "Cache-Control": f"private, max-age={int(KEPT_S)}",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
}
"""Headers of a picture that a browser opens by itself: they keep anything inside it from running as a page of this gateway."""

Made = Literal["image_generation", "image_edit"]
"""The beginning of the names of a stream's events."""


@dataclass(frozen=True, slots=True)
class _PictureFile:
    """A picture that can be fetched at a URL. data: its file."""

    data: bytes
    media_type: str


def routes(door: Door) -> APIRouter:
    router = new_router("/v1/images", "pictures")
    files: ExpiringCache[_PictureFile] = ExpiringCache(FILES_BYTES)

    @router.post("/generations", response_class=Response)
    async def generations(request: Request, body: PictureRequest) -> Response:
        """Draw pictures of a prompt: whole, or as server-sent events with what they look like on the way."""
        return await _answer_drawing(door, files, request, body, take_guides(body))

    @router.post("/edits", response_class=Response, openapi_extra=edit_bodies())
    async def edits(request: Request) -> Response:
        """Draw from pictures, by a prompt: a form as clients of OpenAI send it, or JSON."""
        edit = await read_edit(request)
        return await _answer_drawing(door, files, request, edit.body, edit.guides, edit)

    @router.post("/variations", include_in_schema=False)
    async def variations() -> None:
        """Not offered: no model here varies a picture without a prompt."""
        hint = "POST /v1/images/edits draws from a picture, by a prompt."
        raise ApiError(404, "variations of pictures are not offered", code="not_offered", hint=hint)

    @router.get("/files/{name}", response_class=Response, responses=PICTURE, name="picture_file")
    async def file(name: str) -> Response:
        """A picture that was drawn in the last hour."""
        picture = files.get(name.partition(".")[0])
        if picture is None:
            raise ApiError(404, "there is no such picture, or it is no longer kept", code="not_found", hint="Draw it again.")
        return Response(picture.data, media_type=picture.media_type, headers=FILE_HEADERS)

    return router


async def _answer_drawing(
    door: Door,
    files: ExpiringCache[_PictureFile],
    request: Request,
    body: PictureRequest,
    guides: dict[str, bytes | str],
    edit: Edit | None = None,
) -> Response:
    """Draw, and answer with the whole or as a stream. files: keeps pictures for URLs. guides: by field, the mask and the control image, as
    bytes or URLs. edit: has the pictures to draw from; None: there are none."""
    _check(body)
    fields = {**FIELDS, **dict.fromkeys(("images", "diffusion.images"), edit.field)} if edit else FIELDS
    pictures = edit.pictures if edit else []
    events = await _ask(door, request, body, fields, pictures, guides)
    pictures.clear()  # The client library has copied them, and nobody needs them any more.
    guides.clear()
    if body.stream:
        return await stream_response(request, _events(events, body, "image_edit" if edit else "image_generation"), fields)
    with in_words_of(fields):
        answer = await unless_gone(request, collect_whole(events))
    if _wants_url(body):
        _check_size(answer)
        return _response(answer, body, _keeper(files, request))
    return await asyncio.to_thread(_response, answer, body)  # Megabytes in base64 take a while.


async def _ask(
    door: Door,
    request: Request,
    body: PictureRequest,
    fields: Mapping[str, str],
    pictures: Sequence[bytes | str],
    guides: Mapping[str, bytes | str],
) -> AsyncGenerator[Event, None]:
    """The events of a drawing; the router is asked when the first of them is read. fields: as in `of_omni`. pictures, guides: see
    `_answer_drawing`."""
    visitor = visitor_of(request)
    by_field = {f"images[{n}]": picture for n, picture in enumerate(pictures)}
    media = await unless_gone(request, fetch_pictures({**by_field, **guides}, door.fetcher.of(visitor.account)))
    images, guide_images = media[: len(pictures)], media[len(pictures) :]
    width, height = body.sides
    options = door.options(
        visitor,
        pipeline=await unless_gone(request, door.offer.pipeline_that_can(DRAW, body.model)),
        outputs=["image", "progress"] if body.stream and body.include_events else ["image"],
        width=width,
        height=height,
        results=body.n,
        media_type=body.output_format and f"image/{body.output_format}",
        previews=(body.partial_images or None) if body.stream else None,
        layers=body.layers,
        sigmas=body.sigmas,
        strength=body.strength,
        **body.drawing_options,
        **{GUIDES[name]: picture for name, picture in zip(guides, guide_images, strict=True)},
    )
    with in_words_of(fields):
        return visitor.account.ask(visitor.omni.stream_draw, body.prompt, images=images, **options)


def _check(body: PictureRequest) -> None:
    """Raises ApiError for a request that no pipeline can do."""
    if body.background == "transparent" and not body.layers:
        hint = "Leave it out, or ask for layers where a model draws them."
        raise invalid("background", "pictures are drawn opaque; only layers can be transparent", hint)
    if body.stream and body.response_format == "url":
        raise invalid("response_format", "the events of a stream have their pictures in b64_json", "Leave it out, or ask without stream.")


def _wants_url(body: PictureRequest) -> bool:
    """Whether the answer holds URLs. Without `response_format` the default is that of the OpenAI model whose name was sent."""
    return body.response_format == "url" or (body.response_format is None and (body.model or "").startswith("dall-e"))


# A whole answer ------------------------------------------------------------------------------------------------------------------------

Keep = Callable[[Picture], str]
"""Keeps a picture and returns its URL."""


def _keeper(files: ExpiringCache[_PictureFile], request: Request) -> Keep:
    """A function that keeps pictures and names them by URLs of this gateway."""

    def keep(picture: Picture) -> str:
        name, _ = files.put(request.state.account.host, _PictureFile(picture.data, picture.media_type), len(picture.data))
        return str(request.url_for("picture_file", name=f"{name}.{_format(picture)}"))

    return keep


def _check_size(answer: Answer) -> None:
    """Raises ApiError if the pictures have too many bytes to be kept for URLs."""
    size = sum(len(picture.data) for picture in answer.pictures)
    if size > FILES_BYTES:
        message = f"response_format: these pictures have {size >> 20} MiB, and at most {FILES_BYTES >> 20} MiB are kept for URLs"
        raise ApiError(400, message, param="response_format", code="too_large", hint="Ask for b64_json, or for fewer or smaller pictures.")


def _response(answer: Answer, drawing_request: PictureRequest, keep: Keep | None = None) -> Response:
    """The response with all pictures: as URLs from `keep`, or, if that is None, in base64."""
    data = [_entry(picture, drawing_request, keep) for picture in answer.pictures]
    first = answer.pictures[0] if answer.pictures else None
    body = {
        "created": int(time.time()),
        "data": data,
        "background": "transparent" if drawing_request.layers else "opaque",
        **({"output_format": _format(first)} if first else {}),
        **({"size": drawing_request.size} if drawing_request.sides[0] else {}),
        "usage": picture_usage(answer.usage),
        "seed": answer.seed,
        **({"notes": list(answer.notes)} if answer.notes else {}),
    }
    return JSONResponse(body)


def _entry(picture: Picture, body: PictureRequest, keep: Keep | None) -> dict[str, Any]:
    """The fields of one picture in the response; `keep`: as in `_response`."""
    shown = {"b64_json": base64.b64encode(picture.data).decode()} if keep is None else {"url": keep(picture)}
    return {**shown, **({"layer": picture.layer} if body.layers else {})}


def _format(picture: Picture) -> str:
    """The picture's format: png, jpeg or webp."""
    return picture.media_type.removeprefix("image/")


# A stream ------------------------------------------------------------------------------------------------------------------------------


async def _events(events: AsyncGenerator[Event, None], body: PictureRequest, event_name: Made) -> Pieces:
    """Yield the server-sent events. A finished picture is sent when the next one, or the end, has come, because the event of the last
    picture also has the usage of all."""
    preview_count, finished = 0, None
    async with aclosing(events):
        async for event in events:
            match event:
                case Picture() if event.preview_step is not None:
                    yield _event(f"{event_name}.partial_image", {**_picture_fields(event, body), "partial_image_index": preview_count})
                    preview_count += 1
                case Picture():
                    if finished is not None:
                        yield _completed_event(finished, body, event_name)
                    finished = event
                case Progress() if body.include_events:
                    yield _event("omnistage.progress", {"done": event.done, "total": event.total})
                case Failover() if body.include_events:
                    yield _event("omnistage.failover", failover_fields(event))
                case Done():
                    if finished is not None:
                        yield _completed_event(finished, body, event_name, event.usage)
                    if body.include_events:
                        yield _event("omnistage.usage", account_fields(event))
                case _:
                    pass


def _completed_event(picture: Picture, body: PictureRequest, event_name: Made, usage: Usage | None = None) -> bytes:
    """The event of a finished picture. usage: of all pictures, for the last event; None: for other events."""
    return _event(f"{event_name}.completed", {**_picture_fields(picture, body), "usage": picture_usage(usage)})


def _picture_fields(picture: Picture, body: PictureRequest) -> dict[str, Any]:
    """The fields that all events with a picture have."""
    return {
        "b64_json": base64.b64encode(picture.data).decode(),
        "created_at": int(time.time()),
        "size": body.size or "auto",
        "quality": "auto",
        "background": "transparent" if body.layers else "opaque",
        "output_format": _format(picture),
        **({"layer": picture.layer} if body.layers else {}),
    }


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return as_event({"type": name, **data}, name)
