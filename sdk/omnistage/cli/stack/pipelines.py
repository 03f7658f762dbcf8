"""Builds a stack from the command line: the files of the pipelines say which stages it has, the command line says where they run and how
many processes each has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import grpc

from omnistage.cli.show.fetch import checkpoint, fetch, hub_name
from omnistage.cli.stack.layout import DEFAULT_PIPELINES, Layout, PipelineLayout, ServerOptions, StageLayout, flag, of_pipeline
from omnistage.cli.stack.names import NamedPipeline, names_of, split_word, with_own_names
from omnistage.cli.stack.settings import check, with_loras
from omnistage.client.connection import CHECKPOINTS
from omnistage.client.errors import BadRequestError, RequestError, StackError, UnknownModelError
from omnistage.client.private_stack import install
from omnistage.client.wording import did_you_mean
from omnistage.models.options import DEFAULTS, MEMORY_SHARE
from omnistage.models.registry import UnknownFamily, dtypes, families, find_gaps, has_default, has_model, missing_packages, recognise, uses
from omnistage.models.reports import LoadError
from omnistage.router.pipeline import PipelineError, PipelineFile, StageSpec, load_pipeline, shipped_pipelines

GATEWAY_NEEDS = ("fastapi", "h11", "httpx2", "python_multipart", "starlette", "uvicorn")
"""Modules that the gateway needs in addition to those that every server needs."""

ADVICE = {"tensor_parallel_size": "; more processes of a stage serve more answers: --replicas talker=2"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A stack as the command line describes it.

    pipelines: names, files or checkpoints, each after NAME= if it has another name; empty: the pipeline of the only checkpoint, or without
    a checkpoint the default ones. checkpoints: a folder, or a name at a hub, by the name of the pipeline; the key "" stands for the only
    pipeline. devices, replicas: by STAGE or PIPELINE/STAGE; the device with the key "" is for all stages. dtype: for the stages that can
    compute in several types. settings: options of the stage servers, by name and by stage; the stage "" stands for all that have a use for
    the option. inputs, outputs: those of later requests, such as image and audio. kind: of the first stage of the pipeline that they ask;
    empty: any. loras: see with_loras.
    """

    pipelines: Sequence[str] = ()
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    replicas: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "auto"
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    servers: ServerOptions = field(default_factory=ServerOptions)
    inputs: Collection[str] = ()
    outputs: Collection[str] = ()
    kind: str = ""
    loras: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A pipeline to serve. source: its name or file; empty: the checkpoint decides. checkpoint: as typed; empty: the own checkpoints of its
    families. option: by which the checkpoint was typed, for errors. name: as typed before the source; empty: none was."""

    source: str
    checkpoint: str = ""
    option: str = "--checkpoint"
    name: str = ""

    @property
    def called(self) -> str:
        """The name by which options of the command line may name it, before its checkpoint was looked at; without one, the checkpoint."""
        return self.name or (_read(self.source).name if self.source else self.checkpoint)


def layout_of(choice: Choice) -> Layout:
    """The layout of a chosen stack. Fetches the named checkpoints, and the models of the first pipeline's families. Raises an OmniError
    that says what to change."""
    entries, notes = _choose_wanted(choice)
    # Checked first, because the checkpoints may take an hour to fetch.
    with_own_names([NamedPipeline(one.source or one.checkpoint, None, one.called) for one in entries if one.name or one.source])
    identified = with_own_names([_identify(one, choice, is_alone=len(entries) == 1) for one in entries])
    choice = _with_first_names(choice, identified)
    pipelines = [_layout(one, choice) for one in identified]
    notes += _replacement_lines(entries, pipelines)
    servers, left_out = with_gateway(choice.servers)
    layout = with_loras(Layout(pipelines, servers, [*notes, *left_out]), choice.loras)
    layout = share_devices(_check_layout(layout, choice))
    fetch_own(layout.pipelines[0])
    return layout


def _replacement_lines(entries: Sequence[_Wanted], pipelines: Sequence[PipelineLayout]) -> list[str]:
    """A line for each checkpoint that another pipeline serves, because it lacks models of the named one. If no pipeline was named, that of
    the checkpoint's family counts."""
    notes = list[str]()
    for entry, layout in zip(entries, pipelines, strict=True):
        expected = entry.source or layout.stages[0].family  # A family's pipeline has its name.
        if entry.checkpoint and layout.source != expected and expected in shipped_pipelines():
            missing = find_gaps(Path(layout.stages[0].checkpoint), _read(expected).models)
            line = f"{entry.checkpoint} has no {' and no '.join(missing)}: it is served by {layout.source}"
            notes += [line] if missing else []
    return notes


