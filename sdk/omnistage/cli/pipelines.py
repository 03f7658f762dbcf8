"""From what was typed to what a stack consists of: the pipeline's file says which stages, the command line says where and how often."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from omnistage.cli.checks import check
from omnistage.cli.fetch import checkpoint, fetch, named
from omnistage.cli.layout import Layout, ServerOptions, StageLayout, flag
from omnistage.client.errors import BadRequestError, RequestError, StackError, UnknownModelError
from omnistage.client.private_stack import DRAWING_PIPELINE
from omnistage.models.errors import LoadError
from omnistage.models.options import DEFAULTS, MEMORY_SHARE
from omnistage.models.registry import UnknownFamily, dtypes, families, has_default, recognise, uses
from omnistage.router.pipeline import Pipeline, PipelineError, StageSpec, load_pipeline, shipped_pipelines

DEFAULT_PIPELINE = "smol"
"""Where nothing is named; what draws is that of `client.private_stack`."""

ADVICE = {"tensor_parallel_size": "; more processes of a stage serve more answers: --replicas talker=2"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked for.

    pipeline: name or file, or a checkpoint; empty for that of the checkpoint, and without one for the default. checkpoint: a folder, or a
    name at a hub. devices, replicas: by stage; device "" is for all. dtype: for the stages that have a choice. settings: of servers, by
    name and by stage; stage "" is for those that have a use for it. inputs, outputs: what will be asked for, such as image and audio. kind:
    of the stage that will be asked; empty: whatever the pipeline begins with.
    """

    pipeline: str = ""
    checkpoint: str | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "auto"
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    servers: ServerOptions = field(default_factory=ServerOptions)
    inputs: Collection[str] = ()
    outputs: Collection[str] = ()
    kind: str = ""


def layout_of(choice: Choice) -> Layout:
    """Read the pipeline and fetch the checkpoint: that which was named, else those that the families have of their own. Raises an OmniError
    that says what to change."""
    choice, option = _sorted_out(choice)
    if (typed := choice.checkpoint) is None:
        pipeline = choice.pipeline or (DRAWING_PIPELINE if choice.kind == "diffusion" else DEFAULT_PIPELINE)
        layout = _layout(pipeline, _read(pipeline), None, choice)
        check(layout)
        layout = shared(layout)
        # Once, here, with a bar; the stages then find it in the cache.
        for family in dict.fromkeys(stage.family for stage in layout.stages):
            if has_default(family):
                fetch(family)
        return layout

    def judge(folder: Path) -> None:
        """Whatever can be told before the weights are fetched."""
        layout = _of_checkpoint(folder, typed, choice)
        among = {name: family for name, family in families().items() if name in {stage.family for stage in layout.stages}}
        has_weights = any(family.marks for family in among.values())
        if has_weights:
            recognise(folder, among, typed)
        check(layout, of_models=not has_weights)

    layout = _of_checkpoint(checkpoint(typed, option, judge), typed, choice)
    check(layout)
    return shared(layout)


def _sorted_out(choice: Choice) -> tuple[Choice, str]:
    """A choice whose pipeline is one, and where its checkpoint was typed."""
    typed = choice.pipeline
    if not typed or typed in shipped_pipelines() or not (Path(typed).is_dir() or named(typed) is not None):
        return choice, "--checkpoint"
    if choice.checkpoint is not None:
        raise BadRequestError.of("--checkpoint", f"{typed} is a checkpoint already: name a pipeline with it, or leave one of them out")
    return replace(choice, pipeline="", checkpoint=typed), "PIPELINE"


def _of_checkpoint(folder: Path, typed: str, choice: Choice) -> Layout:
    name = choice.pipeline or _pipeline_of(folder, typed, choice)
    return _layout(name, _read(name), folder, choice)


def _pipeline_of(folder: Path, typed: str, choice: Choice) -> str:
    """The pipeline of the family that a checkpoint is of: where it is known what will be asked for, the shortest that gives it; else that
    with the family's name, or the only other one that can do what is asked. Raises StackError where there is none, or where it might be
    several."""
    try:
        family = recognise(folder, called=typed)
    except LoadError as error:
        if not any((folder / name).is_file() for name in ("config.json", "model_index.json")):
            return DEFAULT_PIPELINE  # Whose families say what is missing.
        raise StackError(str(error)) from None
    having = [name for name in shipped_pipelines() if {stage.family for stage in _read(name).stages} == {family}]
    able = [name for name in having if _is_able(_read(name), _read(name).stages[0].kind, choice)]
    if choice.outputs:
        shortest = min((len(_read(name).stages) for name in able), default=0)
        able = [name for name in able if len(_read(name).stages) == shortest]
    if family in having and (family in able or len(able) != 1):
        return family
    having = able or having
    if len(having) != 1:
        what = f"there are the pipelines {', '.join(having)}" if having else "no pipeline comes with it"
        raise StackError(
            f"{typed} is a checkpoint of {family}, for which {what}", hint=f"Name one: omnistage serve PIPELINE --checkpoint {typed}"
        )
    return having[0]


