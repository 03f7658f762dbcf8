"""The numbers that form the place of a row of Qwen3-Omni."""

from __future__ import annotations

from omnistage.models.speech.talker import AXES

PLACE = AXES + 1
"""How many numbers a place has: one for each axis, and the kind of its row as the last number."""

TEXT_ROW, MEDIUM_ROW = 0, 1
"""The kinds of a conversation's rows: the embedding of a token, or a hidden row of a picture, a film or sound."""
