"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from omnistage.gateway.body import MAX_MESSAGES, ConversationBody, Ignored, Refused, Seed, StrictBody, few, refuse

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs; other values ask for things that no answer here has."""


MAX_INCLUDED = 32
MAX_METADATA = 16


def _few(metadata: object) -> object:
    """Refuse metadata with too many keys."""
    return few(metadata, MAX_METADATA)


def _messages_of(value: object) -> object:
    """A text as a list with one message of the user; any other value unchanged."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    # `schema` is a method of the base class.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="Answers always keep to the schema.")] = None

    @property
    def kept_to(self) -> dict[str, Any] | None:
        """The schema that the text keeps to; None: any text is allowed."""
        return None if self.type == "text" else self.schema_ or {"type": "object"}


class Text(StrictBody):
    format: TextFormat | None = None
    verbosity: Ignored = None


class ResponseStreamOptions(StrictBody):
    include_obfuscation: Ignored = None


class ResponsesRequest(ConversationBody):
    input: Annotated[
        list[dict[str, Any]],
        BeforeValidator(_messages_of, json_schema_input_type=str | list[dict[str, Any]]),
        (),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    text: Text | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(_few)] | None = None
    seed: Annotated[Seed | None, Field(description="Ours: the same seed gives the same answer.")] = None

    max_tool_calls: Ignored = None
    reasoning: Ignored = None
    truncation: Ignored = None

    background: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None

    def check(self) -> None:
        """Raises ApiError if the gateway cannot do what is asked."""
        refuse(
            *(self, "tools", "tool_choice", "previous_response_id", "conversation", "background", "prompt"),
            *("context_management", "moderation"),
        )

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def kept_to(self) -> dict[str, Any] | None:
        return self.text.format.kept_to if self.text and self.text.format else None
