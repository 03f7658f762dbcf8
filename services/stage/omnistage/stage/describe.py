"""Turns a model's own description (ModelInfo) into the answer of Describe."""

from __future__ import annotations

from omnistage.models.interface import Content, ElementType, ModelInfo, PortSpec
from omnistage.v1 import stage_pb2, tensor_pb2

_ELEMENT_TYPES = {
    ElementType.FLOAT32: tensor_pb2.ELEMENT_TYPE_FLOAT32,
    ElementType.FLOAT16: tensor_pb2.ELEMENT_TYPE_FLOAT16,
    ElementType.BFLOAT16: tensor_pb2.ELEMENT_TYPE_BFLOAT16,
    ElementType.INT64: tensor_pb2.ELEMENT_TYPE_INT64,
    ElementType.INT32: tensor_pb2.ELEMENT_TYPE_INT32,
    ElementType.INT16: tensor_pb2.ELEMENT_TYPE_INT16,
    ElementType.UINT8: tensor_pb2.ELEMENT_TYPE_UINT8,
    ElementType.BOOL: tensor_pb2.ELEMENT_TYPE_BOOL,
}


def describe(kind: stage_pb2.StageKind, info: ModelInfo) -> stage_pb2.DescribeResponse:
    """The answer of Describe for a model that is served as a stage of this kind."""
    return stage_pb2.DescribeResponse(
        kind=kind,
        model=info.name,
        revision=info.revision,
        accepts=[_port(port, is_input=True) for port in info.accepts],
        produces=[_port(port, is_input=False) for port in info.produces],
        max_sessions=info.max_sessions,
        voices=info.voices,
        inputs=info.inputs,
        constraints=info.constraints,
    )


def _port(port: PortSpec, *, is_input: bool) -> stage_pb2.Port:
    """A port of a model as the contract describes it."""
    payload = stage_pb2.Payload.Value(f"PAYLOAD_{port.content.name}")
    is_tensor = port.content is Content.TENSOR
    replay = stage_pb2.REPLAY_WINDOW if port.window else stage_pb2.REPLAY_ALL
    return stage_pb2.Port(
        name=port.name,
        payload=stage_pb2.Payload.Name(payload),
        rate_millihertz=round(port.rate_hz * 1000),
        compact=port.compact,
        replay=replay if is_input else stage_pb2.REPLAY_UNSPECIFIED,
        element_type=element_type(port) if is_tensor else tensor_pb2.ELEMENT_TYPE_UNSPECIFIED,
        width=port.width,
    )


def element_type(port: PortSpec) -> tensor_pb2.ElementType:
    """The element type of a tensor port, as the contract names it."""
    return _ELEMENT_TYPES[port.element_type]
