"""Drawings of a family that has its own loop, step by step: what sessions ask of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from omnistage.models.common.worker import still_working
from omnistage.models.diffusers.checkpoints import CHECKPOINT, check, latents_of, steps_of, words_of
from omnistage.models.diffusers.output import encoded, parameters
from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import EditedPicture, Limits, Plan
from omnistage.models.diffusers.previews import LinearMap, is_due, sized
from omnistage.models.interface import Array, Content, Drawn, ElementType, Note, Picture, PortSpec, Preview, Progress, Rows, Wanted
from omnistage.models.steps.interface import Aside

BLANK = "a picture has one colour all over: try other words, another seed or size"
BLANK_SIDE, BLANK_LEVELS = 16, 24
"""A picture that was made so small is blank if no level of a colour differs by more from another one."""

IMAGE, PROGRESS, LATENTS, PIXELS = "image", "progress", "latents", "pixels"


class Job:
    """A plan and how far it is. canvases: its pictures, none before its words and images are encoded; those that its reader has already are
    not drawn. items: of each result, on each port that its result comes on. checkpoints: steps after which its latents are kept, as so many
    rows each. Its images are dropped when they are encoded."""

    def __init__(
        self, plan: Plan, wanted: Wanted, cost: int, group: Hashable, items: Mapping[str, int], checkpoints: Sequence[int], rows: int
    ) -> None:
        self.plan, self.wanted, self.cost, self.group, self.items = plan, wanted, cost, group, items
        self.checkpoints, self.rows = checkpoints, rows
        self.first = min((wanted[port] // count for port, count in items.items() if port in wanted), default=0)
        self.canvases: list[Canvas] = []
        self.encoded = False


class StepDrawing:
    """Implements `Drawing` of the sessions, and `Artist` of the model. model: its name, for what pictures say of themselves."""

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

    def edited(self, plan: Plan, image: Image) -> EditedPicture:
        """See Painter."""
        return self._painter.edited(plan, image)

    @property
    def draws_its_image(self) -> bool:
        return False

    def tokens(self, plan: Plan) -> int:
        """Latent tokens of a step, guidance counted."""
        return self._painter.tokens(plan) * plan.results * (1 if plan.negative is None else 2)

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """Rows of latents are places of the VAE's grid, row by row from the top, one layer after the other; those of pixels are pixels."""
        return (
            PortSpec(IMAGE, Content.IMAGE),
            PortSpec(PROGRESS, Content.PROGRESS),
            PortSpec(CHECKPOINT, Content.CODES, width=self._painter.channels, compact=True),
            PortSpec(LATENTS, Content.TENSOR, width=self._painter.channels, element_type=ElementType.FLOAT32),
            PortSpec(PIXELS, Content.TENSOR, width=self._painter.samples, element_type=ElementType.UINT8),
        )

    def items(self, plan: Plan) -> Mapping[str, int]:
        layers = max(plan.layers, 1)
        return {IMAGE: layers, LATENTS: layers * self._painter.grid_places(plan), PIXELS: layers * plan.height * plan.width}

    def job(self, plan: Plan, wanted: Wanted) -> Job:
        group, checkpoints = self._painter.group(plan), self._checkpoints(plan)
        return Job(plan, wanted, self.tokens(plan), group, self.items(plan), checkpoints, self._rows(plan))

    def _rows(self, plan: Plan) -> int:
        """Of one checkpoint."""
        return plan.results * self._painter.words(plan) // self._painter.channels

    def _checkpoints(self, plan: Plan) -> tuple[int, ...]:
        return steps_of(plan, plan.results * self._painter.words(plan)) if self._painter.goes_on else ()

    def check_history(self, plan: Plan) -> None:
        if plan.history is not None:
            check(plan.history, self._painter.channels, self._rows(plan), self._checkpoints(plan))

    def give_up(self, job: Job) -> None:
        """Its latents are freed with it."""

    def cost(self, job: Job) -> int:
        return job.cost

    def steps(self, job: Job) -> int:
        """And one to encode it."""
        return 1 + job.plan.steps

    def key(self, job: Job) -> Hashable | None:
        """What is encoded is encoded alone."""
        return ("step", job.group) if job.encoded else None

    @torch.inference_mode()
    def step(self, jobs: Sequence[Job], aside: Aside | None) -> None:
        still_working()
        if jobs[0].encoded:
            self._painter.forward([canvas for job in jobs for canvas in job.canvases])
        elif jobs[0].first < jobs[0].plan.results:
            self._encode(jobs[0])

    def _encode(self, job: Job) -> None:
        conditions = self._painter.encode(job.plan)
        job.plan = replace(job.plan, images=())
        job.canvases = [self._painter.canvas(job.plan, conditions, number) for number in range(job.first, job.plan.results)]
        history = job.plan.history
        if history is not None and (reached := len(history) // job.rows):
            kept = history[(reached - 1) * job.rows : reached * job.rows].reshape(job.plan.results, -1)
            for words, canvas in zip(kept[job.first :], job.canvases, strict=True):
                self._painter.go_on(canvas, latents_of(words, canvas.latents), job.checkpoints[reached - 1])
        job.plan = replace(job.plan, history=None)

    @torch.inference_mode()
    def take(self, job: Job) -> Sequence[Drawn]:
        if not job.encoded:
            job.encoded = True
            return [Progress(job.canvases[0].step, job.plan.steps)] if PROGRESS in job.wanted and job.canvases else []
        for canvas in job.canvases:
            self._painter.advance(canvas)
        step = job.canvases[0].step
        shown: list[Drawn] = [Progress(step, job.plan.steps)] if PROGRESS in job.wanted else []
        if IMAGE in job.wanted and is_due(step, job.plan.steps, job.plan.previews):
            shown.append(self._preview(job.canvases[0]))
        if CHECKPOINT in job.wanted and step in job.checkpoints:
            skipped = max(job.wanted[CHECKPOINT] - job.checkpoints.index(step) * job.rows, 0)
            if skipped < job.rows:
                shown.append(Rows(CHECKPOINT, words_of([canvas.latents for canvas in job.canvases], self._painter.channels)[skipped:]))
        return shown

    def _preview(self, canvas: Canvas) -> Preview:
        plan = canvas.plan
        assert canvas.estimate is not None
        grid = self._painter.preview_grid(canvas.estimate, plan)
        image = self._previews.show(grid[0]) if self._previews.is_fitted else next(self._painter.images(grid))
        image = sized(image, plan.preview_side, plan.width, plan.height)
        return Preview(encoded(image, plan.media_type), plan.media_type, canvas.step)

    def is_done(self, job: Job) -> bool:
        return job.encoded and all(canvas.is_drawn for canvas in job.canvases)

    @torch.inference_mode()
    def decode(self, job: Job) -> Generator[Drawn, None, None]:
        for number, canvas in enumerate(job.canvases, job.first):
            grids = self._painter.grids(canvas.latents, job.plan)
            yield from _rows(job, LATENTS, number, partial(_places, grids))
            yield from self._decoded(job, number, canvas, grids)

    def _decoded(self, job: Job, number: int, canvas: Canvas, grids: Tensor) -> Generator[Drawn, None, None]:
        """Pictures and their pixels, of those layers of a result that are wanted."""
        layers, plan = len(grids), job.plan
        wanted = {port: job.wanted[port] * layers // job.items[port] - number * layers for port in (IMAGE, PIXELS) if port in job.wanted}
        first = max(min(wanted.values(), default=layers), 0)
        if first >= layers:
            return
        said = parameters(plan, number, self._model, canvas.residuals[0].reused, canvas.residuals[0].largest)
        for layer, (grid, image) in enumerate(zip(grids[first:], self._painter.images(grids[first:]), strict=True), first):
            self._previews.fit(grid, image)
            if layers == 1 and _is_blank(image):
                yield Note(BLANK)
            if IMAGE in wanted and layer >= wanted[IMAGE]:
                yield Picture(encoded(image, plan.media_type, said), plan.media_type, layer)
            place = number * layers + layer
            yield from _rows(job, PIXELS, place, partial(_pixels, image), layers)


def _is_blank(image: Image) -> bool:
    small = np.asarray(image.resize((BLANK_SIDE, BLANK_SIDE), Resampling.BOX), np.int16).reshape(BLANK_SIDE**2, -1)
    return bool((small.max(0) - small.min(0)).max() <= BLANK_LEVELS)


def _places(grids: Tensor) -> Array:
    """[layers * height * width, channels], float32."""
    places: Array = grids.permute(0, 2, 3, 1).reshape(-1, grids.shape[1]).float().cpu().numpy()
    return places


def _pixels(image: Image) -> Array:
    """[height * width, samples], uint8."""
    pixels = np.asarray(image)
    return pixels.reshape(-1, pixels.shape[-1])


def _rows(job: Job, port: str, place: int, made: Callable[[], Array], parts: int = 1) -> Generator[Rows, None, None]:
    """Those of a part of a result on a tensor port from the wanted one on, if that wants any. place: of all parts."""
    count = job.items[port] // parts
    if port in job.wanted and (skipped := max(job.wanted[port] - place * count, 0)) < count:
        yield Rows(port, made()[skipped:])
