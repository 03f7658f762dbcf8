"""Drawings of a family that has its own loop, step by step: what a stepper asks of it."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import replace

from omnistage.models.diffusers.output import encoded, parameters
from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import Limits, Plan
from omnistage.models.diffusers.previews import LinearMap, is_due, sized
from omnistage.models.interface import Drawn, Picture, Preview, Progress, Wanted

IMAGE, PROGRESS = "image", "progress"


class Job:
    """A plan and how far it is. canvases: its pictures, none before its words and images are encoded; those that its reader has already are
    not drawn. Its images are dropped when they are encoded."""

    def __init__(self, plan: Plan, wanted: Wanted, cost: int, group: Hashable) -> None:
        self.plan, self.wanted, self.cost, self.group = plan, wanted, cost, group
        self.first = wanted.get(IMAGE, 0) // max(plan.layers, 1)
        self.canvases: list[Canvas] = []
        self.encoded = False


class StepDrawing:
    """Implements `Drawing` of the stepper, and `Artist` of the model. model: its name, for what pictures say of themselves."""

    def __init__(self, painter: Painter, model: str) -> None:
        self._painter, self._model = painter, model
        self._previews = LinearMap()

    @property
    def limits(self) -> Limits:
        return self._painter.limits

    def check_text(self, text: str) -> None:
        """See Painter."""
        self._painter.check_text(text)

    def sized(self, plan: Plan) -> Plan:
        """See Painter."""
        return self._painter.sized(plan)

    def tokens(self, plan: Plan) -> int:
        """Latent tokens of a step, guidance counted."""
        return self._painter.tokens(plan) * plan.results * (1 if plan.negative is None else 2)

    def job(self, plan: Plan, wanted: Wanted) -> Job:
        return Job(plan, wanted, self.tokens(plan), self._painter.group(plan))

    def give_up(self, job: Job) -> None:
        """Its latents are freed with it."""

    def cost(self, job: Job) -> int:
        return job.cost

    def group_key(self, job: Job) -> Hashable:
        """What is encoded is encoded alone."""
        return ("step", job.group) if job.encoded else ("encode", id(job))

    def forward(self, jobs: Sequence[Job]) -> None:
        if jobs[0].encoded:
            self._painter.forward([canvas for job in jobs for canvas in job.canvases])
        else:
            self._encode(jobs[0])

    def _encode(self, job: Job) -> None:
        conditions = self._painter.encode(job.plan)
        job.plan = replace(job.plan, images=(), digests=())
        job.canvases = [self._painter.canvas(job.plan, conditions, number) for number in range(job.first, job.plan.results)]

    def advance(self, job: Job) -> Sequence[Drawn]:
        if not job.encoded:
            job.encoded = True
            return [Progress(0, job.plan.steps)] if PROGRESS in job.wanted else []
        for canvas in job.canvases:
            self._painter.advance(canvas)
        step = job.canvases[0].step
        shown: list[Drawn] = [Progress(step, job.plan.steps)] if PROGRESS in job.wanted else []
        if IMAGE in job.wanted and is_due(step, job.plan.steps, job.plan.previews):
            shown.append(self._preview(job.canvases[0]))
        return shown

    def _preview(self, canvas: Canvas) -> Preview:
        plan = canvas.plan
        assert canvas.estimate is not None
        grid = self._painter.preview_grid(canvas.estimate, plan)
        image = self._previews.show(grid[0]) if self._previews.is_fitted else next(self._painter.images(grid))
        image = sized(image, plan.preview_side, plan.width, plan.height)
        return Preview(encoded(image, plan.media_type), plan.media_type, canvas.step)

    def is_drawn(self, job: Job) -> bool:
        return job.encoded and all(canvas.is_drawn for canvas in job.canvases)

    def decode(self, job: Job) -> Generator[Drawn, None, None]:
        if IMAGE not in job.wanted:
            return
        layers = max(job.plan.layers, 1)
        skipped = job.wanted[IMAGE] % layers
        for number, canvas in enumerate(job.canvases, job.first):
            grids = self._painter.grids(canvas.latents, job.plan)[skipped:]
            reused = canvas.residuals[0]
            said = parameters(job.plan, number, self._model, reused.reused, reused.largest)
            for layer, (grid, image) in enumerate(zip(grids, self._painter.images(grids), strict=True), skipped):
                self._previews.fit(grid, image)
                yield Picture(encoded(image, job.plan.media_type, said), job.plan.media_type, layer)
            skipped = 0
