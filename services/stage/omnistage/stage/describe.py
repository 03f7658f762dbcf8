"""From a model's own description to the proto's."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from omnistage.v1 import stage_pb2, tensor_pb2


class PortLike(Protocol):
    """A port as models describe it."""

    @property
    def name(self) -> str: ...
    @property
    def content(self) -> Enum: ...
    @property
    def rate_hz(self) -> float: ...
    @property
    def width(self) -> int: ...
    @property
    def compact(self) -> bool: ...
    @property
    def window(self) -> bool: ...


class InfoLike(Protocol):
    """A model's constant facts."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def accepts(self) -> Sequence[PortLike]: ...
    @property
    def produces(self) -> Sequence[PortLike]: ...
    @property
    def max_sessions(self) -> int: ...
    @property
    def voices(self) -> Sequence[str]: ...


def describe(kind: stage_pb2.StageKind, info: InfoLike) -> stage_pb2.DescribeResponse:
    """The description of a model as a stage of a kind."""
    return stage_pb2.DescribeResponse(
        kind=kind,
        model=info.name,
        revision=info.revision,
        accepts=[_port(port, is_input=True) for port in info.accepts],
        produces=[_port(port, is_input=False) for port in info.produces],
        max_sessions=info.max_sessions,
        voices=info.voices,
    )


def _port(port: PortLike, *, is_input: bool) -> stage_pb2.Port:
    payload = stage_pb2.Payload.Value(f"PAYLOAD_{port.content.name}")
    replay = stage_pb2.REPLAY_WINDOW if port.window else stage_pb2.REPLAY_ALL
    return stage_pb2.Port(
        name=port.name,
        payload=stage_pb2.Payload.Name(payload),
        rate_millihertz=round(port.rate_hz * 1000),
        compact=port.compact,
        replay=replay if is_input else stage_pb2.REPLAY_UNSPECIFIED,
        element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32 if payload == stage_pb2.PAYLOAD_TENSOR else tensor_pb2.ELEMENT_TYPE_UNSPECIFIED,
        width=port.width,
    )
