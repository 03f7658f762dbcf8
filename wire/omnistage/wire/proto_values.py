"""Plain values for two of the proto's: the names of the kinds of stages, the one list, and seconds for its Duration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from google.protobuf import duration_pb2

from omnistage.v1 import stage_pb2


def kind_name(kind: stage_pb2.StageKind) -> str:
    """Return thinker, talker, code2wav or diffusion. Raises ValueError for a number that is no kind."""
    return stage_pb2.StageKind.Name(kind).removeprefix("STAGE_KIND_").lower()


_NUMBERS = cast("list[stage_pb2.StageKind]", stage_pb2.StageKind.values())
"""The generated stub says int."""

KINDS: Mapping[str, stage_pb2.StageKind] = {kind_name(kind): kind for kind in _NUMBERS if kind != stage_pb2.STAGE_KIND_UNSPECIFIED}
"""The kinds by name, in the order of a pipeline."""


def duration(seconds: float) -> duration_pb2.Duration:
    """The seconds as a Duration, which is never negative: two readings of clocks may disagree slightly."""
    result = duration_pb2.Duration()
    result.FromNanoseconds(max(int(seconds * 1e9), 0))
    return result