def with_gateway(servers: ServerOptions) -> tuple[ServerOptions, list[str]]:
    """Returns (the options, no lines); if packages of the gateway are missing, (the options without a gateway, a line that says so)."""
    missing = [name for name in GATEWAY_NEEDS if servers.http and find_spec(name) is None]
    if not missing:
        return servers, []
    note = f"it is served without HTTP and its page, which need {', '.join(missing)}: {install('gateway')}, or --no-http"
    return replace(servers, http=""), [note]


def fetch_own(pipeline: PipelineLayout) -> None:
    """Fetch the models of a pipeline's families, here, once and with a bar; its stages then find them in the cache. Raises StackError."""
    for family in dict.fromkeys(stage.family for stage in pipeline.stages if not stage.checkpoint):
        if has_default(family):
            fetch(family)


def _choose_wanted(choice: Choice) -> tuple[list[_Wanted], list[str]]:
    """Returns (the pipelines to serve, a line about each default pipeline that is left out)."""
    arguments, left_out = list(choice.pipelines), dict[str, str]()
    if not arguments and set(choice.checkpoints) == {""}:  # The user gave only `--checkpoint DIR`, without the name of a pipeline.
        return [_Wanted("", choice.checkpoints[""])], []
    if not arguments:
        arguments, left_out = default_pipelines()
    entries = [_read_word(one) for one in arguments]
    return list(_with_checkpoints(entries, choice.checkpoints, left_out)), list(left_out.values())


def _read_word(word: str) -> _Wanted:
    """The pipeline that a word [NAME=]WHAT of the command line means. Raises BadRequestError for a bad name."""
    name, source = split_word(word)
    return _Wanted("", source, "PIPELINE", name) if _is_checkpoint(source) else _Wanted(source, name=name)


def default_pipelines() -> tuple[list[str], dict[str, str]]:
    """Returns (the default pipelines that can be served here, lines about the others by name). A line says why one is left out."""
    packages_by_name = {name: _missing(name) for name in DEFAULT_PIPELINES[1:]}
    left_out = {name: f"{name} is left out: it needs {', '.join(packages)}" for name, packages in packages_by_name.items() if packages}
    return [name for name in DEFAULT_PIPELINES if name not in left_out], left_out


def _missing(name: str) -> list[str]:
    """The packages that the families of a pipeline need and that are not installed."""
    families = dict.fromkeys(stage.family for stage in _read(name).stages)
    return list(dict.fromkeys(package for family in families for package in missing_packages(family)))


def _is_checkpoint(text: str) -> bool:
    """Whether a typed text is a folder, or may be a name at a hub; False for the name of a shipped pipeline."""
    return text not in shipped_pipelines() and (Path(text).is_dir() or hub_name(text) is not None)


def _with_checkpoints(entries: Sequence[_Wanted], checkpoints: Mapping[str, str], left_out: Mapping[str, str]) -> Iterator[_Wanted]:
    """Yields each pipeline with the checkpoint that was typed for it. checkpoints: as in Choice. left_out: by pipeline, why it is left out.
    Raises BadRequestError if a checkpoint is for no pipeline, or does not say for which of several."""
    if not checkpoints:
        yield from entries
        return
    names = [one.called for one in entries]
    for name, value in checkpoints.items():
        if not name and len(entries) > 1:
            raise BadRequestError.of("--checkpoint", f"{value} is for one pipeline of {', '.join(names)}: give {names[0]}={value}")
        if name and name not in names:
            reason = left_out.get(name, f"there is no pipeline {name}")
            raise BadRequestError.of("--checkpoint", f"{reason}; there are {', '.join(names)}")
    for name, one in zip(names, entries, strict=True):
        checkpoint_text = checkpoints.get(name) or checkpoints.get("")
        if checkpoint_text and not one.source:
            text = f"{one.checkpoint} is a checkpoint already: name a pipeline with it, or leave one of them out"
            raise BadRequestError.of("--checkpoint", text)
        yield replace(one, checkpoint=checkpoint_text) if checkpoint_text else one


