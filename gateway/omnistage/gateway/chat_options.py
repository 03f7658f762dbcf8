"""From a request of chat to options of the client library, and back: by which names the client knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.client.options import CODE2WAV, CONSTRAINTS, SAMPLING, TALKER, THINKER
from omnistage.gateway.chat_schema import ChatRequest
from omnistage.gateway.sound import RATE_HZ

SAME = (
    *("temperature", "presence_penalty", "frequency_penalty", "stop", "top_k", "min_p", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "regex", "choice", "speed", "profile", "conversation_id", "background"),
)
"""Options that are called so here too."""

LEAST_TOP_P = 1e-6
"""For OpenAI's 0: the likeliest token alone."""

OTHERWISE = {
    "conversation": "messages",
    "request": "messages",
    "pipeline": "model",
    "outputs": "modalities",
    "voice": "audio.voice",
    "json_schema": "response_format",
    "sample_rate_hz": "audio.format",
}
"""Options that have another name here."""


def options_of(asked: ChatRequest, pipeline: str, voice: str | None, number: int) -> dict[str, Any]:
    """Of the answer of this number. Raises ApiError."""
    options: dict[str, Any] = {name: getattr(asked, name) for name in SAME}
    options |= {
        "pipeline": pipeline,
        "outputs": ["text"],
        "max_tokens": asked.most_tokens,
        "seed": asked.seed_of(number),
        "top_p": None if asked.top_p is None else max(asked.top_p, LEAST_TOP_P),
        "json_schema": asked.response_format and asked.response_format.kept_to,
    }
    if asked.logprobs:
        options |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    if asked.is_spoken:
        options |= {"outputs": ["text", "audio"], "voice": voice, "sample_rate_hz": RATE_HZ}
    return options


def _of_stages() -> Mapping[str, str]:
    stages = {
        "thinker": (*THINKER, "messages"),
        "thinker.sampling": SAMPLING,
        "thinker.constraint": CONSTRAINTS,
        "talker": TALKER,
        "code2wav": (*TALKER, *CODE2WAV),
    }
    return {f"{stage}.{name}": OTHERWISE.get(name, name) for stage, known in stages.items() for name in known}


STAGE_FIELDS = _of_stages()
"""By a field as the stages call it, the one of chat."""


def fields_of(asked: ChatRequest) -> Mapping[str, str]:
    """By a field as the client library and the stages call it, the one of this interface."""
    most = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    kept_to = next((name for name in ("regex", "choice") if getattr(asked, name) is not None), "response_format")
    return {**OTHERWISE, **STAGE_FIELDS, "max_tokens": most, "thinker.max_tokens": most, "thinker.constraint": kept_to}
