"""POST /v1/images/generations and /v1/images/edits, and GET of the pictures that their URLs name.

The body of an edit is a form with files, or JSON with data: URLs."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, get_args

from fastapi import Request
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response

from omnistage.client.about import max_count
from omnistage.client.answer import Answer, collect
from omnistage.client.events import Done, Failover, Picture, Progress, Usage
from omnistage.client.options import OPTIONS
from omnistage.gateway.accounts import Events
from omnistage.gateway.answering import Pieces, as_event, stream_response
from omnistage.gateway.body import Body, Ignored, drawing_body, form_of, is_form, new_router, shown_seed, validate_body, value_of_json
from omnistage.gateway.door import HttpCall, ThisCall
from omnistage.gateway.failure import ApiError, fields_of, invalid
from omnistage.gateway.fetching import Fetch
from omnistage.gateway.kept import FILES_BYTES, KEPT_S, StoredPicture
from omnistage.gateway.offer import DRAW
from omnistage.gateway.report import account_fields, failover_fields, picture_usage

MAX_PICTURES: int = get_args(OPTIONS["results"])[1].allowed.high
"""The most pictures of one answer, layers not counted."""
MAX_INPUT_PICTURES = max_count("DiffusionParams.images")
"""The most pictures to draw from."""
MAX_SIGMAS = max_count("DiffusionParams.sigmas")


SIZE = "^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"


def size_of(value: str) -> str:
    """`value`, if it is WIDTHxHEIGHT or auto."""
    if not re.fullmatch(SIZE, value):
        raise PydanticCustomError("size", "give WIDTHxHEIGHT in pixels, such as 512x512, or auto")
    return value


def sides_of(size: str | None) -> dict[str, int]:
    """The options width and height, in pixels; none of them if the model chooses."""
    if size is None or size == "auto":
        return {}
    width, _, height = size.partition("x")
    return {"width": int(width), "height": int(height)}


class PictureReference(Body):
    """A picture in JSON."""

    _media: ClassVar[tuple[str, ...]] = ("image_url",)

    image_url: str | None = None
    file_id: str | None = None


Sigmas = Annotated[list[float], BeforeValidator(value_of_json), Field(min_length=1, max_length=MAX_SIGMAS)]


class PictureRequest(drawing_body("images", "image")):  # type: ignore[misc]  # A class that is made when this runs.
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

    sigmas: Sigmas | None = None
    control_image: PictureReference | None = None
    include_events: bool | None = None


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

MAX_FILES = MAX_INPUT_PICTURES + len(GUIDES)

Media = dict[str, bytes | str]
"""The pictures in a request, each the bytes of a file or a URL, by field, such as mask or images[0]."""


def take_pictures(body: Body) -> Media:
    """Take the pictures out of a body in JSON. Raises ApiError."""
    media: Media = {}
    for name in ("images", "mask", "control_image", "input_reference"):
        value: list[PictureReference] | PictureReference | None = getattr(body, name, None)
        if isinstance(value, list):
            media |= {f"{name}[{n}]": _url_of(reference, f"{name}[{n}]") for n, reference in enumerate(value)}
        elif value is not None:
            media[name] = _url_of(value, name)
        if value is not None:
            setattr(body, name, None)
    return media


def _url_of(reference: PictureReference, field: str) -> str:
    """The URL of a picture in a body of JSON. field: the name of its field. Raises ApiError."""
    if reference.file_id is not None:
        raise invalid(f"{field}.file_id", "no files are kept here to be named; give the picture as a data: URL in image_url")
    if reference.image_url is None:
        raise invalid(f"{field}.image_url", "is missing; give the picture as a data: URL")
    return reference.image_url


async def fetch_pictures(media: Media, fetch: Fetch) -> Media:
    """The pictures as the client library takes them, bytes or data: URLs. Other URLs are fetched, because the library would read any other
    text as a path. Raises ApiError."""
    fetched_media = dict(media)
    for field, picture in media.items():
        if isinstance(picture, str) and picture[:5].lower() != "data:":
            fetched_media[field] = await fetch(picture, f"{field}.image_url")
    return fetched_media


FIELDS = fields_of("images", "prompt")
"""The field of this interface, by the name that the client library and the stages use."""

PICTURE: dict[int | str, dict[str, Any]] = {200: {"content": {f"image/{form}": {} for form in ("png", "jpeg", "webp")}}}
"""The answer in our document."""

FILE_HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}
"""Headers of a file that a browser opens by itself: they keep anything inside it from running as a page of this gateway."""


async def _read_edit(request: Request) -> tuple[PictureRequest, Media, str]:
    """Returns (the body of an edit, its pictures, the field of those to draw from). Raises ApiError, RequestValidationError."""
    if not is_form(request):
        body = validate_body(EditRequest, request.state.json)
        return body, take_pictures(body), "images"
    texts, files = await form_of(request, dict.fromkeys(PICTURES, MAX_FILES) | dict.fromkeys(GUIDES, 1))
    pictures = [data for name, data in files if name in PICTURES]
    if not 0 < len(pictures) <= MAX_INPUT_PICTURES:
        raise invalid("image", f"give 1 to {MAX_INPUT_PICTURES} pictures, each as a file of that name")
    media: Media = {f"images[{n}]": picture for n, picture in enumerate(pictures)}
    return validate_body(PictureRequest, texts), media | {name: data for name, data in files if name in GUIDES}, "image"


async def _ask(call: HttpCall, body: PictureRequest, media: Media) -> Events:
    """The events of a drawing; the router is asked when the first of them is read. media: emptied, because the client library has copied
    them, and nobody needs them any more."""
    fetched_media = await fetch_pictures(media, call.fetch)
    options = body.same_options | {
        "pipeline": await call.door.offer.pipeline_that_can(DRAW, body.model),
        "outputs": ["image", "progress"] if body.stream and body.include_events else ["image"],
        "background": None,  # The library's option of this name is the colour under pictures that are sent.
        **sides_of(body.size),
        "results": body.n,
        "media_type": body.output_format and f"image/{body.output_format}",
        "previews": (body.partial_images or None) if body.stream else None,
        **{GUIDES[field]: picture for field, picture in fetched_media.items() if field in GUIDES},
    }
    images = [picture for field, picture in fetched_media.items() if field not in GUIDES]
    events = call.ask(call.omni.stream_draw, body.prompt, images=images, **options)
    media.clear()
    return events


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


def _keep(call: HttpCall, request: Request, picture: Picture) -> str:
    """Keep a picture, and return its URL of this gateway."""
    name, _ = call.door.pictures.put(call.account.host, StoredPicture(picture.data, picture.media_type), len(picture.data))
    return str(request.url_for("picture_file", name=f"{name}.{_format(picture)}"))


def _check_size(answer: Answer) -> None:
    """Raises ApiError if the pictures have too many bytes to be kept for URLs."""
    size = sum(len(picture.data) for picture in answer.pictures)
    if size > FILES_BYTES:
        message = f"response_format: these pictures have {size >> 20} MiB, and at most {FILES_BYTES >> 20} MiB are kept for URLs"
        raise ApiError(400, message, param="response_format", code="too_large", hint="Ask for b64_json, or for fewer or smaller pictures.")


def _response(answer: Answer, body: PictureRequest, url_of: Callable[[Picture], str] = lambda picture: "") -> Response:
    """The response with all pictures: as URLs from `url_of`, or in base64."""
    first = answer.pictures[0] if answer.pictures else None
    fields = {
        "created": int(time.time()),
        "data": [{**_picture(picture, body, url_of(picture)), **_revised_prompt(answer, body)} for picture in answer.pictures],
        "background": _background(body),
        **({"output_format": _format(first)} if first else {}),
        **({"size": body.size} if sides_of(body.size) else {}),
        "usage": picture_usage(answer.usage),
        "seed": shown_seed(answer.seed, body.seed),
        "notes": list(answer.notes),
    }
    return JSONResponse(fields)


def _revised_prompt(answer: Answer, body: PictureRequest) -> dict[str, str]:
    """OpenAI's field for a prompt that was drawn in another way than it says: the prompt and the notes. Programs show it, and show no
    notes."""
    return {"revised_prompt": f"{body.prompt} ({'; '.join(answer.notes)})"} if answer.notes else {}


def _picture(picture: Picture, body: PictureRequest, url: str = "") -> dict[str, Any]:
    """The picture itself: its URL, or its file in base64; and its layer, if the model draws layers."""
    shown = {"url": url} if url else {"b64_json": base64.b64encode(picture.data).decode()}
    return {**shown, **({"layer": picture.layer} if body.layers else {})}


def _background(body: PictureRequest) -> str:
    return "transparent" if body.layers else "opaque"


def _format(picture: Picture) -> str:
    """The picture's format: png, jpeg or webp."""
    return picture.media_type.removeprefix("image/")


