"""Makes of a chat request the options for the client library, and maps field names in the library's errors to the request's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.gateway.body import top_p_of
from omnistage.gateway.chat_schema import ChatRequest
from omnistage.gateway.fields import fields_of
from omnistage.gateway.sound import RATE_HZ

SAME = (
    *("temperature", "presence_penalty", "frequency_penalty", "stop", "top_k", "min_p", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "regex", "choice", "speed", "profile", "conversation_id", "background"),
)
"""Options whose name is also the name of the field."""

OTHERWISE = {
    "outputs": "modalities",
    "voice": "audio.voice",
    "json_schema": "response_format",
    "sample_rate_hz": "audio.format",
}
"""By option: its field in the request, if that has another name."""


def options_of(asked: ChatRequest, pipeline: str, voice: str | None, number: int) -> dict[str, Any]:
    """The options for the answer with this number, from 0. voice: the pipeline's name for it; None: the default. Raises ApiError."""
    options: dict[str, Any] = {name: getattr(asked, name) for name in SAME}
    options |= {
        "pipeline": pipeline,
        "outputs": ["text"],
        "max_tokens": asked.most_tokens,
        "seed": asked.seed_of(number),
        "top_p": top_p_of(asked.top_p),
        "json_schema": asked.response_format and asked.response_format.kept_to,
    }
    if asked.logprobs:
        options |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    if asked.is_spoken:
        options |= {"outputs": ["text", "audio"], "voice": voice, "sample_rate_hz": RATE_HZ}
    return options


FIELDS = fields_of("messages", OTHERWISE)


def names_of(asked: ChatRequest) -> Mapping[str, str]:
    """The request's name of a field, by the name that the client library and the stages use."""
    most = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    kept_to = next((name for name in ("regex", "choice") if getattr(asked, name) is not None), "response_format")
    return {**FIELDS, "max_tokens": most, "thinker.max_tokens": most, "thinker.constraint": kept_to}
