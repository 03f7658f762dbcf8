"""Records how a router and its stages refuse bad messages: for each field of a request a case with every value of VALUES.

The fields come from the descriptors of the contract. It runs as a process of its own, whose PYTHONPATH has the recorded checkout:
`python -m tools.recording.refusals HOST:PORT`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as error_details_pb2  # Its types are in details of errors.
from google.rpc import status_pb2

from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2, stage_pb2_grpc

M = TypeVar("M", bound=Message)

LIMIT_S = 20.0
TOKEN = (("omnistage-token", os.environ.get("OMNISTAGE_TOKEN", "")),)
DEPTH = 6
"""The number of messages within each other that are changed."""

PARAMS: Mapping[str, Mapping[str, Any]] = {
    "thinker": {"messages": [{"role": "user", "parts": [{"text": "hello"}]}], "max_tokens": 3},
    "diffusion": {"prompt": "hello", "steps": 2},
}
"""Good params by kind; empty ones are good for other kinds."""

REQUESTS = (
    ("toy-omni", "thinker", ""),
    ("toy-film", "diffusion", ""),
    ("toy", "thinker", "thinker"),
    ("toy-picture", "diffusion", "diffusion"),
)
"""Pipelines, the kind of their params, and how the names of the fields begin that are changed."""

REALS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-1": -1.0, "0.5": 0.5, "1e30": 1e30}
SHORT, LONG = ({"0": 0, "1": 1, "70000": 70_000, "most": (1 << bits) - 1} for bits in (32, 64))
VALUES: Mapping[int, Mapping[str, Any]] = {
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE), REALS),
    FieldDescriptor.TYPE_INT32: {"-1": -1, "most": (1 << 31) - 1},
    FieldDescriptor.TYPE_INT64: {"-1": -1, "most": (1 << 63) - 1},
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_UINT32), SHORT),
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_UINT64), LONG),
    FieldDescriptor.TYPE_BOOL: {"true": True},
    FieldDescriptor.TYPE_ENUM: {"1": 1, "99": 99},
    FieldDescriptor.TYPE_STRING: {"empty": "", "x": "x", "odd": "\u00e9\n\0", "long": "x" * 300, "70000": "x" * 70_000},
    FieldDescriptor.TYPE_BYTES: {"empty": b"", "x": b"x\0", "long": b"x" * 2000},
}
"""By the type of a field, the values that it gets, by name."""

COUNTS = (1, 20, 1100)
"""Numbers of elements of a repeated field."""

SKIPPED = ("history", "route", "offers", "addresses")
"""Fields whose parts are not changed: they name other processes and their memory."""


def changed(message: M, depth: int = DEPTH) -> Iterator[tuple[str, M]]:
    """Copies of a message in which one field has one value, by the field and the name of the value."""
    for field in message.DESCRIPTOR.fields:
        others = {other.name: value for other, value in message.ListFields() if other.name != field.name}
        for name, value in _variants(field, message, depth):
            yield f"{field.name}{name}", type(message)(**others, **{field.name: value})


def _variants(field: Any, message: Message, depth: int) -> Iterator[tuple[str, Any]]:
    """The values that a field gets, by name. field: a descriptor; its type depends on the implementation of protobuf."""
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if is_map:
        key, value = field.message_type.fields
        keys, values = VALUES[key.type], VALUES[value.type]
        good_key, any_value = keys["x" if "x" in keys else "1"], next(iter(values.values()))
        yield from ((f"={{{name}}}", {good_key: one}) for name, one in values.items())
        yield from ((f"={{key {name}}}", {one: any_value}) for name, one in keys.items())
        yield "={3000}", {type(keys["70000"])(number): any_value for number in range(3000)}
        return
    if field.message_type is None:
        values = VALUES[field.type]
        element = [*values.values()][1 % len(values)]  # The second value, if there are two.
    else:
        content = getattr(message, field.name)
        # A repeated field gives its first element, or a new one if it has none.
        element = next(iter(content), getattr(type(message)(), field.name).add()) if field.is_repeated else content
        values = {"{}": type(element)()} | (dict(changed(element, depth - 1)) if depth and field.name not in SKIPPED else {})
    sign = "=" if field.message_type is None else "."
    if not field.is_repeated:
        yield from ((f"{sign}{name}", one) for name, one in values.items())
        return
    yield "=[]", []
    yield from ((f"=[{count}]", [element] * count) for count in COUNTS)
    yield from ((f"[0]{sign}{name}", [one]) for name, one in values.items())


def requests() -> Iterator[tuple[str, omni_pb2.GenerateRequest]]:
    """Every request to the router, by case."""
    for model, kind, begin in REQUESTS:
        base = omni_pb2.GenerateRequest(model=model, seed=7, **{kind: PARAMS[kind]})  # type: ignore[arg-type]
        yield model, base
        yield from ((f"{model} {name}", request) for name, request in changed(base) if name.startswith(begin))


def opens(described: stage_pb2.DescribeResponse, kind: str) -> Iterator[tuple[str, stage_pb2.Open]]:
    """Every Open of a stage, by case. Params of another kind than the stage's are one case for each kind. Each Open has a session of its
    own, because the end of the session before may still be on its way."""
    params = stage_pb2.StageParams(**{kind: PARAMS.get(kind, {})})
    credits = [stage_pb2.Credit(port=port.name, total=1 << 20) for port in described.produces]
    base = stage_pb2.Open(session_id="recording", model=described.model, seed=7, params=params, credits=credits)
    for number, (name, request) in enumerate([("good", base), *changed(base)]):
        if not name.startswith("params.") or name.startswith(f"params.{kind}") or name.endswith("{}"):
            if not name.startswith("session_id"):
                request.session_id = f"recording-{number}"
            yield name, request


def outcome(call: Iterator[Any]) -> dict[str, Any]:
    """The result of a call: its error, or what was opened and the number of items of each port."""
    shown: dict[str, Any] = {}
    counts = Counter[str]()
    try:
        for response in call:
            match event := response.WhichOneof("event"):
                case "chunk" | "chunks":
                    for chunk in response.chunks.chunks or [response.chunk]:
                        counts[chunk.port] += chunk.count
                case "started":
                    shown["model"] = response.started.model
                case "opened" | "ended" | "turn_failed":
                    shown[event] = json_format.MessageToDict(getattr(response, event)) if event != "opened" else True
    except grpc.RpcError as error:
        trailing: Any = error.trailing_metadata() or ()
        status = status_pb2.Status.FromString(dict(trailing).get("grpc-status-details-bin", b""))
        return {**shown, "code": error.code().name, "text": error.details(), "status": json_format.MessageToDict(status)}
    return shown if "code" in shown.get("ended", {}) or "turn_failed" in shown else {**shown, "items": counts}


def record_router(router: str) -> Iterator[tuple[str, Any]]:
    """The results of the router's cases, by case, and those of the stages behind it."""
    with grpc.insecure_channel(router) as channel:
        omni = omni_pb2_grpc.OmniServiceStub(channel)
        for case, request in requests():
            yield f"Generate {case}", outcome(omni.Generate(request, timeout=LIMIT_S))
            if case.startswith("toy-omni"):
                yield f"Converse {case}", outcome(omni.Converse(iter([omni_pb2.ConverseRequest(turn=request)]), timeout=LIMIT_S))
        for name, event in changed(omni_pb2.ConverseRequest(), 1):
            if not name.startswith("turn"):
                yield f"Converse {name}", outcome(omni.Converse(iter([event]), timeout=LIMIT_S))
        yield "ListModels", json_format.MessageToDict(omni.ListModels(omni_pb2.ListModelsRequest()))
        for replica in omni.ListReplicas(omni_pb2.ListReplicasRequest()).replicas:
            yield from record_stage(replica)


