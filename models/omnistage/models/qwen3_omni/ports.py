"""The part of the ports between the stages of Qwen3-Omni that is its own."""

from __future__ import annotations

from omnistage.models.common.speech.ports import AXES

PLACE = AXES + 1
"""Numbers of a place: the last one tells the kind of the row."""

TEXT_ROW, MEDIUM_ROW = 0, 1
"""The kinds of a conversation's rows: the embedding of a token, or a hidden row of a picture, a film or sound."""