def _read(name: str) -> Pipeline:
    try:
        return load_pipeline(name)
    except PipelineError as error:
        raise UnknownModelError(str(error), hint="Give the name or the file of a pipeline.", code=grpc.StatusCode.NOT_FOUND) from None


def _layout(name: str, pipeline: Pipeline, folder: Path | None, choice: Choice) -> Layout:
    _check_stages(pipeline, choice)
    _check_able(pipeline, choice)
    stages = [
        StageLayout(
            kind=stage.kind,
            family=stage.family,
            checkpoint="" if folder is None else str(folder),
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
    return Layout(name, stages, choice.servers)


def shared(layout: Layout) -> Layout:
    """Servers that take what they find free, all on one device: each is told its part of it, an equal one of what nobody was given. Raises
    StackError where more is given than there is."""
    devices: dict[str, list[StageLayout]] = {}
    for stage in layout.stages:
        if uses(stage.family, stage.kind, MEMORY_SHARE, stage.device):
            devices.setdefault(stage.device.removesuffix(":0"), []).append(stage)
    told = dict[str, str]()
    for device, beside in devices.items():
        given = sum(float(stage.settings[MEMORY_SHARE]) * stage.replicas for stage in beside if MEMORY_SHARE in stage.settings)
        equal = sum(stage.replicas for stage in beside if MEMORY_SHARE not in stage.settings)
        part = int(1000 * (1 - given) / max(equal, 1)) / 1000  # Rounded down: together they have no more than there is.
        if given > 1 or (equal and part <= 0):
            others = f", and {equal} more are on it" if equal else ""
            raise StackError(f"{flag(MEMORY_SHARE)}: {given:g} of the memory of {device} is given away{others}; all share 1: give less")
        if part < 1:
            told |= {stage.kind: f"{part:g}" for stage in beside if MEMORY_SHARE not in stage.settings}
    stages = [
        replace(stage, settings={**stage.settings, MEMORY_SHARE: told[stage.kind]}) if stage.kind in told else stage
        for stage in layout.stages
    ]
    return replace(layout, stages=stages)


def layout_for(
    pipeline: str, inputs: Collection[str], outputs: Collection[str], *, kind: str = "", devices: Mapping[str, str] | None = None
) -> Layout:
    """The private stack of one call with these inputs, for these outputs, of a stage of this kind. Raises RequestError where it has not
    all of them."""
    return layout_of(Choice(pipeline=pipeline, devices=devices or {}, kind=kind, inputs=inputs, outputs=outputs))


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


def _check_able(pipeline: Pipeline, choice: Choice) -> None:
    for verb, wanted, there in (("takes", choice.inputs, pipeline.could_take), ("gives", choice.outputs, pipeline.offered)):
        missing = [name for name in wanted if name not in there]
        if missing:
            able = [name for name in shipped_pipelines() if _is_able(load_pipeline(name), choice.kind or pipeline.stages[0].kind, choice)]
            told = " or ".join(_told(name, choice) for name in able)
            hint = f"Give another --pipeline: {told}." if able else "No pipeline that comes with omnistage has all of it."
            raise RequestError(f"{pipeline.name} {verb} {', '.join(there)}, not {', '.join(missing)}", hint=hint)


def _told(name: str, choice: Choice) -> str:
    """A pipeline to ask instead; of one that takes what is asked with some checkpoints only, one of those."""
    lacking = [medium for medium in choice.inputs if medium not in load_pipeline(name).inputs]
    return f"a checkpoint of {name} that takes {', '.join(lacking)} (its folder, or OWNER/NAME)" if lacking else name


def _is_able(pipeline: Pipeline, kind: str, choice: Choice) -> bool:
    """kind: of the first stage."""
    inputs, outputs = set(choice.inputs), set(choice.outputs)
    return pipeline.stages[0].kind == kind and inputs <= {*pipeline.could_take} and outputs <= {*pipeline.offered}
