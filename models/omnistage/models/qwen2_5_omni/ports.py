"""The ports between the stages of Qwen2.5-Omni."""

from __future__ import annotations

from dataclasses import replace

from omnistage.models.common.speech.ports import RowPorts
from omnistage.models.common.thinker import TEXT
from omnistage.models.interface import Content, ElementType, PortSpec

PROMPT, PLACES, HIDDEN, CODES = "prompt", "places", "hidden", "codes"
"""Rows of the conversation and where each of them stands, rows of the answer, and codes of speech."""

ROW_PORTS = RowPorts(PROMPT, PLACES, HIDDEN)

AXES = 3
"""Of a place: time, height, width."""

CODE_RATE_HZ = 50.0
"""24,000 samples a second, 240 for a mel frame, two mel frames for a code."""


def row_ports(width: int, dtype: str) -> tuple[PortSpec, ...]:
    """What the Thinker gives the Talker. width, dtype: of its rows."""
    rows = PortSpec("", Content.TENSOR, width=width, element_type=ElementType(dtype))
    places = PortSpec(PLACES, Content.TENSOR, width=AXES, element_type=ElementType.INT32)
    return replace(rows, name=PROMPT), places, replace(rows, name=HIDDEN)


def thinker_ports(width: int, dtype: str) -> tuple[PortSpec, ...]:
    """What the Thinker puts out."""
    return PortSpec(TEXT, Content.TEXT, compact=True), *row_ports(width, dtype)


CODES_PORT = PortSpec(CODES, Content.CODES, rate_hz=CODE_RATE_HZ, width=1, compact=True)
