"""Makes the cost of an answer in tokens, in the shapes of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnistage.client.events import Usage

TALKER, ALIGNMENT = "talker", "alignment"


def audio_tokens(usage: Usage) -> int:
    """The number of frames of speech that the Talker gave, as codes or as features. Its port `alignment`, with the times of words, is not
    counted."""
    items = (report.output_items for report in usage.stages if report.stage == TALKER)
    return sum(count for ports in items for port, count in ports.items() if port != ALIGNMENT)


def chat_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """The usage of the answers to one request, in chat's shape: the prompt counts once."""
    prompt = next((usage.prompt_tokens for usage in usages if usage.prompt_tokens is not None), 0)
    text, sound = sum(usage.completion_tokens or 0 for usage in usages), sum(map(audio_tokens, usages))
    thought = sum(usage.thought_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text + sound,
        "total_tokens": prompt + text + sound,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens if usages else 0},
        "completion_tokens_details": {
            "text_tokens": text - thought,
            "audio_tokens": sound,
            "reasoning_tokens": thought,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def response_usage(usage: Usage) -> dict[str, Any]:
    """The usage of text alone, in the shape of responses."""
    prompt, text = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": text,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": prompt + text,
    }


def speech_usage(usage: Usage) -> dict[str, int]:
    """The usage of a spoken text. input_tokens are the tokens of the text, as the model cut it."""
    read, spoken_tokens = usage.completion_tokens or 0, audio_tokens(usage)
    return {"input_tokens": read, "output_tokens": spoken_tokens, "total_tokens": read + spoken_tokens}


def picture_usage(usage: Usage | None) -> dict[str, Any]:
    """The usage of pictures. A picture has no tokens; the prompt has some if the model counts them. usage: None: all numbers are 0, because
    another event has them."""
    prompt_tokens = (usage.prompt_tokens if usage else None) or 0
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": 0,
        "total_tokens": prompt_tokens,
        "input_tokens_details": {"text_tokens": prompt_tokens, "image_tokens": 0},
    }