def _identify(entry: _Wanted, choice: Choice, *, is_alone: bool) -> NamedPipeline:
    """The pipeline and the checkpoint that are meant. The missing parts of the checkpoint are fetched first. is_alone: the stack has no
    other pipeline, so all settings must fit this one."""
    text = entry.checkpoint
    if not text:
        return NamedPipeline(entry.source, None, entry.called)

    def judge(folder: Path) -> None:
        """Check a checkpoint of which all but the weights is there. Raises the errors that can be found so early."""
        identified = _of_checkpoint(folder, entry, choice)
        own_choice = _with_first_names(choice, [identified])
        pipeline = _layout(identified, own_choice)
        family_names = {stage.family for stage in pipeline.stages}
        among = {name: family for name, family in families().items() if name in family_names}
        has_weights = any(family.marks for family in among.values())
        if has_weights:
            recognise(folder, among, text)
        layout = Layout([pipeline], choice.servers)
        _check_layout(layout, own_choice, of_models=not has_weights) if is_alone else check(layout, of_models=not has_weights)

    return _of_checkpoint(checkpoint(text, entry.option, judge), entry, choice)


def _of_checkpoint(folder: Path, entry: _Wanted, choice: Choice) -> NamedPipeline:
    """The pipeline that serves the checkpoint in a folder. Raises StackError and RequestError."""
    try:
        source = _pipeline_that_fits(folder, entry.source or _pipeline_of(folder, entry.checkpoint, choice), entry.checkpoint, choice)
    except LoadError as error:
        raise StackError(str(error)) from None
    name, names = entry.name or _read(source).name, names_of(entry.checkpoint, folder)
    return NamedPipeline(source, folder, name, names, may_change=not (entry.name or entry.source))


def _with_first_names(choice: Choice, pipelines: Sequence[NamedPipeline]) -> Choice:
    """The choice with the own names of pipelines in place of further ones, before stages, LoRA files and times."""
    own_names = {one.name for one in pipelines}
    firsts = dict[str, set[str]]()
    for one in pipelines:
        for name in {each.casefold() for each in one.names} - own_names:
            firsts.setdefault(name, set()).add(one.name)

    def first(name: str) -> str:
        key = name.casefold()
        matches = {key} & own_names or firsts.get(key, set())
        return next(iter(matches)) if len(matches) == 1 else name

    def renamed(values: Mapping[str, str]) -> dict[str, str]:
        parts = {stage: stage.rpartition("/") for stage in values}
        return {f"{first(name)}{slash}{kind}": values[stage] for stage, (name, slash, kind) in parts.items()}

    def renamed_word(word: str) -> str:
        name, equals, rest = word.partition("=")
        return f"{first(name)}={rest}" if equals and not Path(word).is_file() else word

    return replace(
        choice,
        devices=renamed(choice.devices),
        replicas=renamed(choice.replicas),
        settings={name: renamed(values) for name, values in choice.settings.items()},
        loras=[renamed_word(word) for word in choice.loras],
        servers=replace(choice.servers, idle_unload_s={first(name): limit_s for name, limit_s in choice.servers.idle_unload_s.items()}),
    )


def _pipeline_that_fits(folder: Path, source: str, text: str, choice: Choice) -> str:
    """The pipeline that a checkpoint can serve. It is `source`, or, if the checkpoint lacks some of its models, the shipped pipeline that
    has only the stages before the first missing one. text: the checkpoint as typed. Raises RequestError if sound is asked for and the
    checkpoint cannot speak, StackError if no pipeline fits, LoadError."""
    pipeline = _read(source)
    lacks = find_gaps(folder, pipeline.models)
    is_silent = find_gaps(folder, [(stage.family, "talker") for stage in pipeline.stages if has_model(stage.family, "talker")])
    if is_silent and "audio" in choice.outputs and choice.kind != "diffusion":
        hint = "Ask for text alone: {text_alone}." if "text" in choice.outputs else "{pipelines} tells which have a voice."
        raise RequestError(f"{text} has no Talker: it gives text, not audio", hint=hint)
    if not lacks:
        return source
    # Stages after the first missing one would have no input.
    usable = [*takewhile(lambda model: model[1] not in lacks, pipeline.models)]
    if source in shipped_pipelines():
        for name in shipped_pipelines():
            if [*_read(name).models] == usable:
                return name
    raise StackError(f"{text} has no {' and no '.join(lacks)}, which {pipeline.name} needs", hint="Name a pipeline without: {named_with}.")


