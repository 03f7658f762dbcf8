"""The ports from a Thinker to a Talker, and on to a Code2Wav."""

from __future__ import annotations

from dataclasses import replace

from omnistage.models.common.thinker import TEXT
from omnistage.models.interface import Content, ElementType, PortSpec

PROMPT, PLACES, HIDDEN, CODES = "prompt", "places", "hidden", "codes"
"""Rows of the conversation, places of these rows, rows of the answer, and codes of speech."""

AXES = 3
"""Axes of a place: time, height, width. A family may add further numbers of a row."""


def thinker_ports(width: int, dtype: str, *, place: int) -> tuple[PortSpec, ...]:
    """The output ports of a Thinker. width, dtype: of its rows. place: how many numbers a place has; 0: it has no Talker."""
    text = PortSpec(TEXT, Content.TEXT, compact=True)
    return (text, *row_ports(width, dtype, place=place)) if place else (text,)


def row_ports(width: int, dtype: str, *, place: int) -> tuple[PortSpec, ...]:
    """The ports from a Thinker to a Talker; arguments as in `thinker_ports`."""
    rows = PortSpec("", Content.TENSOR, width=width, element_type=ElementType(dtype))
    places = PortSpec(PLACES, Content.TENSOR, width=place, element_type=ElementType.INT32)
    return replace(rows, name=PROMPT), places, replace(rows, name=HIDDEN)


def codes_port(width: int, rate_hz: float) -> PortSpec:
    """The output port of a Talker. width: codes of a frame."""
    return PortSpec(CODES, Content.CODES, rate_hz=rate_hz, width=width, compact=True)
