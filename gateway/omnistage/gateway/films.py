"""POST /v1/videos and the other calls for films, which are jobs, in the shape of OpenAI's interface for videos."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import FileResponse, Response

from omnistage.client.about import Range
from omnistage.client.errors import BadRequestError
from omnistage.client.media import to_part
from omnistage.client.options import ABOUT, OPTIONS, fault_of
from omnistage.gateway.answering import stream_response
from omnistage.gateway.body import Ignored, PipelineOptions, bounds_of, drawing_body, form_of, is_form, new_router, validate_body
from omnistage.gateway.door import HttpCall, ThisCall
from omnistage.gateway.failure import ApiError, invalid, unsupported_error
from omnistage.gateway.film_jobs import FIELDS, PICTURE, Jobs
from omnistage.gateway.film_store import ENDS, FilmJob, ask_for_film, run_to_end
from omnistage.gateway.kept import new_name
from omnistage.gateway.offer import FILM
from omnistage.gateway.pictures import FILE, FILE_HEADERS, SIZE, Media, PictureReference, fetch_pictures, sides_of, size_of, take_pictures

MAX_PAGE_JOBS = 100

RANGE = re.compile(r"(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")
"""The first and the last byte of a range; either may be empty."""

MAX_RANGES = 100
"""The most ranges of one request; if there are more, Starlette gives the whole file."""

DRAWN_SEEDS = 10**9
"""A seed that the gateway draws is below this number, like those of a router: people can type it, and JavaScript reads it exactly."""

AUTO = "auto"
"""Shown as size or length while the model chooses them; a whole film shows its own."""

CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {media_type: {} for media_type in ENDS}}}

FILM_HEADERS = {"Cache-Control": "private, no-store", **FILE_HEADERS}
"""Headers of a film's file, of which a browser keeps no copy."""

MAX_PROMPT_CHARACTERS = ABOUT["negative_prompt"].max_characters
MAX_OPTIONS_CHARACTERS = 1 << 16
"""The most characters of all names and values of `options`, which are kept with the job."""

MEDIA_TYPES = {"webm": "video/webm", "mp4": "video/mp4", "mp4-h264": 'video/mp4; codecs="avc1"'}
"""The media type that stages know a format by."""


def _check_length(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. Raises an error if they are too long to be kept with a job."""
    if sum(len(name) + len(str(value)) for name, value in options.items()) > MAX_OPTIONS_CHARACTERS:
        raise PydanticCustomError("too_many_characters", "Options should have at most {most} characters", {"most": MAX_OPTIONS_CHARACTERS})
    return options


class FilmRequest(drawing_body("videos", "video")):  # type: ignore[misc]  # A class that is made when this runs.
    """Fields that both forms of the body have."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    options: Annotated[PipelineOptions, AfterValidator(_check_length)] | None = None
    model: str | None = None
    seconds: Annotated[float, bounds_of("seconds")] | None = None
    size: Annotated[str, AfterValidator(size_of), Field(json_schema_extra={"pattern": SIZE})] | None = None

    user: Ignored = None
    safety_identifier: Ignored = None

    frames: Annotated[int, bounds_of("frames")] | None = None
    frames_per_second: Annotated[float, bounds_of("frames_per_second")] | None = None
    format: Literal["webm", "mp4", "mp4-h264"] | None = None


class FilmRequestJson(FilmRequest):
    """The body in JSON."""

    input_reference: PictureReference | None = None


def film_bodies() -> dict[str, Any]:
    """The description of the body in our document: the body may come in two forms."""
    fields = FilmRequest.model_json_schema()
    form = {**fields, "properties": {**fields["properties"], "input_reference": FILE}}
    body = {**fields, "properties": {**fields["properties"], "input_reference": PictureReference.model_json_schema()}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}, "multipart/form-data": {"schema": form}}}}


