"""The port of codes of Qwen2.5-Omni."""

from __future__ import annotations

from omnistage.models.common.speech.ports import codes_port

CODE_RATE_HZ = 50.0
"""Codes in a second: 24,000 samples a second, 240 for a mel frame, two mel frames for a code."""

CODES_PORT = codes_port(1, CODE_RATE_HZ)