def _pipeline_of(folder: Path, text: str, choice: Choice) -> str:
    """The name of the shipped pipeline for a checkpoint in `folder`. text: the checkpoint as typed.

    Candidates are the pipelines of its family whose models it has. The one with the family's name is chosen, unless it is not able to do
    what is asked and exactly one other is. If outputs are asked for, only the shortest of the able pipelines count as able. Raises
    StackError if there is no candidate, or if several might be meant.
    """
    try:
        family = recognise(folder, called=text)
    except LoadError as error:
        if not any((folder / name).is_file() for name in ("config.json", "model_index.json")):
            return DEFAULT_PIPELINES[0]  # The folder is no checkpoint; the check of this pipeline's families says what is missing.
        raise StackError(str(error)) from None
    of_family = [name for name in shipped_pipelines() if {stage.family for stage in _read(name).stages} == {family}]
    candidates = [name for name in of_family if not find_gaps(folder, _read(name).models)]
    able = [name for name in candidates if _is_able(_read(name), _read(name).stages[0].kind, choice)]
    if choice.outputs:
        fewest_stages = min((len(_read(name).stages) for name in able), default=0)
        able = [name for name in able if len(_read(name).stages) == fewest_stages]
    if family in candidates and (family in able or len(able) != 1):
        return family
    best = able or candidates
    if len(best) != 1:
        alternatives = f"there are the pipelines {', '.join(best)}" if best else "no pipeline comes with it"
        raise StackError(f"{text} is a checkpoint of {family}, for which {alternatives}", hint="Name one: {named_with}.")
    return best[0]


def _read(name: str) -> PipelineFile:
    """Read a pipeline. name: its name, or its YAML file. Raises RequestError for a bad file, UnknownModelError if there is no such
    pipeline."""
    try:
        return load_pipeline(name)
    except PipelineError as error:
        if name.endswith((".yaml", ".yml")):
            raise RequestError(str(error)) from None
        is_path = "/" in name or name.startswith((".", "~"))
        text = f"no folder {name}, and no pipeline" if is_path else f"no pipeline {name!r}, and no folder"
        text += f" or model of this name{_suggestion(name)}"
        hint = (
            f"There are {', '.join(shipped_pipelines())}; or give the .yaml file of a pipeline, the folder of a checkpoint, or its "
            "OWNER/NAME at a hub."
        )
        raise UnknownModelError(text, hint=hint, code=grpc.StatusCode.NOT_FOUND) from None


def _suggestion(name: str) -> str:
    """A hint that names the pipeline or folder with a similar name; empty if there is none."""
    path = Path(name).expanduser()
    try:
        folders = [str(one) for one in path.parent.iterdir() if one.is_dir()]
    except (OSError, ValueError):
        folders = []
    return did_you_mean(name, shipped_pipelines()) or did_you_mean(str(path), folders)


def check_named(source: str) -> None:
    """Raises UnknownModelError for a text that is neither a pipeline nor a checkpoint, and cannot be the name of one at a hub."""
    entry = _read_word(source)
    if entry.source:
        _read(entry.source)


def _layout(identified: NamedPipeline, choice: Choice) -> PipelineLayout:
    """The layout of a pipeline. Raises RequestError if it cannot do what is asked."""
    pipeline, folder = _read(identified.source), identified.folder
    _check_able(pipeline, choice)
    pipeline_choice = replace(
        choice,
        devices=of_pipeline(choice.devices, identified.name),
        replicas=of_pipeline(choice.replicas, identified.name),
        settings={name: of_pipeline(values, identified.name) for name, values in choice.settings.items()},
    )
    stages = [
        StageLayout(
            kind=stage.kind,
            family=stage.family,
            checkpoint="" if folder is None else str(folder),
            device=_device(stage, pipeline_choice),
            dtype=choice.dtype if choice.dtype in _dtypes(stage) else "auto",
            replicas=int(pipeline_choice.replicas.get(stage.kind, 1)),
            settings=_settings(stage, pipeline_choice),
            options=stage.options,
        )
        for stage in pipeline.stages
    ]
    return PipelineLayout(identified.name, identified.source, stages, identified.names)


