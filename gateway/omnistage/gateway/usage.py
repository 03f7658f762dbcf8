"""What an answer cost, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnistage.client.events import Usage

TALKER, CODES = "talker", "codes"


def audio_tokens(usage: Usage) -> int:
    """Of speech: its frames of codes."""
    return sum(report.output_items.get(CODES, 0) for report in usage.stages if report.stage == TALKER)


def chat_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Of the answers to one request, as chat has it: what was asked counts once."""
    prompt = next((usage.prompt_tokens for usage in usages if usage.prompt_tokens is not None), 0)
    text, sound = sum(usage.completion_tokens or 0 for usage in usages), sum(map(audio_tokens, usages))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text + sound,
        "total_tokens": prompt + text + sound,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens if usages else 0},
        "completion_tokens_details": {
            "text_tokens": text,
            "audio_tokens": sound,
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def response_usage(usage: Usage) -> dict[str, Any]:
    """The same, of text alone, as responses have it."""
    prompt, text = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": text,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + text,
    }
