"""The ports between the stages of Qwen3-Omni."""

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

PLACE = AXES + 1
"""Numbers of a place: the last one says what the row is."""

TEXT_ROW, MEDIUM_ROW = 0, 1
"""What a row of the conversation is: the embedding of a token, or a hidden row of a picture, a film or sound."""


def row_ports(width: int, dtype: str) -> tuple[PortSpec, ...]:
    """What the Thinker gives the Talker. width, dtype: of its rows."""
    rows = PortSpec("", Content.TENSOR, width=width, element_type=ElementType(dtype))
    places = PortSpec(PLACES, Content.TENSOR, width=PLACE, element_type=ElementType.INT32)
    return replace(rows, name=PROMPT), places, replace(rows, name=HIDDEN)


def codes_port(groups: int, rate_hz: float) -> PortSpec:
    """What the Talker puts out. groups: codes of a frame."""
    return PortSpec(CODES, Content.CODES, rate_hz=rate_hz, width=groups, compact=True)


def thinker_ports(width: int, dtype: str, *, speaks: bool) -> tuple[PortSpec, ...]:
    """What the Thinker puts out. speaks: whether the checkpoint has a Talker."""
    text = PortSpec(TEXT, Content.TEXT, compact=True)
    return (text, *row_ports(width, dtype)) if speaks else (text,)