async def _read(request: Request) -> tuple[FilmRequest, Media]:
    """The request, and the picture to begin with, if there is one. Raises ApiError, RequestValidationError."""
    if is_form(request):
        texts, files = await form_of(request, {PICTURE: 1})
        return validate_body(FilmRequest, texts), dict(files)
    body = validate_body(FilmRequestJson, request.state.json)
    return body, take_pictures(body)


async def _create_job(call: HttpCall, body: FilmRequest, media: Media) -> dict[str, Any]:
    """Make a job of the request, have it kept, and return it in OpenAI's shape. media: as in `_read`. Raises OmniError, ApiError."""
    if body.seconds is not None and body.frames is not None:
        raise invalid("seconds", "frames say how long it is; give one of them")
    picture = await _picture(call, media) if media else None
    if body.seed is None:
        body.seed = secrets.randbelow(DRAWN_SEEDS)
    pipeline = await call.door.offer.pipeline_that_can(FILM, body.model)
    media_type = body.format and MEDIA_TYPES[body.format]
    options = call.options(pipeline=pipeline, media_type=media_type, **sides_of(body.size), **body.same_options)
    del options["timeout_s"]  # The time limit begins only when the job begins.
    # The router is not asked yet, but the client library already refuses wrong options.
    _check(options)
    await ask_for_film(call.omni, body.prompt, picture, options).aclose()
    seconds = body.seconds
    if body.frames and body.frames_per_second:
        seconds = body.frames / body.frames_per_second
    job = FilmJob(
        id=new_name("video_"),
        who=call.client,
        host=call.host,
        created_at=int(time.time()),
        prompt=body.prompt,
        options={**options, "seed": body.seed},  # As the client gave it: the job shows it.
        model=body.model or pipeline or AUTO,
        size=body.size or AUTO,
        seconds=AUTO if seconds is None else f"{seconds:g}",
        has_picture=picture is not None,
    )
    fields = _job_fields(call.door.jobs, job)
    await run_to_end(call.door.jobs.add(job, call.omni, picture))
    return fields


def _check(options: Mapping[str, Any]) -> None:
    """Raises BadRequestError for options that no model takes, so that the client learns it now and not when the job begins."""
    for name in options.keys() & ABOUT.keys():
        if isinstance(ABOUT[name].allowed, Range) and options[name] is not None and (fault := fault_of(OPTIONS[name], options[name])):
            raise BadRequestError.of(name, fault)


async def _picture(call: HttpCall, media: Media) -> bytes:
    """The bytes of the picture's file. Raises OmniError, ApiError."""
    (picture,) = (await fetch_pictures(media, call.fetch)).values()
    part = await asyncio.to_thread(to_part, picture, "image", PICTURE)
    return part.media.data


def _is_range(first: str, last: str) -> bool:
    """Whether a range has its first or its last byte, and is not empty. first, last: as typed; empty: left out."""
    if first and last:
        return int(first) <= int(last)
    return bool(first or last)


def check_range(request: Request, size: int) -> None:
    """Raises ApiError 400 for a malformed range in the request. Raises ApiError 416 for a range that begins after the end of the file, or
    for too many ranges. size: bytes of the file."""
    header = request.headers.get("range")
    if header is None:
        return
    unit, _, ranges = header.partition("=")
    parts = [RANGE.fullmatch(part.strip()) for part in ranges.split(",")]
    if unit != "bytes" or not all(part and _is_range(part["first"], part["last"]) for part in parts):
        raise invalid("Range", f"{header[:64]!r} is no range of bytes, such as bytes=0-1023")
    if len(parts) > MAX_RANGES:
        raise ApiError(416, f"one request may have {MAX_RANGES} ranges at most", param="Range", code="too_many_ranges")
    if any(part and part["first"] and int(part["first"]) >= size for part in parts):
        headers = {"Content-Range": f"bytes */{size}"}
        raise ApiError(416, f"the file has {size} bytes, and none in {header[:64]!r}", param="Range", code="no_such_range", headers=headers)


