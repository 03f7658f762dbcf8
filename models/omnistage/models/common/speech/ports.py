"""The ports from a Thinker to a Talker, and on to a Code2Wav."""

from __future__ import annotations

from dataclasses import replace

from omnistage.models.common.thinker import TEXT
from omnistage.models.interface import Content, ElementType, PortSpec

PROMPT, PLACES, HIDDEN, CODES = "prompt", "places", "hidden", "codes"
"""Names of ports: rows of the conversation, places of these rows, rows of the answer, and codes of speech."""

AXES = 3
"""Number of axes of a place: time, height, width. A family may add further numbers to a place."""


def thinker_ports(width: int, dtype: str, *, place: int) -> tuple[PortSpec, ...]:
    """The output ports of a Thinker. width, dtype: of its rows. place: how many numbers a place has; 0: there is no Talker."""
    text = PortSpec(TEXT, Content.TEXT, compact=True)
    return (text, *row_ports(width, dtype, place=place)) if place else (text,)


def row_ports(width: int, dtype: str, *, place: int) -> tuple[PortSpec, ...]:
    """The ports from a Thinker to a Talker; arguments as in `thinker_ports`."""
    rows = PortSpec("", Content.TENSOR, width=width, element_type=ElementType(dtype))
    places = PortSpec(PLACES, Content.TENSOR, width=place, element_type=ElementType.INT32)
    return replace(rows, name=PROMPT), places, replace(rows, name=HIDDEN)


def codes_port(width: int, rate_hz: float) -> PortSpec:
    """The output port of a Talker. width: number of codes in a frame. rate_hz: frames in a second."""
    return PortSpec(CODES, Content.CODES, rate_hz=rate_hz, width=width, compact=True)