# A stream ------------------------------------------------------------------------------------------------------------------------------


async def _events(events: Events, body: PictureRequest, event_name: str) -> Pieces:
    """Yield the server-sent events. event_name: the beginning of their names, image_generation or image_edit. A finished picture is sent
    when the next one, or the end, has come, because the event of the last picture also has the usage of all."""
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
                        yield _event("omnistage.usage", account_fields(event, body.seed))


def _completed_event(picture: Picture, body: PictureRequest, event_name: str, usage: Usage | None = None) -> bytes:
    """The event of a finished picture. usage: of all pictures, for the last event; None: for other events."""
    account = {"usage": picture_usage(usage), "notes": list(usage.notes) if usage else []}
    return _event(f"{event_name}.completed", {**_picture_fields(picture, body), **account})


def _picture_fields(picture: Picture, body: PictureRequest) -> dict[str, Any]:
    """The fields that all events with a picture have."""
    return {
        **_picture(picture, body),
        "created_at": int(time.time()),
        "size": body.size or "auto",
        "quality": "auto",
        "background": _background(body),
        "output_format": _format(picture),
    }


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return as_event({"type": name, **data}, name)


# The endpoints -------------------------------------------------------------------------------------------------------------------------

router = new_router("/v1/images", "pictures")


@router.post("/generations", response_class=Response)
async def generations(call: ThisCall, request: Request, body: PictureRequest) -> Response:
    """Draw pictures of a prompt: whole, or as server-sent events with what they look like on the way."""
    call.account.fields = FIELDS
    return await _respond(call, request, body, take_pictures(body), "image_generation")


