"""The numbers of a place of Qwen3-Omni."""

from __future__ import annotations

from omnistage.models.common.speech.ports import AXES

PLACE = AXES + 1
"""Number of numbers of a place: its axes, and the kind of its row as the last one."""

TEXT_ROW, MEDIUM_ROW = 0, 1
"""The kinds of a conversation's rows: the embedding of a token, or a hidden row of a picture, a film or sound."""