def _check_layout(layout: Layout, choice: Choice, *, of_models: bool = True) -> Layout:
    """Return the layout if its settings are right. Raises an OmniError for a setting that no stage has a use for, or that a server refuses;
    with of_models also for one that a model refuses."""
    _check_stages(layout, choice)
    stages = [stage for pipeline in layout.pipelines for stage in pipeline.stages]
    if choice.dtype != "auto" and all(stage.dtype == "auto" for stage in stages):
        raise StackError(f"--dtype: no stage of {layout.names} computes in {choice.dtype}")
    for setting, values in choice.settings.items():
        shared = values.get("")  # The value for all stages.
        is_used = any(setting in stage.settings for stage in stages)
        if shared is not None and shared != str(DEFAULTS[setting]) and not is_used:
            raise StackError(f"{flag(setting)} {shared}: no stage of {layout.names} has a use for it{ADVICE.get(setting, '')}")
    check(layout, of_models=of_models)
    return layout


def share_devices(layout: Layout) -> Layout:
    """Divide the memory of each device among the servers on it, each of which would otherwise take all of it. A typed share stays. Servers
    without a typed share get equal parts of the rest. Returns the layout with these shares. Raises StackError if the typed shares are more
    than the memory, or leave nothing of it for the other servers."""
    devices: dict[str, list[StageLayout]] = {}
    for stage in (group.stage for group in layout.groups):
        if uses(stage.family, stage.kind, MEMORY_SHARE, stage.device):
            devices.setdefault(stage.device.removesuffix(":0"), []).append(stage)
    shares = list[tuple[StageLayout, str]]()
    for device, stages in devices.items():
        total = sum(float(stage.settings[MEMORY_SHARE]) * stage.replicas for stage in stages if MEMORY_SHARE in stage.settings)
        sharers = sum(stage.replicas for stage in stages if MEMORY_SHARE not in stage.settings)
        share = int(1000 * (1 - total) / max(sharers, 1)) / 1000  # Rounded down, so that the sum is not above 1.
        if total > 1 or (sharers and share <= 0):
            others = f", and {sharers} more are on it" if sharers else ""
            raise StackError(f"{flag(MEMORY_SHARE)}: {total:g} of the memory of {device} is given away{others}; all share 1: give less")
        if share < 1:
            shares += [(stage, f"{share:g}") for stage in stages if MEMORY_SHARE not in stage.settings]

    def with_share(stage: StageLayout) -> StageLayout:
        """The stage with its part of the rest, if it gets one."""
        share = next((share for sharer, share in shares if sharer == stage), None)
        return stage if share is None else replace(stage, settings={**stage.settings, MEMORY_SHARE: share})

    pipelines = [replace(pipeline, stages=[with_share(stage) for stage in pipeline.stages]) for pipeline in layout.pipelines]
    return replace(layout, pipelines=pipelines)


def layout_for(
    pipeline: str, inputs: Collection[str], outputs: Collection[str], *, kind: str = "", devices: Mapping[str, str] | None = None
) -> Layout:
    """The private stack of one call. pipeline: empty: the first default pipeline that can do what is asked. inputs, outputs: such as image
    and audio. kind: of the first stage of the pipeline; empty: any. Raises RequestError if no pipeline can do it."""
    choice = Choice(devices=devices or {}, kind=kind, inputs=inputs, outputs=outputs)
    return layout_of(replace(choice, pipelines=[pipeline or _default_for(choice)]))


def _default_for(choice: Choice) -> str:
    """The name of the default pipeline that can do what is asked. If none can, the first that begins with the wanted kind of stage, because
    the error about that pipeline names others."""
    pipelines = [_read(name) for name in DEFAULT_PIPELINES]
    of_kind = [pipeline for pipeline in pipelines if choice.kind in ("", pipeline.stages[0].kind)] or pipelines
    return next((one for one in of_kind if _is_able(one, one.stages[0].kind, choice)), of_kind[0]).name


