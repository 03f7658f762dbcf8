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


def options_of(body: ChatRequest, pipeline: str, voice: str | None, number: int) -> dict[str, Any]:
    """The options for the answer with this number, from 0. voice: the pipeline's name for it; None: the default. Raises ApiError."""
    options: dict[str, Any] = {name: getattr(body, name) for name in SAME}
    options |= {
        "pipeline": pipeline,
        "outputs": ["text"],
        "max_tokens": body.most_tokens,
        "seed": body.seed_of(number),
        "top_p": top_p_of(body.top_p),
        "json_schema": body.response_format and body.response_format.kept_to,
    }
    if body.logprobs:
        options |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.is_spoken:
        options |= {"outputs": ["text", "audio"], "voice": voice, "sample_rate_hz": RATE_HZ}
    return options


FIELDS = fields_of("messages", OTHERWISE)


def names_of(body: ChatRequest) -> Mapping[str, str]:
    """The request's name of a field, by the name that the client library and the stages use."""
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    kept_to = next((name for name in ("regex", "choice") if getattr(body, name) is not None), "response_format")
    return {**FIELDS, "max_tokens": limit_name, "thinker.max_tokens": limit_name, "thinker.constraint": kept_to}
