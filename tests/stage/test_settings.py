"""The choices of a stage are told once in its log, in its description and to the clients of its router."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.servers import ServerProcess, local_router, local_stage, omni_stub, stage_flags, stage_stub, toy_logic
from omnistage.v1 import omni_pb2, stage_pb2


async def test_what_was_chosen_is_logged_once_and_described(tmp_path: Path) -> None:
    flags = [*stage_flags(), "--gpu-memory-utilization", "0.5", "--max-sessions", "3"]
    with ServerProcess("omnistage.thinker", *flags, log_folder=tmp_path) as server:
        server.wait_ready()
        async with stage_stub(server.address) as stub:
            described = await stub.Describe(stage_pb2.DescribeRequest())
        log = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    expected = {
        "family": "toy",
        "checkpoint": "own",
        "device": "cpu (default)",
        "dtype": "float32 (default)",
        "threads": "1 (default)",
        "gpu_memory_utilization": "0.5, which means nothing on a CPU",
    }
    assert dict(described.settings) == expected
    (loaded,) = [entry for entry in log if entry["event"] == "model.loaded"]
    assert {name: loaded[name] for name in expected} == expected
    assert (loaded["kind"], loaded["model"], loaded["revision"]) == ("thinker", "toy-thinker", described.revision)


async def test_the_router_carries_what_its_stages_chose() -> None:
    logics = {kind: toy_logic(kind) for kind in ("thinker", "talker", "code2wav")}
    for kind, logic in logics.items():
        logic.description.settings["device"] = f"that of the {kind}"
    async with (
        local_stage(logics["thinker"]) as thinker,
        local_stage(logics["talker"]) as talker,
        local_stage(logics["code2wav"]) as code2wav,
    ):
        stages = {"thinker": thinker.address, "talker": talker.address, "code2wav": code2wav.address}
        async with local_router(stages) as router, omni_stub(router.address) as stub:
            replicas = (await stub.ListReplicas(omni_pb2.ListReplicasRequest())).replicas
    assert [replica.settings["device"] for replica in replicas] == [f"that of the {kind}" for kind in logics]
