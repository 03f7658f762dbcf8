"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from omnistage.gateway.body import MAX_MESSAGES, ConversationBody, Ignored, Refused, Seed, StrictBody, ToolChoice, Voice, refuse, seed_of
from omnistage.gateway.failure import invalid

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_TEXTS = 1024
"""The most texts that an answer can be chosen from."""


def _list_of(value: object) -> object:
    """Make a list of a single text."""
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[str], Field(max_length=MAX_STOPS), BeforeValidator(_list_of, json_schema_input_type=str | list[str])]


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    include_events: Annotated[bool | None, Field(description="Ours: chunks that tell of servers, losses and times.")] = None


class SpeechOptions(StrictBody):
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
        """The schema that the text keeps to; None: any text is allowed. Raises ApiError."""
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("response_format.json_schema", "is missing")
        if self.type == "text":
            return None
        return (self.json_schema.schema_ if self.json_schema else None) or {"type": "object"}


class MediaOptions(StrictBody):
    """How media are read, by the name that model cards and vLLM have for it."""

    use_audio_in_video: Annotated[bool | None, Field(description="Films are also heard, unless their part says use_audio.")] = None


class ChatRequest(ConversationBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream_options: StreamOptions | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)] | None = None
    audio: SpeechOptions | None = None
    response_format: ResponseFormat | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    logprobs: bool | None = None

    # Our own options; docs/client.md explains them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    speed: float | None = None
    profile: str | None = None
    conversation_id: str | None = None
    background: str | None = None
    mm_processor_kwargs: MediaOptions | None = None

    metadata: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None

    functions: Refused = None
    logit_bias: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    function_call: ToolChoice = None

    def check(self) -> None:
        """Raises ApiError if the gateway cannot do what is asked."""
        refuse(
            *(self, "tools", "functions", "tool_choice", "function_call"),
            *("logit_bias", "moderation", "prediction", "web_search_options"),
        )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "goes with logprobs: true")

    @property
    def hears_films(self) -> bool:
        """Whether films are also heard whose parts do not say."""
        return bool(self.mm_processor_kwargs and self.mm_processor_kwargs.use_audio_in_video)

    @property
    def is_spoken(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def sound_format(self) -> str:
        """The format of the sound. A stream of pieces defaults to raw samples."""
        return (self.audio and self.audio.format) or ("pcm16" if self.stream else "wav")

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def seed_of(self, number: int) -> int | None:
        """The seed of the answer with this number: one more for each further answer."""
        return None if self.seed is None else seed_of(self.seed + number)
