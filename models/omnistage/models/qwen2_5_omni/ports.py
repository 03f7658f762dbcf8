"""The ports between the stages of Qwen2.5-Omni, and how its models are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omnistage.models.common.checkpoint import called, json_object
from omnistage.models.common.thinker import TEXT
from omnistage.models.interface import Content, ElementType, PortSpec

PROMPT, HIDDEN = "prompt", "hidden"
"""Rows of the conversation, and of the answer."""


def thinker_ports(width: int, dtype: str) -> tuple[PortSpec, ...]:
    """What the Thinker puts out. width, dtype: of its rows."""
    rows = PortSpec("", Content.TENSOR, width=width, element_type=ElementType(dtype))
    return PortSpec(TEXT, Content.TEXT, compact=True), replace(rows, name=PROMPT), replace(rows, name=HIDDEN)


def name_of(folder: Path) -> str:
    """How people call the model of a folder: as its own config does, if that names it."""
    named = json_object(folder / "config.json").get("_name_or_path")
    return (named if isinstance(named, str) and named else called(folder)).rpartition("/")[2].lower()
