"""A pipeline of this router: at first only its file describes it, and once its replicas answer, its stages do too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omnistage.router.pipeline import PipelineError, PipelineFile, check_pipeline
from omnistage.router.placement import Placement
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError


class ServedPipeline:
    """A pipeline with its replicas. pipeline: its inputs and outputs; until it is ready, all that it could have. descriptions: of its
    stages, by kind; empty until it is ready. misfit: why these stages cannot serve it; empty: no reason is known."""

    def __init__(self, pipeline: PipelineFile, placement: Placement) -> None:
        self.pipeline = pipeline.unsettled
        self.placement = placement
        self.descriptions: Mapping[str, stage_pb2.DescribeResponse] = {}
        self.misfit = ""
        self._file = pipeline

    @property
    def is_ready(self) -> bool:
        """Whether all stages have served at some time and fit the file. They may be lost now, which a request finds out when it asks
        them."""
        return bool(self.descriptions)

    def check_ready(self) -> None:
        """Raises STARTING, with the stages that the pipeline waits for, if the pipeline is not ready."""
        if self.is_ready:
            return
        name, missing = self.pipeline.name, self.placement.missing()
        message = f"{name} cannot be served by its stages as they are: {self.misfit}" if self.misfit else f"{name} is still starting"
        if missing:
            message += f": {'; '.join(missing)}"
        raise StageError("STARTING", f"{message}; try again", metadata={"pipeline": name})

    async def get_ready(self, misfits: Callable[[str], None]) -> None:
        """Wait until a replica of every stage serves and all of them fit the file. misfits: called with the reason why they do not fit,
        once for each new reason. After a misfit the replicas are checked again whenever one of them changes."""
        while True:
            changed = self.placement.changed
            descriptions = await self.placement.descriptions()
            try:
                check_pipeline(self._file, descriptions)
            except PipelineError as error:
                if str(error) != self.misfit:
                    self.misfit = str(error)
                    misfits(self.misfit)
                await changed.wait()
            else:
                break
        self.misfit = ""
        self.placement.pin(descriptions)
        self.pipeline, self.descriptions = self._file.settled(descriptions), descriptions
