"""What an answer cost, in tokens."""

from __future__ import annotations

from omnistage.client.events import Usage

TALKER, CODES = "talker", "codes"


def audio_tokens(usage: Usage) -> int:
    """Of speech: its frames of codes."""
    return sum(report.output_items.get(CODES, 0) for report in usage.stages if report.stage == TALKER)
