"""The report that goes with an answer's content: its cost in tokens and the log probabilities of tokens, in the shapes of OpenAI's
interface, and facts that the gateway adds for clients that ask for them, in the same shapes at every endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omnistage.client.answer import Answer
from omnistage.client.events import AudioChunk, Done, Failover, TextDelta, Usage
from omnistage.client.remarks import end_notes
from omnistage.gateway.body import shown_seed

TALKER, ALIGNMENT = "talker", "alignment"


def audio_tokens(usage: Usage) -> int:
    """The number of frames of speech that the Talker gave, as codes or as features. Its port `alignment`, with the times of words, is not
    counted."""
    items_by_port = (report.output_items for report in usage.stages if report.stage == TALKER)
    return sum(count for items in items_by_port for port, count in items.items() if port != ALIGNMENT)


def chat_usage(usages: Sequence[Usage], answers: int) -> dict[str, Any]:
    """The usage of the answers to one request, in chat's shape. answers: how many there are to each prompt, which counts once."""
    prompt = sum(usage.prompt_tokens or 0 for usage in usages[::answers])
    text, sound = sum(usage.completion_tokens or 0 for usage in usages), sum(map(audio_tokens, usages))
    thought = sum(usage.thought_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text + sound,
        "total_tokens": prompt + text + sound,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::answers])},
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
    text_tokens, sound_tokens = usage.completion_tokens or 0, audio_tokens(usage)
    return {"input_tokens": text_tokens, "output_tokens": sound_tokens, "total_tokens": text_tokens + sound_tokens}


def picture_usage(usage: Usage | None) -> dict[str, Any]:
    """The usage of pictures. No pipeline counts pictures in tokens; those that are drawn step by step count the prompt. usage: None: all
    numbers are 0, because another event has them."""
    prompt_tokens = 0 if usage is None else usage.prompt_tokens or 0
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": 0,
        "total_tokens": prompt_tokens,
        "input_tokens_details": {"text_tokens": prompt_tokens, "image_tokens": 0},
    }


def logprobs_of(delta: TextDelta, count: int) -> list[dict[str, Any]]:
    """A row for each token of a piece of text; no rows if the model gives no logprobs. count: how many likeliest tokens a row lists."""
    tokens = len(delta.logprobs)
    pieces, tops = delta.pieces or (b"",) * tokens, delta.top_logprobs or ((),) * tokens
    return [
        {**_token(piece, logprob), "top_logprobs": [_token(one.piece, one.logprob) for one in top[:count]]}
        for piece, logprob, top in zip(pieces, delta.logprobs, tops, strict=True)
    ]


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


REPORTED = (
    *("stage", "replica", "queued_s", "first_output_s", "total_s", "input_items", "output_items", "failovers"),
    *("audio_underruns", "audio_starved_s"),
)
"""The fields of a StageReport that are shown."""


def sound_fields(chunk: AudioChunk) -> dict[str, Any]:
    """Fields about a sound: how many seconds a player should wait after the first sound so that it never runs dry (None: the server does
    not say), and the sample rate in Hz."""
    return {"prebuffer_s": chunk.prebuffer_s, "sample_rate_hz": chunk.sample_rate_hz}


def failover_fields(event: Failover) -> dict[str, Any]:
    """Fields about the loss of a server that another one replaced."""
    return {name: value for name, value in asdict(event).items() if name != "arrival_s"}


def notes_of(product: Answer | Done, limit_name: str = "max_tokens") -> list[str]:
    """The notes on an answer. limit_name: the request's name of the field that limits the tokens."""
    usage = product.usage
    return [*usage.notes, *end_notes(product.finish_reason, usage.completion_tokens, usage.thought_tokens, f"a higher {limit_name}")]


def account_fields(done: Done, seed: int | None, limit_name: str = "max_tokens") -> dict[str, Any]:
    """Fields of the server's account of an answer. seed: the client's, see `shown_seed`. limit_name: as in `notes_of`."""
    usage = done.usage
    times = {
        "queued_s": usage.queued_s,
        "first_text_s": usage.first_text_s,
        "first_audio_s": usage.first_audio_s,
        "total_s": usage.total_s,
        **unspoken_fields(usage),
        "notes": notes_of(done, limit_name),
        "drew": usage.drew,
        "stages": [{name: getattr(report, name) for name in REPORTED} for report in usage.stages],
    }
    return {"usage": times, "session_id": done.session_id, "seed": shown_seed(done.seed, seed), "pipeline": done.pipeline}


def unspoken_fields(usage: Usage) -> dict[str, Any]:
    """Fields about the characters of a text that were not spoken: how many, and the first of them."""
    return {"unspoken": usage.unspoken, "unspoken_words": usage.unspoken_words}