def _job_fields(jobs: Jobs, job: FilmJob) -> dict[str, Any]:
    """The job in OpenAI's shape, with our own fields added."""
    expires_at = jobs.expires_at(job)
    ours = {"seed": job.options["seed"], "frames": job.frames, "bytes": job.size_bytes, "media_type": job.media_type or None}
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": job.progress,
        "created_at": job.created_at,
        "completed_at": int(job.ended_at) if job.status == "completed" and job.ended_at is not None else None,
        "expires_at": None if expires_at is None else int(expires_at),
        "prompt": job.prompt,
        "size": job.size,
        "seconds": job.seconds,
        "remixed_from_video_id": None,
        "error": job.error,
        **ours,
        "notes": job.notes,
    }


router = new_router("/v1/videos", "videos")


@router.post("", openapi_extra=film_bodies())
async def create(call: ThisCall, request: Request) -> dict[str, Any]:
    """Ask for a film: JSON, or a form with a picture to begin with. It is made while nobody waits."""
    call.account.fields = FIELDS
    body, media = await _read(request)
    return await _create_job(call, body, media)


@router.get("")
async def videos(
    call: ThisCall,
    limit: Annotated[int, Query(ge=0, le=MAX_PAGE_JOBS)] = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List the videos of this visitor."""
    jobs = call.door.jobs
    listed_jobs = jobs.of(call.client)
    if order == "desc":
        listed_jobs.reverse()
    if after is not None:
        listed_jobs = listed_jobs[listed_jobs.index(jobs.find(call.client, after)) + 1 :]
    data = [_job_fields(jobs, job) for job in listed_jobs[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(listed_jobs) > limit}


@router.get("/{video_id}")
async def video(call: ThisCall, video_id: str) -> dict[str, Any]:
    """The state of a video."""
    return _job_fields(call.door.jobs, call.door.jobs.find(call.client, video_id))


@router.delete("/{video_id}")
async def delete(call: ThisCall, video_id: str) -> dict[str, Any]:
    """Delete a video; if it is still being made, that is cancelled."""
    await run_to_end(call.door.jobs.delete(call.door.jobs.find(call.client, video_id)))
    return {"id": video_id, "object": "video.deleted", "deleted": True}


@router.get("/{video_id}/content", response_class=Response, responses=CONTENT)
async def content(
    call: ThisCall,
    request: Request,
    video_id: str,
    stream: bool = False,
    variant: Literal["video", "thumbnail", "spritesheet"] = "video",
) -> Response:
    """The file of a video, or a range of it; with `stream=true` also the growing file of one that is not whole yet."""
    if variant != "video":
        raise unsupported_error("variant", "only the video itself is kept; leave it out")
    job = call.door.jobs.find(call.client, video_id)
    if job.status == "failed":
        hint = f"GET /v1/videos/{job.id} says why."
        raise ApiError(404, "there is no such video: it failed", code="video_failed", hint=hint)
    growing = call.door.jobs.growing(job)
    if growing is None or job.status == "completed":  # A completed job has its whole file already.
        path = await call.door.jobs.film(job)
        check_range(request, job.size_bytes)
        return FileResponse(path, media_type=job.media_type, headers=FILM_HEADERS)
    if not stream:
        hint = "Ask again when its status is completed, or with ?stream=true for what there is."
        raise ApiError(409, f"this video is {job.status}", code="not_ready", hint=hint, headers={"X-Should-Retry": "false"})
    if request.method == "HEAD":
        return Response(media_type=job.media_type, headers=FILM_HEADERS)
    answer = await stream_response(call.account, growing.read(), error_piece=None)
    answer.headers.update({**FILM_HEADERS, "Content-Type": job.media_type})  # The type is known since the first piece.
    return answer


@router.post("/{video_id}/remix", include_in_schema=False)
async def remix(video_id: str) -> None:
    """Not offered: no model here changes a film."""
    raise ApiError(404, "remixes of videos are not offered", code="not_offered", hint="POST /v1/videos makes a new one.")