@router.post("/edits", response_class=Response, openapi_extra=edit_bodies())
async def edits(call: ThisCall, request: Request) -> Response:
    """Draw from pictures, by a prompt: a form as clients of OpenAI send it, or JSON."""
    body, media, field = await _read_edit(request)
    call.account.fields = {**FIELDS, **dict.fromkeys(("images", "diffusion.images"), field)}
    return await _respond(call, request, body, media, "image_edit")


async def _respond(call: HttpCall, request: Request, body: PictureRequest, media: Media, event_name: str) -> Response:
    """Draw, and answer with the whole or as a stream. media: the pictures to draw from. event_name: see `_events`."""
    _check(body)
    events = await _ask(call, body, media)
    if body.stream:
        return await stream_response(call.account, _events(events, body, event_name))
    async with aclosing(events):
        answer = await collect(events)
    if not _wants_url(body):
        return await asyncio.to_thread(_response, answer, body)  # Megabytes in base64 take a while.
    _check_size(answer)
    return _response(answer, body, lambda picture: _keep(call, request, picture))


@router.post("/variations", include_in_schema=False)
async def variations() -> None:
    """Not offered: no model here varies a picture without a prompt."""
    hint = "POST /v1/images/edits draws from a picture, by a prompt."
    raise ApiError(404, "variations of pictures are not offered", code="not_offered", hint=hint)


@router.get("/files/{name}", response_class=Response, responses=PICTURE, name="picture_file")
async def file(call: ThisCall, name: str) -> Response:
    """A picture that was drawn in the last hour."""
    picture = call.door.pictures.get(name.partition(".")[0])
    if picture is None:
        raise ApiError(404, "there is no such picture, or it is no longer kept", code="not_found", hint="Draw it again.")
    headers = {"Cache-Control": f"private, max-age={int(KEPT_S)}", **FILE_HEADERS}
    return Response(picture.data, media_type=picture.media_type, headers=headers)
