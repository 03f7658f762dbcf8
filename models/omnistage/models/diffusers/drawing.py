"""Drawings of a family that has its own loop, step by step, in the form that sessions need."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import replace

import torch
from PIL.Image import Image

from omnistage.models.diffusers.checkpoints import CHECKPOINT, StateLayout
from omnistage.models.diffusers.film_memory import FilmMemory
from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan, EditedPicture
from omnistage.models.interface import Array, Content, Drawn, PortSpec, StepsDone, TensorRows, Wanted
from omnistage.models.steps.interface import Aside
from omnistage.models.worker import still_working

PROGRESS = "progress"


class DrawingJob:
    """A plan and its progress. canvases: its pictures, empty until its words and images are encoded, without the pictures that the reader
    has already. cost: latent tokens of a step. decoder_share: see Drawing. first: number of the first picture drawn. layout: form of
    the states that are kept on the way. The images of the plan are dropped once they are encoded."""

    def __init__(self, plan: DrawingPlan, ports: Wanted, cost: int, first: int, layout: StateLayout, decoder_share: float = 0.0) -> None:
        self.plan, self.wanted, self.cost, self.first, self.layout = plan, ports, cost, first, layout
        self.decoder_share = decoder_share
        self.canvases: list[Canvas] = []
        self.encoded = False


class StepDrawing:
    """Draws with a painter: a `Drawing` of sessions, and an `Artist`. model: its name, which files state. memory: None but for films."""

    def __init__(self, painter: Painter, model: str, memory: FilmMemory | None = None) -> None:
        self._painter, self.memory = painter, memory
        self.product = painter.product(model)

    @property
    def limits(self) -> DrawingLimits:
        return self._painter.limits

    def check_text(self, text: str) -> None:
        self._painter.check_text(text)

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        return self._painter.sized(plan)

    def edited(self, plan: DrawingPlan, image: Image) -> EditedPicture:
        return self._painter.edited(plan, image)

    @property
    def draws_its_image(self) -> bool:
        return False

    def tokens(self, plan: DrawingPlan) -> int:
        """Latent tokens of a step, guidance included."""
        return self._painter.tokens(plan) * plan.results * (1 if plan.negative is None else 2)

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        keeping = PortSpec(CHECKPOINT, Content.CODES, width=self._painter.channels, compact=True)
        return (*self.product.ports, PortSpec(PROGRESS, Content.PROGRESS), keeping)

    def job(self, plan: DrawingPlan, ports: Wanted) -> DrawingJob:
        share = 0.0 if self.memory is None else self.memory.taken(plan).frame / self.memory.budget
        return DrawingJob(plan, ports, self.tokens(plan), self.product.first(plan, ports), self._layout(plan), share)

    def _layout(self, plan: DrawingPlan) -> StateLayout:
        return StateLayout(plan, self._painter.values(plan), self._painter.channels, self._painter.memory)

    def check(self, plan: DrawingPlan) -> None:
        """Raises BadRequest for a plan that needs too much memory, has impossible steps, or a history that it cannot have made."""
        if self.memory is not None:
            self.memory.check(plan, self.limits)
        self._painter.check_steps(plan)
        if plan.history is not None:
            self._layout(plan).check(plan.history)

    def give_up(self, job: DrawingJob) -> None:
        """A job holds nothing but its latents, which are freed with it."""

    def cost(self, job: DrawingJob) -> int:
        return job.cost

    def decoder_share(self, job: DrawingJob) -> float:
        return job.decoder_share

    def steps(self, job: DrawingJob) -> int:
        """The steps of the plan, and one step to encode it."""
        return 1 + job.plan.steps

    def key(self, job: DrawingJob) -> Hashable | None:
        """Jobs of one group step together; each job is encoded alone."""
        return ("step", self._painter.group(job.canvases[0])) if job.encoded and job.canvases else None

    @torch.inference_mode()
    def step(self, jobs: Sequence[DrawingJob], aside: Aside | None) -> None:
        """Encode one job, or compute a step of all canvases of the jobs."""
        still_working()
        if jobs[0].encoded:
            self._painter.forward([canvas for job in jobs for canvas in job.canvases])
        elif jobs[0].first < jobs[0].plan.results:
            self._encode(jobs[0])

    def _encode(self, job: DrawingJob) -> None:
        """Encode the words and images of a job, and begin its canvases: from noise, or from the states in its history."""
        conditions = self._painter.encode(job.plan)
        job.plan = replace(job.plan, images=())
        job.canvases = [self._painter.canvas(job.plan, conditions, number) for number in range(job.first, job.plan.results)]
        if job.plan.history is not None and job.canvases:
            states = job.layout.read(job.plan.history, job.canvases[0].latents)
            for state, canvas in zip(states[job.first :], job.canvases, strict=False):
                self._painter.go_on(canvas, state)
        job.plan = replace(job.plan, history=None)

    @torch.inference_mode()
    def take(self, job: DrawingJob) -> Sequence[Drawn]:
        """Take the computed step; returns the progress, previews and states that the reader wants."""
        if not job.encoded:
            job.encoded = True
            return self._progress(job)
        for canvas in job.canvases:
            self._painter.advance(canvas)
        sampler, shown = job.canvases[0].sampler, self._progress(job)
        if self.product.ports[0].name in job.wanted:
            shown += self.product.preview(job.canvases[0])
        if CHECKPOINT in job.wanted and sampler.step in job.layout.steps:
            skipped = max(job.wanted[CHECKPOINT] - job.layout.steps.index(sampler.step) * job.layout.rows, 0)
            if skipped < job.layout.rows:
                shown.append(TensorRows(CHECKPOINT, self._kept(job)[skipped:]))
        return shown

    def _progress(self, job: DrawingJob) -> list[Drawn]:
        return [StepsDone(each.sampler.step, each.sampler.steps) for each in job.canvases[:1] if PROGRESS in job.wanted]

    def _kept(self, job: DrawingJob) -> Array:
        return job.layout.written([canvas.sampler.keep(canvas.latents) for canvas in job.canvases])

    def is_done(self, job: DrawingJob) -> bool:
        return job.encoded and all(canvas.is_drawn for canvas in job.canvases)

    @torch.inference_mode()
    def decode(self, job: DrawingJob) -> Generator[Drawn, None, None]:
        yield from self.product.decode(job.plan, job.canvases, job.wanted)
