"""Kinds of stages by their plain names."""

from __future__ import annotations

from omnistage.v1 import stage_pb2


def kind_name(kind: stage_pb2.StageKind) -> str:
    """thinker, talker, code2wav or diffusion. Raises ValueError for a number that is no kind."""
    return stage_pb2.StageKind.Name(kind).removeprefix("STAGE_KIND_").lower()
