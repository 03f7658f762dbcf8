"""Records how a router and its stages refuse bad messages: for each field of a request a case with every value of VALUES.

The fields come from the descriptors of the contract. It runs as a process of its own, whose PYTHONPATH has the recorded checkout:
`python -m tools.recording.refusals HOST:PORT`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2, stage_pb2_grpc

M = TypeVar("M", bound=Message)

LIMIT_S = 20.0
SESSION = "recording"
TOKEN_KEY = "omnistage-token"
DEPTH = 6
"""The number of messages within each other that are changed."""

REALS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-1": -1.0, "0.5": 0.5, "1e30": 1e30}
VALUES: Mapping[int, Mapping[str, Any]] = {
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE), REALS),
    FieldDescriptor.TYPE_INT32: {"-1": -1, "most": (1 << 31) - 1},
    FieldDescriptor.TYPE_INT64: {"-1": -1, "most": (1 << 63) - 1},
    FieldDescriptor.TYPE_UINT32: {"0": 0, "1": 1, "70000": 70_000, "most": (1 << 32) - 1},
    FieldDescriptor.TYPE_UINT64: {"0": 0, "1": 1, "most": (1 << 64) - 1},
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
        yield from ((f"={{{name}}}", {keys["x" if "x" in keys else "1"]: one}) for name, one in values.items())
        yield from ((f"={{key {name}}}", {one: next(iter(values.values()))}) for name, one in keys.items())
        yield "={3000}", {type(keys["70000"])(number): next(iter(values.values())) for number in range(3000)}
        return
    if field.message_type is None:
        values = VALUES[field.type]
        inner = [*values.values()][1 % len(values)]
    else:
        old = getattr(message, field.name)
        inner = next(iter(old), getattr(type(message)(), field.name).add()) if field.is_repeated else old
        values = {"{}": type(inner)()} | (dict(changed(inner, depth - 1)) if depth and field.name not in SKIPPED else {})
    if field.is_repeated:
        yield "=[]", []
        yield from ((f"=[{count}]", [inner] * count) for count in COUNTS)
    sign = "=" if field.message_type is None else "."
    yield from ((f"[0]{sign}{name}", [one]) if field.is_repeated else (f"{sign}{name}", one) for name, one in values.items())


def requests() -> Iterator[tuple[str, omni_pb2.GenerateRequest]]:
    """Every request to the router, by case. Requests of one pipeline have every field of the contract, others those of their own stages."""
    turn = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text="hello")])
    answer = omni_pb2.GenerateRequest(model="toy-omni", seed=7, thinker=stage_pb2.ThinkerParams(messages=[turn], max_tokens=3))
    picture = omni_pb2.GenerateRequest(model="toy-film", seed=7, diffusion=stage_pb2.DiffusionParams(prompt="hello", steps=2))
    yield "empty", omni_pb2.GenerateRequest()
    for base in (answer, picture):
        yield f"{base.model}", base
        yield from ((f"{base.model} {name}", request) for name, request in changed(base))
    yield from ((f"toy {name}", omni_pb2.GenerateRequest(model="toy", seed=7, thinker=value)) for name, value in changed(answer.thinker))
    for name, value in changed(picture.diffusion):
        yield f"toy-picture {name}", omni_pb2.GenerateRequest(model="toy-picture", seed=7, diffusion=value)


def outcome(call: Iterator[Any]) -> dict[str, Any]:
    """The result of a call of the router: its error, or the number of items of each port."""
    counts: dict[str, int] = {}
    try:
        for response in call:
            match response.WhichOneof("event"):
                case "chunk" | "chunks":
                    for chunk in response.chunks.chunks if response.HasField("chunks") else [response.chunk]:
                        counts[chunk.port] = counts.get(chunk.port, 0) + chunk.count
                case "turn_failed":
                    return {"turn_failed": json_format.MessageToDict(response.turn_failed)}
                case "started":
                    counts[f"model {response.started.model}"] = len(response.started.revisions)
    except grpc.RpcError as error:
        return failure(error)
    return {"items": counts}


def failure(error: Any) -> dict[str, Any]:
    """Code, text and details of the error of a call."""
    details: list[Any] = []
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value).details:
                kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
                packed.Unpack(kind)
                details.append({kind.DESCRIPTOR.name: json_format.MessageToDict(kind)})
    return {"code": error.code().name, "text": error.details(), "details": details}


def opens(described: stage_pb2.DescribeResponse) -> Iterator[tuple[str, stage_pb2.Open]]:
    """Every Open of a stage, by case; params of other kinds than its own are one case each."""
    params = stage_pb2.StageParams()
    kind = stage_pb2.StageKind.Name(described.kind).removeprefix("STAGE_KIND_").lower()
    getattr(params, kind).SetInParent()
    if kind == "thinker":
        params.thinker.max_tokens = 3
        params.thinker.messages.add(role="user").parts.add(text="hello")
    elif kind == "diffusion":
        params.diffusion.prompt, params.diffusion.steps = "hello", 2
    credits = [stage_pb2.Credit(port=port.name, total=1 << 20) for port in described.produces]
    base = stage_pb2.Open(session_id=SESSION, model=described.model, seed=7, params=params, credits=credits)
    yield "", base
    for name, request in changed(base):
        if not name.startswith("params.") or name.startswith(f"params.{kind}") or name.endswith("{}"):
            yield f" {name}", request


def run_outcome(stub: Any, request: stage_pb2.Open, number: int, token: str) -> dict[str, Any]:
    """The result of a Run that sends only its Open: whether it was opened, and its end. number: makes the name of its session one that no
    other session has, because the end of the session before may still be on its way."""
    if request.session_id == SESSION:
        request.session_id = f"{SESSION}-{number}"
    shown: dict[str, Any] = {"opened": False}
    try:
        for response in stub.Run(iter([stage_pb2.RunRequest(open=request)]), timeout=LIMIT_S, metadata=((TOKEN_KEY, token),)):
            shown["opened"] |= response.HasField("opened")
            if response.HasField("ended"):
                shown["ended"] = json_format.MessageToDict(response.ended)
    except grpc.RpcError as error:
        shown |= failure(error)
    return shown


def main() -> int:
    """Print the results of all cases as JSON."""
    (router,) = sys.argv[1:]
    results: dict[str, Any] = {}
    with grpc.insecure_channel(router) as channel:
        omni = omni_pb2_grpc.OmniServiceStub(channel)
        for case, request in requests():
            results[f"Generate {case}"] = outcome(omni.Generate(request, timeout=LIMIT_S))
            if case.startswith("toy-omni"):
                turn = omni_pb2.ConverseRequest(turn=request)
                results[f"Converse {case}"] = outcome(omni.Converse(iter([turn]), timeout=LIMIT_S))
        for name, event in changed(omni_pb2.ConverseRequest(), 3):
            if not name.startswith("turn"):
                results[f"Converse {name}"] = outcome(omni.Converse(iter([event]), timeout=LIMIT_S))
        results["ListModels"] = json_format.MessageToDict(omni.ListModels(omni_pb2.ListModelsRequest()))
        replicas = omni.ListReplicas(omni_pb2.ListReplicasRequest()).replicas
    for replica in replicas:
        with grpc.insecure_channel(replica.address) as channel:
            stage = stage_pb2_grpc.StageServiceStub(channel)
            token = os.environ["OMNISTAGE_TOKEN"]
            described = stage.Describe(stage_pb2.DescribeRequest(), metadata=((TOKEN_KEY, token),))
            described.ClearField("boot_id")
            name = f"{replica.pipeline} {stage_pb2.StageKind.Name(replica.kind)}"
            results[f"Describe {name}"] = json_format.MessageToDict(described)
            for number, (case, opening) in enumerate(opens(described)):
                results[f"Run {name}{case}"] = run_outcome(stage, opening, number, token)
            results[f"Run {name} with another token"] = run_outcome(stage, stage_pb2.Open(), 0, "another-token-of-32-characters-")
    json.dump(results, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