def record_stage(replica: omni_pb2.Replica) -> Iterator[tuple[str, Any]]:
    """The results of one stage's cases, by case."""
    kind = stage_pb2.StageKind.Name(replica.kind).removeprefix("STAGE_KIND_").lower()
    name = f"{replica.pipeline} {kind}"
    with grpc.insecure_channel(replica.address) as channel:
        stage = stage_pb2_grpc.StageServiceStub(channel)
        described = stage.Describe(stage_pb2.DescribeRequest(), metadata=TOKEN)
        described.ClearField("boot_id")
        yield f"Describe {name}", json_format.MessageToDict(described)
        yield f"Run {name} without token", outcome(stage.Run(iter([stage_pb2.RunRequest()]), timeout=LIMIT_S))
        for case, request in opens(described, kind):
            yield f"Run {name} {case}", outcome(stage.Run(iter([stage_pb2.RunRequest(open=request)]), timeout=LIMIT_S, metadata=TOKEN))
        for port in described.accepts[:1]:
            for number, (case, chunk) in enumerate(changed(chunk_pb2.Chunk(port=port.name), 2)):
                request = stage_pb2.Open(session_id=f"chunk-{number}", model=described.model)
                messages = [stage_pb2.RunRequest(open=request), stage_pb2.RunRequest(chunk=chunk)]
                yield f"Run {name} chunk.{case}", outcome(stage.Run(iter(messages), timeout=LIMIT_S, metadata=TOKEN))


def main() -> int:
    """Print the results of all cases as JSON."""
    json.dump(dict(record_router(sys.argv[1])), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
