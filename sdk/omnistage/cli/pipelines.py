"""From what was typed to what a stack consists of: the pipeline's file says which stages, the command line says where and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from omnistage.cli.checks import check
from omnistage.cli.fetch import fetch
from omnistage.cli.layout import Layout, ServerOptions, StageLayout, flag
from omnistage.client.errors import BadRequestError, StackError, UnknownModelError
from omnistage.models.options import DEFAULTS
from omnistage.models.registry import UnknownFamily, dtypes, has_default, uses
from omnistage.router.pipeline import Pipeline, PipelineError, StageSpec, load_pipeline

DEFAULT_PIPELINE = "smol"

ADVICE = {"tensor_parallel_size": "; more processes of a stage serve more answers: --replicas talker=2"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked for. pipeline: name or file, empty for the default. devices, replicas: by stage; device "" is for all. dtype: for the
    stages that have a choice. settings: of servers, by name and by stage; stage "" is for those that have a use for it."""

    pipeline: str = ""
    checkpoint: Path | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "auto"
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    servers: ServerOptions = field(default_factory=ServerOptions)


def layout_of(choice: Choice) -> Layout:
    """Read the pipeline and fetch the checkpoints that the families have of their own. Raises an OmniError that says what to change."""
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
            family=stage.family,
            checkpoint="" if choice.checkpoint is None else str(choice.checkpoint.absolute()),
            device=_device(stage, choice),
            dtype=choice.dtype if choice.dtype in _dtypes(stage) else "auto",
            replicas=choice.replicas.get(stage.kind, 1),
            settings=_settings(stage, choice),
            options=stage.options,
        )
        for stage in pipeline.stages
    ]
    if choice.dtype != "auto" and all(stage.dtype == "auto" for stage in stages):
        raise StackError(f"--dtype: no stage of {pipeline.name} computes in {choice.dtype}")
    for setting, values in choice.settings.items():
        if "" in values and values[""] != str(DEFAULTS[setting]) and not any(setting in stage.settings for stage in stages):
            raise StackError(f"{flag(setting)} {values['']}: no stage of {pipeline.name} has a use for it{ADVICE.get(setting, '')}")
    layout = Layout(name, stages, choice.servers)
    check(layout)
    if choice.checkpoint is None:
        # Once, here, with a bar; the stages then find it in the cache.
        for family in dict.fromkeys(stage.family for stage in pipeline.stages):
            if has_default(family):
                fetch(family)
    return layout


def layout_for(pipeline: str) -> Layout:
    """The private stack of one call."""
    return layout_of(Choice(pipeline=pipeline))


def _dtypes(stage: StageSpec) -> tuple[str, ...]:
    try:
        return dtypes(stage.family, stage.kind)
    except UnknownFamily as error:
        raise StackError(str(error)) from None


def _device(stage: StageSpec, choice: Choice) -> str:
    return choice.devices.get(stage.kind) or choice.devices.get("", "cpu")


def _settings(stage: StageSpec, choice: Choice) -> dict[str, str]:
    """The settings for a stage: what was said for it, which it may refuse, and of what was said for all, what it has a use for."""
    found = {}
    for name, values in choice.settings.items():
        if stage.kind in values:
            found[name] = values[stage.kind]
        elif "" in values and uses(stage.family, stage.kind, name, _device(stage, choice)):
            found[name] = values[""]
    return found


def _check_stages(pipeline: Pipeline, choice: Choice) -> None:
    kinds = [stage.kind for stage in pipeline.stages]
    named = {"--device": choice.devices, "--replicas": choice.replicas, **{flag(name): by for name, by in choice.settings.items()}}
    for option, given in named.items():
        for stage in given:
            if stage and stage not in kinds:
                raise BadRequestError.of(option, f"{pipeline.name} has no {stage}; it has {', '.join(kinds)}")
