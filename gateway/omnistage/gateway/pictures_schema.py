"""The bodies of POST /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from omnistage.gateway.body import Body, DrawnBody, Ignored, value_of_json

MOST_PICTURES = 8
"""The most pictures of one answer, layers not counted."""
MOST_GIVEN = 16
"""The most pictures to draw from."""
MOST_SIGMAS = 1000


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


Sigmas = Annotated[list[float], BeforeValidator(value_of_json), Field(min_length=1, max_length=MOST_SIGMAS)]


class PictureRequest(DrawnBody):
    """Fields that both bodies have."""

    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_PICTURES)] | None = None
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

    images: Annotated[list[PictureReference], Field(min_length=1, max_length=MOST_GIVEN)]
    mask: PictureReference | None = None


FILE = {"type": "string", "format": "binary"}


def edit_bodies() -> dict[str, Any]:
    """The description of an edit's body in our document: the body may come in two forms."""
    fields = PictureRequest.model_json_schema()
    form = {**fields["properties"], "image": {"anyOf": [FILE, {"type": "array", "items": FILE, "maxItems": MOST_GIVEN}]}}
    form |= {"mask": FILE, "control_image": FILE}
    picture = PictureReference.model_json_schema()
    listed = {"type": "array", "items": picture, "minItems": 1, "maxItems": MOST_GIVEN}
    body = {**fields, "properties": {**fields["properties"], "images": listed, "mask": picture}, "required": ["prompt", "images"]}
    content = {
        "multipart/form-data": {"schema": {"type": "object", "properties": form, "required": ["prompt", "image"]}},
        "application/json": {"schema": body},
    }
    return {"requestBody": {"required": True, "content": content}}
