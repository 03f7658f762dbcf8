"""Facts that the gateway adds to OpenAI's answers for clients that ask for them, in the same shapes at every endpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from omnistage.client.events import AudioChunk, Done, Failover, StageReport, Usage

REPORTED = (
    *("stage", "replica", "queued_s", "first_output_s", "total_s", "input_items", "output_items", "failovers"),
    *("audio_underruns", "audio_starved_s"),
)
"""The fields of a StageReport that are shown."""


def sound(chunk: AudioChunk) -> dict[str, Any]:
    """Fields about a sound: how many seconds a player should wait after the first sound so that it never runs dry (None: the server does
    not say), and the sample rate in Hz."""
    return {"prebuffer_s": chunk.prebuffer_s, "sample_rate_hz": chunk.sample_rate_hz}


def failover(event: Failover) -> dict[str, Any]:
    """Fields about the loss of a server that another one replaced."""
    return {name: value for name, value in asdict(event).items() if name != "arrival_s"}


def account(done: Done) -> dict[str, Any]:
    """Fields of the server's account of an answer."""
    usage = done.usage
    times = {
        "queued_s": usage.queued_s,
        "first_text_s": usage.first_text_s,
        "first_audio_s": usage.first_audio_s,
        "total_s": usage.total_s,
        **unspoken_fields(usage),
        "notes": list(usage.notes),
        "drew": usage.drew,
        "stages": [_stage(report) for report in usage.stages],
    }
    return {"usage": times, "session_id": done.session_id, "seed": done.seed, "pipeline": done.pipeline}


def unspoken_fields(usage: Usage) -> dict[str, Any]:
    """Fields about the characters of a text that were not spoken: how many, and the first of them."""
    return {"unspoken": usage.unspoken, "unspoken_words": usage.unspoken_words}


def _stage(report: StageReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in REPORTED}
