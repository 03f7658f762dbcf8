"""A model as the logic of a stage: the common part of the four kinds of stages, and the start of a server of a kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from omnistage.host.watchdog import Watched
from omnistage.models.common.offline import say_offline
from omnistage.models.errors import LoadError
from omnistage.models.interface import Load, Model
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load, loading_texts
from omnistage.stage.describe import describe
from omnistage.stage.logic import Start, Work
from omnistage.stage.server import main
from omnistage.stage.settings import StageSettings
from omnistage.v1 import stage_pb2
from omnistage.wire.kinds import kind_name

log = structlog.get_logger(__name__)

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
        if measured := {name: value for name, value in self._model.info.settings.items() if settings.get(name) != value}:
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
