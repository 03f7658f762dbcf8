"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from omnistage.gateway.failure import ApiError

MAX_MESSAGES = 1024
MAX_CHOICES = 8
MOST_SEED = (1 << 64) - 1


class Body(BaseModel):
    """What a client sends. What it does not know, is refused, as OpenAI does."""

    model_config = ConfigDict(extra="forbid", strict=False)


class StrictBody(Body):
    """The same, of JSON alone: a number is no text, and a text no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _listed(given: object) -> object:
    """One is a list of one."""
    return [given] if isinstance(given, str) else given


def _named(given: object) -> object:
    """A voice by its id is a voice by its name."""
    return given["id"] if isinstance(given, dict) and set(given) == {"id"} else given


Texts = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
Voice = Annotated[str, BeforeValidator(_named, json_schema_input_type=str | dict[str, str])]
Seed = Annotated[int, Field(ge=-(1 << 63), le=MOST_SEED)]
Ignored = Annotated[Any, Field(description="Taken, and means nothing here.")]
Refused = Annotated[Any, Field(description="Refused, if something is in it.")]


def _not_called(given: object) -> object:
    """Where there are no tools, to choose none of them, or as the model likes, is what happens anyhow."""
    return None if given in ("none", "auto") else given


ToolChoice = Annotated[Refused, BeforeValidator(_not_called)]


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    include_events: Annotated[bool | None, Field(description="Ours: chunks that tell of servers, losses and times.")] = None


class Sound(StrictBody):
    """How an answer is spoken."""

    voice: Voice | None = None
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"] | None = None


class JsonSchema(StrictBody):
    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    # `schema` is a method of the base class.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="Answers always keep to the schema.")] = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def kept_to(self) -> dict[str, Any] | None:
        """The schema that the text keeps to; None: it is any text. Raises ApiError."""
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(400, "response_format.json_schema: is missing", param="response_format.json_schema", code="invalid_value")
        if self.type == "text":
            return None
        return (self.json_schema.schema_ if self.json_schema else None) or {"type": "object"}


def refuse(asked: Body, *names: str) -> None:
    """Raises ApiError for a field that would change the answer, and has something in it."""
    for name in names:
        if getattr(asked, name) not in (None, [], {}, False):
            raise unsupported(name, "nothing here does that yet; leave it out")


def unsupported(param: str, why: str) -> ApiError:
    """What OpenAI's interface has, and this one does not."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter", reason="BAD_REQUEST")


class ChatRequest(StrictBody):
    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)] | None = None
    audio: Sound | None = None
    response_format: ResponseFormat | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    stop: Texts | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    # Ours: docs/client.md tells what they do.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    speed: float | None = None
    profile: str | None = None
    conversation_id: str | None = None
    background: str | None = None

    metadata: Ignored = None
    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    reasoning_effort: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None
    verbosity: Ignored = None

    functions: Refused = None
    logit_bias: Refused = None
    moderation: Refused = None
    prediction: Refused = None
    tools: Refused = None
    web_search_options: Refused = None

    tool_choice: ToolChoice = None
    function_call: ToolChoice = None

    def check(self) -> None:
        """Raises ApiError for what cannot be done."""
        refuse(
            *(self, "tools", "functions", "tool_choice", "function_call"),
            *("logit_bias", "moderation", "prediction", "web_search_options"),
        )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: goes with logprobs: true", param="top_logprobs", code="invalid_value", reason="BAD_REQUEST")

    @property
    def is_spoken(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def sound_format(self) -> str:
        """Who reads a stream piece by piece takes raw samples, unless he says otherwise."""
        return (self.audio and self.audio.format) or ("pcm16" if self.stream else "wav")

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def seed_of(self, number: int) -> int | None:
        """Of the answer of this number: they count on."""
        return None if self.seed is None else (self.seed + number) & MOST_SEED
