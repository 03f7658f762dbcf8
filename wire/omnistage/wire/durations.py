"""Seconds as the proto's Duration."""

from __future__ import annotations

from google.protobuf import duration_pb2


def duration(seconds: float) -> duration_pb2.Duration:
    """The seconds as a Duration, which is never negative: two readings of clocks may disagree slightly."""
    result = duration_pb2.Duration()
    result.FromNanoseconds(max(int(seconds * 1e9), 0))
    return result
