"""The ports from a Thinker to a Talker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPorts:
    """Names of ports: rows of the conversation, where each of them stands, and rows of the answer."""

    prompt: str
    places: str
    reply: str
