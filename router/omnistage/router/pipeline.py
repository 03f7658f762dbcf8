"""Pipelines: a pipeline is the stages that answer under one model name. It is read from YAML and checked against its stages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from google.protobuf import json_format
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from omnistage.host.addresses import check_replica_address
from omnistage.host.errors import fault_found
from omnistage.router.yaml_text import BadYaml, read_yaml
from omnistage.v1 import stage_pb2
from omnistage.wire.chunks import converts
from omnistage.wire.proto_values import KINDS


def _check_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"must be one of {', '.join(KINDS)}")
    return kind


Kind = Annotated[str, AfterValidator(_check_kind)]

_INSTALLED = Path(__file__).parent / "pipelines"
_CHECKOUT = Path(__file__).resolve().parents[3] / "deploy" / "pipelines"


STREAMED = {stage_pb2.PAYLOAD_MEDIA: "media", stage_pb2.PAYLOAD_AUDIO: "audio"}
"""Payloads that a client may stream to the first stage, and the field of Chunk that carries each."""


NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
"""Pattern of a pipeline's own name."""
MAX_NAME_CHARACTERS = 256
FurtherName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
"""Another name of a pipeline, such as Qwen/Qwen2.5-Omni-7B."""

PROGRESS = "progress"
"""The port for the progress of the work. A pipeline without this port still answers a request that names it and other outputs."""


class PipelineError(ValueError):
    """A pipeline file that cannot be used; the text says what to change."""


