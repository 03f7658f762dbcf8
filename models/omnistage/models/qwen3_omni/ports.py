"""What the ports between the stages of Qwen3-Omni have of their own."""

from __future__ import annotations

from omnistage.models.common.speech.ports import AXES

PLACE = AXES + 1
"""Numbers of a place: the last one says what the row is."""

TEXT_ROW, MEDIUM_ROW = 0, 1
"""What a row of the conversation is: the embedding of a token, or a hidden row of a picture, a film or sound."""
