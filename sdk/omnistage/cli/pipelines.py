"""From what was typed to what a stack consists of: the pipeline's file says which stages, the command line says where and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from omnistage.cli.checks import check
from omnistage.cli.fetch import fetch
from omnistage.cli.layout import Layout, ServerOptions, StageLayout
from omnistage.client.errors import BadRequestError, StackError, UnknownModelError
from omnistage.models.registry import UnknownModel, dtypes
from omnistage.router.pipeline import Pipeline, PipelineError, StageSpec, load_pipeline

DEFAULT_PIPELINE = "smol"
DEFAULT_MODEL = "smol"
"""The model family that is fetched when it is not there and no checkpoint is given."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked for. pipeline: name or file, empty for the default. devices, replicas: by stage; device "" is for all. dtype: for the
    stages that have a choice."""

    pipeline: str = ""
    checkpoint: Path | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "auto"
    servers: ServerOptions = field(default_factory=ServerOptions)


def layout_of(choice: Choice) -> Layout:
    """Read the pipeline and fetch the default model if it is needed. Raises an OmniError that says what to change."""
    name = choice.pipeline or DEFAULT_PIPELINE
    try:
        pipeline = load_pipeline(name)
    except PipelineError as error:
        raise UnknownModelError(str(error), hint="Give the name or the file of a pipeline.", code=grpc.StatusCode.NOT_FOUND) from None
    _check_stages(pipeline, choice)
    if choice.checkpoint is not None and not choice.checkpoint.is_dir():
        raise BadRequestError.of("--checkpoint", f"{choice.checkpoint} is not a folder")
    stages = [
        StageLayout(
            kind=stage.kind,
            model=stage.model,
            model_path="" if choice.checkpoint is None else str(choice.checkpoint.absolute()),
            device=choice.devices.get(stage.kind) or choice.devices.get("", "cpu"),
            dtype=choice.dtype if choice.dtype in _dtypes(stage) else "auto",
            replicas=choice.replicas.get(stage.kind, 1),
            options=stage.options,
        )
        for stage in pipeline.stages
    ]
    if choice.dtype != "auto" and all(stage.dtype == "auto" for stage in stages):
        raise StackError(f"--dtype: no stage of {pipeline.name} computes in {choice.dtype}")
    layout = Layout(name, stages, choice.servers)
    check(layout)
    if choice.checkpoint is None and any(stage.model == DEFAULT_MODEL for stage in pipeline.stages):
        # Once, here, with a bar; the stages then find it in the cache.
        fetch()
    return layout


def layout_for(model: str) -> Layout:
    """The private stack of one call."""
    return layout_of(Choice(pipeline=model))


def _dtypes(stage: StageSpec) -> tuple[str, ...]:
    try:
        return dtypes(stage.model, stage.kind)
    except UnknownModel as error:
        raise StackError(str(error)) from None


def _check_stages(pipeline: Pipeline, choice: Choice) -> None:
    kinds = [stage.kind for stage in pipeline.stages]
    for option, given in (("--device", choice.devices), ("--replicas", choice.replicas)):
        for stage in given:
            if stage and stage not in kinds:
                raise BadRequestError.of(option, f"{pipeline.name} has no {stage}; it has {', '.join(kinds)}")