class StageSpec(BaseModel):
    """One stage. family, options: the model that `omnistage serve` starts, and its options. takes: ports of the stage before it. addresses:
    replicas, HOST:PORT each, or dns:///NAME:PORT for all addresses of a name; empty if `--stages` gives them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    family: str
    takes: tuple[str, ...] = ()
    options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    addresses: tuple[Annotated[str, AfterValidator(check_replica_address)], ...] = ()


class PipelineFile(BaseModel):
    """One pipeline file. names: further names, by which a request may name it. inputs: media that the pipeline takes. may_take: further
    media that it takes if the first stage's checkpoint does. outputs: ports that a client gets. outputs_vary: the client gets only those
    outputs that the stages have, as the checkpoint decides. on_request: ports that a client gets only if it names them. may_give: more such
    ports, if the stages have them. defaults: params by kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    names: tuple[FurtherName, ...] = Field(default=(), max_length=16)
    description: str
    inputs: tuple[Literal["text", "image", "audio", "video"], ...]
    may_take: tuple[Literal["image", "audio", "video"], ...] = ()
    outputs: tuple[str, ...] = Field(min_length=1)
    outputs_vary: bool = False
    on_request: tuple[str, ...] = ()
    may_give: tuple[str, ...] = ()
    stages: tuple[StageSpec, ...] = Field(min_length=1, max_length=9)
    defaults: dict[Kind, dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_fields(self) -> PipelineFile:
        """Check the fields against each other. Raises ValueError."""
        if len({stage.kind for stage in self.stages}) != len(self.stages):
            raise ValueError("a kind may occur once in a pipeline")
        for number, stage in enumerate(self.stages):
            is_first = number == 0
            if bool(stage.takes) == is_first:
                raise ValueError(f"stage {stage.kind}: every stage but the first takes ports of the one before it")
        names = self.outputs + self.could_give
        if twice := sorted(name for name in set(names) if names.count(name) > 1):
            raise ValueError(f"outputs, on_request and may_give name {', '.join(twice)} twice")
        self.default_params()
        return self

    @property
    def offered(self) -> tuple[str, ...]:
        """All ports that a client may ask for."""
        return self.outputs + self.on_request

    def missing_outputs(self, outputs: Collection[str]) -> list[str]:
        """The names among the `outputs` of a request that this pipeline does not give, sorted. PROGRESS counts as missing only if the
        request names nothing else: with another output the request is answered without it."""
        names = {*outputs}
        ignorable_names: set[str] = set() if names == {PROGRESS} else {PROGRESS}
        return sorted(names - {*self.offered} - ignorable_names)

    @property
    def could_take(self) -> tuple[str, ...]:
        """All media that the pipeline takes with at least one checkpoint."""
        return tuple(dict.fromkeys((*self.inputs, *self.may_take)))

    @property
    def could_give(self) -> tuple[str, ...]:
        """All ports that the pipeline gives on request with at least one checkpoint."""
        return self.on_request + self.may_give

    @property
    def models(self) -> tuple[tuple[str, str], ...]:
        """The family and the kind of each stage."""
        return tuple((stage.family, stage.kind) for stage in self.stages)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the stages."""
        return frozenset(stage.kind for stage in self.stages)

    @property
    def draws(self) -> bool:
        """Whether the pipeline takes the params of a drawing."""
        return "diffusion" in self.kinds

    @property
    def only_draws(self) -> bool:
        """Whether the pipeline does nothing but draw: every text of a client can only be meant as a description of a drawing."""
        return self.draws and "thinker" not in self.kinds

    @property
    def unsure_outputs(self) -> tuple[str, ...]:
        """The ports that only some checkpoints have."""
        return (*(self.outputs if self.outputs_vary else ()), *self.may_give)

    @property
    def unsettled(self) -> PipelineFile:
        """A copy with all inputs and outputs that the pipeline could have. It stands for the pipeline until the stages describe
        themselves."""
        return self._taking(self.could_take, self.could_give)

    def settled(self, descriptions: Mapping[str, stage_pb2.DescribeResponse]) -> PipelineFile:
        """A copy with the inputs, the outputs and the name of the checkpoint that the pipeline has with these stages. descriptions: of the
        stages, by kind."""
        takes = {*self.inputs, *descriptions[self.stages[0].kind].inputs}
        gives = {*self.on_request, *(port.name for described in descriptions.values() for port in described.produces)}
        outputs = tuple(each for each in self.outputs if each in gives) if self.outputs_vary else self.outputs
        settled = self._taking(
            tuple(each for each in self.could_take if each in takes), tuple(each for each in self.could_give if each in gives)
        ).model_copy(update={"outputs": outputs})
        return settled.with_names([descriptions[self.stages[0].kind].model])

    def with_names(self, names: Iterable[str]) -> PipelineFile:
        """A copy with more further names. Names that differ only in case are one."""
        distinct = {self.name: ""}
        for name in (*self.names, *names):
            distinct.setdefault(name.casefold(), name)
        return self.model_copy(update={"names": tuple(filter(None, distinct.values()))})

    def _taking(self, inputs: tuple[str, ...], on_request: tuple[str, ...]) -> PipelineFile:
        return self.model_copy(update={"inputs": inputs, "may_take": (), "on_request": on_request, "may_give": ()})

    def default_params(self) -> dict[str, stage_pb2.StageParams]:
        """Params of every stage as the file gives them."""
        params: dict[str, stage_pb2.StageParams] = {}
        for stage in self.stages:
            values = self.defaults.get(stage.kind, {})
            try:
                params[stage.kind] = json_format.ParseDict({stage.kind: values}, stage_pb2.StageParams())
            except json_format.ParseError as error:
                raise ValueError(f"defaults of {stage.kind}: {error}") from None
        return params


def find_called(name: str, pipelines: Iterable[PipelineFile]) -> list[PipelineFile]:
    """The pipelines that a request means by a name, in any case: the one whose own name it is, else all that have it as a further name."""
    key, candidates = name.casefold(), list(pipelines)
    exact = [one for one in candidates if one.name == key]
    return exact or [one for one in candidates if key in map(str.casefold, one.names)]


def split_name(text: str) -> tuple[str, str]:
    """Returns (NAME, SOURCE) of NAME=SOURCE, by which a pipeline gets another name; ("", the text) for any other text, and for an existing
    path, which may have a "=" too."""
    match = None if Path(text).exists() else re.fullmatch(f"({NAME})=(.+)", text)
    return (match[1], match[2]) if match else ("", text)


def load_pipeline(name_or_file: str) -> PipelineFile:
    """Read a shipped pipeline by name, or a file by path. Raises PipelineError."""
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml"):
        files = [folder / f"{name_or_file}.yaml" for folder in (_INSTALLED, _CHECKOUT) if (folder / f"{name_or_file}.yaml").is_file()]
        if not files:
            raise PipelineError(f"no pipeline {name_or_file!r}; there are {', '.join(shipped_pipelines())}, or give a .yaml file")
        path = files[0]
    try:
        return PipelineFile.model_validate(read_yaml(path))
    except OSError as error:
        raise PipelineError(f"cannot read {path}: {error.strerror}") from None
    except BadYaml as error:
        raise PipelineError(f"{path}: {error}") from None
    except ValidationError as error:
        raise PipelineError(f"{path}: {'; '.join(_fault(details) for details in error.errors(include_url=False))}") from None


def _fault(details: ErrorDetails) -> str:
    """The text of one fault that pydantic found in a file, with its field."""
    place = ".".join(map(str, details["loc"]))
    return f"{place}: {fault_found(details)}" if place else fault_found(details)


def shipped_pipelines() -> list[str]:
    """Names of the pipelines that come with this package."""
    return sorted({path.stem for folder in (_INSTALLED, _CHECKOUT) for path in folder.glob("*.yaml")})


def check_pipeline(pipeline: PipelineFile, descriptions: Mapping[str, stage_pb2.DescribeResponse]) -> None:
    """Check the inputs, the outputs and every edge between two stages against the descriptions of the stages, by kind. Raises
    PipelineError, which names what does not fit."""
    producers: dict[str, str] = {}
    for stage in pipeline.stages:
        if descriptions[stage.kind].kind != KINDS[stage.kind]:
            raise PipelineError(f"{pipeline.name}: the server given as {stage.kind} is of another kind")
        for port in descriptions[stage.kind].produces:
            if port.name in producers:
                raise PipelineError(f"{pipeline.name}: port {port.name!r} is produced by {producers[port.name]} and by {stage.kind}")
            producers[port.name] = stage.kind
    for before, after in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        _check_edge(pipeline.name, before.kind, after, descriptions[before.kind].produces, descriptions[after.kind].accepts)
    takes = descriptions[pipeline.stages[0].kind].inputs or ["text"]  # An older stage names none, and takes text.
    for medium in pipeline.inputs:
        if medium not in takes:
            raise PipelineError(f"{pipeline.name}: the file says that it takes {medium}, its first stage takes {', '.join(takes)}")
    first = pipeline.stages[0].kind
    if ports := ", ".join(port.name for port in descriptions[first].accepts if port.payload not in STREAMED):
        raise PipelineError(f"{pipeline.name}: the first stage, {first}, has input ports ({ports}); a client streams media and sound only")
    # If the stages give no output that the file offers, the error names one of the file.
    for output in pipeline.settled(descriptions).offered or pipeline.outputs:
        if output not in producers:
            raise PipelineError(f"{pipeline.name}: no stage produces the output {output!r}")


def _check_edge(name: str, before: str, after: StageSpec, produces: Sequence[stage_pb2.Port], accepts: Sequence[stage_pb2.Port]) -> None:
    """Check that the stage of kind `before` produces what `after` accepts. name: of the pipeline, for the error. Raises PipelineError."""
    produced = {port.name: port for port in produces}
    accepted = {port.name: port for port in accepts}
    if set(after.takes) != set(accepted):
        raise PipelineError(f"{name}: {after.kind} needs the ports {sorted(accepted)}, the file gives it {sorted(after.takes)}")
    for port in after.takes:
        if port not in produced:
            raise PipelineError(f"{name}: {before} has no output {port!r} for {after.kind}; it has {sorted(produced)}")
        out, into = produced[port], accepted[port]
        for field in ("payload", "rate_millihertz", "width", "element_type"):
            produced_value, accepted_value = getattr(out, field), getattr(into, field)
            if not (converts(produced_value, accepted_value) if field == "element_type" else produced_value == accepted_value):
                raise PipelineError(
                    f"{name}: edge {before}.{port} > {after.kind}.{port}: {field} is {produced_value} and must be {accepted_value}"
                )
