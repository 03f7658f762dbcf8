"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """What a client sends. What it does not know, is refused, as OpenAI does."""

    model_config = ConfigDict(extra="forbid", strict=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(Body):
    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
