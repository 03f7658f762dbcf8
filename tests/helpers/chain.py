"""A toy chain and its router in this process, and the request with which a test ends."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.ask import request
from helpers.servers import Local
from omnistage.v1 import omni_pb2, omni_pb2_grpc


class RouterAndStages:
    """A router and the stages behind it, by kind."""

    def __init__(self, stages: Mapping[str, Local], router: Local, stub: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
        self.stages = stages
        self.router = router
        self.stub = stub

    @property
    def addresses(self) -> list[str]:
        return list(addresses_of(self.stages).values())


def addresses_of(stages: Mapping[str, Local]) -> dict[str, str]:
    return {kind: stage.address for kind, stage in stages.items()}


def good() -> omni_pb2.GenerateRequest:
    """Its answer is `check_toy(5, "good")`."""
    return request("good", 5)
