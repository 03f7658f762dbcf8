"""The body of POST /v1/videos."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from omnistage.gateway.body import DrawnBody, Ignored, PipelineOptions
from omnistage.gateway.pictures_schema import FILE, SIZE, PictureReference, size_of

MOST_SECONDS = 3600
MOST_FRAMES = 1 << 16
MAX_PROMPT_CHARACTERS = 32_000
MAX_OPTIONS_CHARACTERS = 1 << 16
"""The most characters of all names and values of `options`, which are kept with the job."""
LEAST_RATE_HZ, MOST_RATE_HZ = 0.1, 120

MEDIA_TYPES = {"webm": "video/webm", "mp4": "video/mp4", "mp4-h264": 'video/mp4; codecs="avc1"'}
"""The media type that stages know a format by."""


def _small(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. Raises an error if they are too long to be kept with a job."""
    if sum(len(name) + len(str(value)) for name, value in options.items()) > MAX_OPTIONS_CHARACTERS:
        raise PydanticCustomError("too_many_characters", "Options should have at most {most} characters", {"most": MAX_OPTIONS_CHARACTERS})
    return options


class FilmRequest(DrawnBody):
    """Fields that both forms of the body have."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    options: Annotated[PipelineOptions, AfterValidator(_small)] | None = None
    model: str | None = None
    seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)] | None = None
    size: Annotated[str, AfterValidator(size_of), Field(json_schema_extra={"pattern": SIZE})] | None = None

    user: Ignored = None
    safety_identifier: Ignored = None

    frames: Annotated[int, Field(ge=1, le=MOST_FRAMES)] | None = None
    frames_per_second: Annotated[float, Field(ge=LEAST_RATE_HZ, le=MOST_RATE_HZ, allow_inf_nan=False)] | None = None
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
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
