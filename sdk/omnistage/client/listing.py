"""The pipelines that a router offers and its stage servers, as plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from omnistage.client.reader import stage_name, state_name
from omnistage.v1 import omni_pb2

PipelineState = Literal["ready", "starting"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline of a router. stages, inputs, outputs: names. on_request: outputs that come only if a call names them. state: ready;
    starting: it cannot answer yet, or not now, because one of its stages is away."""

    name: str
    stages: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    voices: tuple[str, ...]
    description: str
    on_request: tuple[str, ...] = ()
    state: PipelineState = "ready"

    @property
    def draws(self) -> bool:
        """Whether `draw`, `film` or `sound` may ask it: it has a diffusion stage."""
        return "diffusion" in self.stages

    @property
    def only_draws(self) -> bool:
        """Whether it has a diffusion stage and no Thinker, so that it cannot be asked for text."""
        return self.draws and "thinker" not in self.stages

    @classmethod
    def all_of(cls, listed: omni_pb2.ListModelsResponse) -> list[Pipeline]:
        """A router's pipelines, the ready ones first."""
        return [*(cls._of(model, "ready") for model in listed.models), *(cls._of(model, "starting") for model in listed.starting)]

    @classmethod
    def _of(cls, model: omni_pb2.Model, state: PipelineState) -> Pipeline:
        return cls(
            name=model.name,
            stages=tuple(stage_name(kind) for kind in model.stages),
            inputs=tuple(model.inputs),
            outputs=tuple(model.outputs),
            voices=tuple(model.voices),
            description=model.description,
            on_request=tuple(model.on_request),
            state=state,
        )


@dataclass(frozen=True, slots=True)
class Replica:
    """One stage server. state: serving; draining: it ends; lost; starting: it has not answered yet. sessions, queue: how many sessions run,
    and how many wait. transport: the ways by which tensors reach it, the most used first; empty before its first session. settings: by
    name, the values that it chose, each with the reason: device, dtype, sizes of batch and cache."""

    pipeline: str
    stage: str
    model: str
    address: str
    pid: int
    state: str
    sessions: int
    queue: int
    transport: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, replica: omni_pb2.Replica) -> Replica:
        transports = sorted(replica.load.transports.items(), key=lambda item: (-item[1], item[0]))
        return cls(
            pipeline=replica.pipeline,
            stage=stage_name(replica.kind),
            model=replica.model,
            address=replica.address,
            pid=replica.pid,
            state=state_name(replica.state),
            sessions=replica.load.sessions,
            queue=replica.load.queued,
            transport=",".join(name.removeprefix("TRANSPORT_KIND_").lower() for name, _ in transports),
            settings=dict(replica.settings),
        )
