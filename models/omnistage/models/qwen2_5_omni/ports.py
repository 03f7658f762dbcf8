"""The port of codes of Qwen2.5-Omni."""

from __future__ import annotations

from omnistage.models.speech.talker import codes_port

CODE_RATE_HZ = 50.0
"""Codes in a second, because a second has 24,000 samples, a mel frame 240 samples, and a code two mel frames."""

CODES_PORT = codes_port(1, CODE_RATE_HZ)