def _dtypes(stage: StageSpec) -> tuple[str, ...]:
    """The types of numbers that a user can choose for a stage. Raises StackError."""
    try:
        return dtypes(stage.family, stage.kind)
    except UnknownFamily as error:
        raise StackError(str(error)) from None


def _device(stage: StageSpec, choice: Choice) -> str:
    """The device of a stage: the value for it, else the value for all stages, else the CPU."""
    return choice.devices.get(stage.kind) or choice.devices.get("", "cpu")


def _settings(stage: StageSpec, choice: Choice) -> dict[str, str]:
    """The settings of a stage, by name. A value for this stage always counts, and the stage may refuse it later; a value for all stages
    counts only if this one has a use for it."""
    settings = {}
    for name, values in choice.settings.items():
        if stage.kind in values:
            settings[name] = values[stage.kind]
        elif "" in values and uses(stage.family, stage.kind, name, _device(stage, choice)):
            settings[name] = values[""]
    return settings


def _check_stages(layout: Layout, choice: Choice) -> None:
    """Raises BadRequestError for a value whose stage no pipeline has, or for PIPELINE/STAGE if that pipeline lacks it."""
    kinds = {pipeline.name: [stage.kind for stage in pipeline.stages] for pipeline in layout.pipelines}
    values_by_option = {"--device": choice.devices, "--replicas": choice.replicas}
    values_by_option |= {flag(name): values for name, values in choice.settings.items()}
    for option, stage in ((option, stage) for option, values in values_by_option.items() for stage in values if stage):
        name, slash, kind = stage.rpartition("/")
        if slash and name not in kinds:
            raise BadRequestError.of(option, f"there is no pipeline {name}; there are {layout.names}")
        possible = {name: kinds[name]} if slash else kinds
        if not any(kind in stage_kinds for stage_kinds in possible.values()):
            text = "; ".join(f"{name} has no {kind}; it has {', '.join(stage_kinds)}" for name, stage_kinds in possible.items())
            raise BadRequestError.of(option, text)


def _check_able(pipeline: PipelineFile, choice: Choice) -> None:
    """Raises RequestError if a pipeline does not take the inputs or give the outputs that are asked for; its hint names pipelines that
    do."""
    for verb, kinds, pipeline_kinds in (("takes", choice.inputs, pipeline.could_take), ("gives", choice.outputs, pipeline.offered)):
        missing = [name for name in kinds if name not in pipeline_kinds]
        if missing:
            able = [name for name in shipped_pipelines() if _is_able(load_pipeline(name), choice.kind or pipeline.stages[0].kind, choice)]
            names = " or ".join(_alternative(name, choice) for name in able)
            hint = f"Give another --pipeline: {names}." if able else "No pipeline that comes with omnistage has all of it."
            raise RequestError(f"{pipeline.name} {verb} {', '.join(pipeline_kinds)}, not {', '.join(missing)}", hint=hint)


def _alternative(name: str, choice: Choice) -> str:
    """A pipeline to ask instead, in words for a hint. If only some of its checkpoints can do what is asked, the words name them."""
    pipeline = load_pipeline(name)
    takes = [medium for medium in choice.inputs if medium not in pipeline.inputs]
    gives = [port for port in choice.outputs if pipeline.outputs_vary and port != "image"]
    parts = [f"{verb} {', '.join(ports)}" for verb, ports in (("takes", takes), ("gives", gives)) if ports]
    example = CHECKPOINTS["video" if "video" in gives else "sound" if "audio" in gives else "edit"]
    return f"a checkpoint of {name} that {' and '.join(parts)}, such as {example} (its folder, or OWNER/NAME)" if parts else name


def _is_able(pipeline: PipelineFile, kind: str, choice: Choice) -> bool:
    """Whether a pipeline can do what is asked. kind: the kind that its first stage must have."""
    inputs, outputs = set(choice.inputs), set(choice.outputs)
    return pipeline.stages[0].kind == kind and inputs <= {*pipeline.could_take} and outputs <= {*pipeline.offered}
