"""A model as the logic of a stage: its description as the answer of Describe, its exceptions as errors of the stage, and the start of a
server for a kind of stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from omnistage.host.watchdog import Watched
from omnistage.models.checkpoint.files import say_offline
from omnistage.models.interface import BadRequest, Content, Failed, Full, Load, Model, ModelInfo, PortSpec
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load, loading_texts
from omnistage.models.reports import LoadError
from omnistage.stage.content import element_type
from omnistage.stage.logic import Start, Work
from omnistage.stage.server import main
from omnistage.stage.settings import StageSettings
from omnistage.v1 import stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError, bad_request
from omnistage.wire.proto_values import kind_name

log = structlog.get_logger(__name__)


def describe(kind: stage_pb2.StageKind, info: ModelInfo) -> stage_pb2.DescribeResponse:
    """The answer of Describe for a model that is served as a stage of this kind."""
    return stage_pb2.DescribeResponse(
        kind=kind,
        model=info.name,
        revision=info.revision,
        accepts=[_port(port, is_input=True) for port in info.accepts],
        produces=[_port(port, is_input=False) for port in info.produces],
        max_sessions=info.max_sessions,
        voices=info.voices,
        inputs=info.inputs,
        constraints=info.constraints,
    )


def _port(port: PortSpec, *, is_input: bool) -> stage_pb2.Port:
    """A port of a model as the contract describes it."""
    is_tensor = port.content is Content.TENSOR
    replay = stage_pb2.REPLAY_WINDOW if port.window else stage_pb2.REPLAY_ALL
    return stage_pb2.Port(
        name=port.name,
        payload=f"PAYLOAD_{port.content.name}",
        rate_millihertz=round(port.rate_hz * 1000),
        compact=port.compact,
        replay=replay if is_input else stage_pb2.REPLAY_UNSPECIFIED,
        element_type=element_type(port) if is_tensor else tensor_pb2.ELEMENT_TYPE_UNSPECIFIED,
        width=port.width,
    )


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the models' own exceptions into stage errors with the models' words: a request that the model cannot do is BAD_REQUEST, one that
    it cannot do now is OVERLOADED, and a result that its weights cannot make is INTERNAL."""
    try:
        yield
    except BadRequest as refusal:
        raise bad_request(refusal.field, refusal.description, **refusal.place) from None
    except Full as error:
        raise StageError("OVERLOADED", f"{error}; try again") from None
    except Failed as failure:
        log.warning("model.failed", message=str(failure))
        raise StageError("", str(failure)) from None


M = TypeVar("M", bound=Model)


class ModelStage(ABC, Generic[M]):
    """A model as a StageLogic. The subclass for each kind of stage adds `prepare`."""

    kind: ClassVar[stage_pb2.StageKind]

    def __init__(self, model: M) -> None:
        self._model = model
        self.description = describe(self.kind, model.info)
        self.description.settings.update(model.info.settings)

    @property
    def threads(self) -> Sequence[Watched]:
        return self._model.threads

    def load(self) -> Load:
        return self._model.load()

    @abstractmethod
    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        """See StageLogic.prepare."""

    def _drew(self, temperature: float) -> bool:
        """Whether another seed could give another output. temperature: as requested; 0 if nothing is sampled."""
        draws = self._model.info.draws
        return temperature > 0 if draws is None else draws

    async def warm_up(self) -> None:
        """Warm the model up, and add the settings that it measured to the description."""
        await self._model.warm_up()
        settings = self.description.settings
        measured = {name: value for name, value in self._model.info.settings.items() if settings.get(name) != value}
        if measured:
            settings.update(measured)
            log.info("model.measured", model=self._model.info.name, **measured)

    async def close(self) -> None:
        await self._model.close()


def serve_kind(stage: type[ModelStage[Any]]) -> int:
    """`python -m omnistage.<kind>`: serve a model of the family that the settings name. Returns the exit code."""
    kind = kind_name(stage.kind)

    def load_logic(settings: StageSettings) -> ModelStage[Any]:
        options = LoadOptions.of(settings)
        logic = stage(load(settings.family, kind, options))
        for name, value in loading_texts(settings.family, kind, options).items():
            if name not in logic.description.settings:  # The model itself knows these better.
                logic.description.settings[name] = value
        return logic

    say_offline()
    return main(kind, load_logic, LoadError)
