"""A pipeline of pictures as a model, and its drawings by a family that has its own loop, step by step, in the form that sessions need."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from PIL import Image as pillow
from PIL.Image import Image

from omnistage.models.conversation import Media
from omnistage.models.diffusers.films import FilmMemory
from omnistage.models.diffusers.options import Vocabulary
from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.pictures import encode_picture, size_note
from omnistage.models.diffusers.plan import (
    GUIDES,
    PNG,
    DrawingLimits,
    DrawingPlan,
    EditedPicture,
    SourcePicture,
    check_size,
    draws_nothing,
    mask_of,
    plan_drawing,
    smallest,
    with_guides,
)
from omnistage.models.diffusers.sampling import CHECKPOINT, StateLayout
from omnistage.models.interface import (
    Activity,
    BadRequest,
    Content,
    Drawn,
    DrawRequest,
    Failed,
    Full,
    Load,
    ModelInfo,
    Note,
    Piece,
    PortSpec,
    PromptRead,
    StepsDone,
    TensorRows,
    Wanted,
    inputs_of,
)
from omnistage.models.media.decoder import MediaDecoder, media_places
from omnistage.models.media.terms import UNBOUNDED, BadMedia, DecoderBroken, DecoderFailed, DecoderFull, PicturePreprocessing
from omnistage.models.requests import check_medium
from omnistage.models.steps.loop import Aside
from omnistage.models.steps.session import Drawing, Product, Sessions
from omnistage.models.worker import Worker, still_working

MAX_FITTING = 256
"""How many pictures may wait to be decoded and resized."""
NOTHING_DRAWN = "the mask is black all over, so nothing is drawn anew: give one that is white, or transparent, where to draw"
HELD_BYTES = 1 << 30
"""The limit of bytes of all decoded pictures that wait to be edited."""

J = TypeVar("J")


class Artist(Drawing[J], Protocol[J]):
    """The part that draws: step by step with a loop of its own, or by a whole call of the pipeline."""

    @property
    def limits(self) -> DrawingLimits: ...

    def check_text(self, text: str) -> int | None:
        """The number of tokens of a text; None: not known. Raises ValueError for one that cannot be read."""

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        """The plan with the size that follows from its images."""

    def edited(self, plan: DrawingPlan, image: Image) -> EditedPicture:
        """The form in which a picture that is edited (RGB or RGBA) is kept. Runs on any thread. Raises BadMedia."""

    @property
    def draws_its_image(self) -> bool:
        """Whether the result is always as large as the picture that is edited."""

    def tokens(self, plan: DrawingPlan) -> int: ...

    def job(self, plan: DrawingPlan, ports: Wanted) -> J: ...

    def check(self, plan: DrawingPlan) -> None:
        """Raises BadRequest for impossible steps, or a history that the plan (with its images) cannot have. Runs on any thread."""

    @property
    def ports(self) -> tuple[PortSpec, ...]: ...

    @property
    def product(self) -> Product[DrawingPlan, Any]: ...


class DrawnModel(Generic[J]):
    """A pipeline of Diffusers as a `DiffusionModel`. Build it with `loading.load_pictures`."""

    def __init__(
        self,
        artist: Artist[J],
        worker: Worker,
        decoder: MediaDecoder,
        info: ModelInfo,
        *,
        image_pixels: int,
        max_tokens: int,
        step_tokens: int,
        max_batch_size: int = 0,
        vocabulary: Vocabulary | None = None,
        first_side: int = 0,
    ) -> None:
        """image_pixels: limit of the pixels of a picture that keeps its size; larger pictures are made smaller. max_tokens, step_tokens:
        limits of the latent tokens of all drawings, and of one step. max_batch_size: limit of drawings in a step; 0: any. vocabulary:
        the words that the model knows, if its checkpoint lists them. first_side: largest side of the picture that `warm_up` draws, in
        pixels; 0: the usual size."""
        self._vocabulary, self._first_side = vocabulary or Vocabulary(), first_side
        self._artist, self._worker, self._decoder, self._info = artist, worker, decoder, info
        self._image_pixels = image_pixels if artist.draws_its_image else UNBOUNDED
        self._max_tokens = max_tokens
        self._fitting_places = media_places(1, MAX_FITTING)
        self._held_bytes, self._held_lock = 0, threading.Lock()  # _held_bytes: of all decoded pictures that exist.
        self.sessions = Sessions[J](artist, [worker], budget=max_tokens, step_budget=step_tokens, batch=max_batch_size, is_eager=True)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def threads(self) -> Sequence[Activity]:
        return (self._worker.activity,)

    def load(self) -> Load:
        return self.sessions.load

    async def prepare(self, request: DrawRequest) -> DrawingPlan:
        """The plan of a request, with its decoded pictures. Raises BadRequest for all that could make a drawing fail, before it begins."""
        limits, cased = self._artist.limits, self._vocabulary.cased
        request = replace(request, prompt=cased(request.prompt), negative_prompt=cased(request.negative_prompt))
        self._artist.product.check(request)
        plan = plan_drawing(request, limits, self._info.name)
        counts = {}
        for field, text in (("prompt", plan.prompt), ("negative_prompt", plan.negative or "")):
            try:
                counts[field] = await asyncio.to_thread(self._artist.check_text, text)
            except ValueError as error:
                raise BadRequest(f"diffusion.{field}", str(error)) from None
        plan = replace(plan, prompt_tokens=counts["prompt"])
        images = [await self._edited(plan, image, number, request.client) for number, image in enumerate(request.images, 1)]
        mask, control = [await self._guide(request, plan, field, images) for field in GUIDES]
        sources = tuple(SourcePicture(image.digest, image.background) for image in request.images)
        plan = self._artist.sized(replace(plan, images=tuple(images), sources=sources, mask=mask, control=control))
        if images and min(plan.width, plan.height) < limits.multiple:
            raise BadRequest("diffusion.images", f"a picture of {plan.width}x{plan.height} would come of it: send one that is less long")
        sides = [side for side in ("width", "height") if getattr(request, side)]
        # Unless both sides are asked for, the size follows from the one that is, or from the pictures.
        check_size(plan, limits, self._info.name, "" if len(sides) == 2 else "".join(sides) or "images")
        await asyncio.to_thread(self._artist.check, plan)
        if (tokens := self._artist.tokens(plan)) > self._max_tokens:
            advice = "fewer frames or pixels" if plan.frames else "fewer or smaller pictures"
            fault = f"it has {tokens} latent tokens, and {self._max_tokens} fit (option max_tokens): ask for {advice}"
            size_field = "frames" if plan.frames > limits.frames else "width"
            raise BadRequest(f"diffusion.{'results' if plan.results > 1 else size_field}", fault)
        return plan

    async def _edited(self, plan: DrawingPlan, image: Media, number: int, client: str) -> EditedPicture:
        return await self._decode_image(image, client, "diffusion.images", number, lambda decoded: self._artist.edited(plan, decoded))

    async def _guide(self, request: DrawRequest, plan: DrawingPlan, field: str, images: Sequence[EditedPicture]) -> EditedPicture | None:
        """A mask or a control image in the form that the pipeline needs (it resizes the picture by itself); None if the request has none.
        field: its name in the request. images: the edited pictures. Raises BadRequest if a mask and the first differ in size."""
        image: Media | None = getattr(request, field)
        if image is None:
            return None
        is_mask = field == "mask_image"
        # The mask is counted after the images, and the control image after both.
        number = len(request.images) + (1 if is_mask or request.mask_image is None else 2)
        edit = mask_of if is_mask else partial(self._artist.edited, plan)
        picture = await self._decode_image(image, request.client, f"diffusion.{field}", number, edit, alpha=is_mask)
        if is_mask and images and (picture.width, picture.height) != (images[0].width, images[0].height):
            sizes = f"is {picture.width}x{picture.height}, and the picture {images[0].width}x{images[0].height}: give one of that size"
            raise BadRequest(f"diffusion.{field}", sizes, medium=str(number))
        return replace(picture, digest=image.digest)

    async def _decode_image(
        self, image: Media, client: str, field: str, number: int, edit: Callable[[Image], EditedPicture], *, alpha: bool = False
    ) -> EditedPicture:
        """Decode a picture and bring it into the form that `edit` makes; only one picture at a time is in memory in the size in which it
        was sent. number: its number among all media of the request, from 1 on. Raises BadRequest or Full."""
        check_medium(image, self._info, field, medium=str(number))
        alpha, max_pixels = alpha or bool(self._artist.limits.max_layers), self._image_pixels
        ask = PicturePreprocessing(factor=1, min_pixels=1, max_pixels=max_pixels, alpha=alpha, background=image.background)
        try:
            async with self._fitting_places.hold(client):
                decoded = await self._decoder.picture(image.data, ask, client=client)
                picture = await asyncio.to_thread(lambda: edit(pillow.fromarray(decoded.pixels)))
        except BadMedia as error:
            raise BadRequest(field, str(error), medium=str(number)) from None
        except (DecoderFull, DecoderFailed) as error:
            raise Full(str(error)) from None
        except DecoderBroken as error:
            raise Failed(str(error)) from None
        self._hold(picture)
        return picture

    def _hold(self, picture: EditedPicture) -> None:
        """Count the memory of a picture as long as the picture exists. Raises Full if too much waits already."""
        with self._held_lock:
            if self._held_bytes and self._held_bytes + picture.bytes > HELD_BYTES:  # One picture alone is never refused.
                raise Full(f"{self._held_bytes >> 20} MiB of pictures wait to be edited, and {HELD_BYTES >> 20} MiB may")
            self._held_bytes += picture.bytes
        weakref.finalize(picture, self._let_go, picture.bytes).atexit = False

    def _let_go(self, size: int) -> None:
        with self._held_lock:
            self._held_bytes -= size

    def items(self, prepared: DrawingPlan) -> Mapping[str, int]:
        return self._artist.product.items(prepared)

    async def draw(self, prepared: DrawingPlan, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Drawn, None]:
        """Yields notes about the request, and then the pieces of its drawing. inputs: unused."""
        if prepared.prompt_tokens is not None:
            yield PromptRead(prepared.prompt_tokens)
        for note in (*self._vocabulary.notes(prepared.prompt), size_note(prepared), *(image.note for image in prepared.images)):
            if note:
                yield Note(note)
        if prepared.mask is not None and draws_nothing(prepared.mask):
            yield Note(NOTHING_DRAWN)
        job, client = self._artist.job(prepared, ports), prepared.client
        del prepared  # It would keep its images, many megabytes, which the job drops when they are encoded.
        async with aclosing(self.sessions.draw(job, client)) as pieces:
            async for piece in pieces:
                yield piece

    async def warm_up(self) -> None:
        """Draw a picture in the fewest steps, which also fits the map from latents to previews."""
        limits = self._artist.limits
        image = Media(PNG, encode_picture(pillow.new("RGB", (64, 64), (90, 120, 200)), PNG))
        request = DrawRequest(seed=0, prompt="a circle", images=(image,) * limits.images[0], steps=limits.min_steps)
        plan = await self.prepare(with_guides(smallest(request, limits, self._first_side), limits, image))
        async with aclosing(self.draw(plan, inputs_of(), {self._artist.product.ports[0].name: 0})) as pieces:
            async for _ in pieces:
                pass

    async def close(self) -> None:
        """End the thread and the processes. Call it when no session is running."""
        await self._worker.close()
        await self._decoder.close()


PROGRESS = "progress"


class DrawingJob:
    """A plan and its progress. canvases: its pictures, empty until its words and images are encoded, without the pictures that the reader
    has already. cost: latent tokens of a step. decoder_share: see Drawing. first: number of the first picture drawn. layout: form of
    the states that are kept on the way. The images of the plan are dropped once they are encoded."""

    def __init__(self, plan: DrawingPlan, ports: Wanted, cost: int, first: int, layout: StateLayout, decoder_share: float = 0.0) -> None:
        self.plan, self.ports, self.cost, self.first, self.layout = plan, ports, cost, first, layout
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

    def check_text(self, text: str) -> int:
        return self._painter.check_text(text)

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
        share = 0.0 if self.memory is None else self.memory.estimate(plan).frame_bytes / self.memory.budget
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
        if self.product.ports[0].name in job.ports:
            shown += self.product.preview(job.canvases[0])
        if CHECKPOINT in job.ports and sampler.step in job.layout.steps:
            # The rows of earlier steps count too.
            skipped = max(job.ports[CHECKPOINT] - job.layout.steps.index(sampler.step) * job.layout.rows, 0)
            if skipped < job.layout.rows:
                rows = job.layout.write([canvas.sampler.keep(canvas.latents) for canvas in job.canvases])
                shown.append(TensorRows(CHECKPOINT, rows[skipped:]))
        return shown

    def _progress(self, job: DrawingJob) -> list[Drawn]:
        return [StepsDone(each.sampler.step, each.sampler.steps) for each in job.canvases[:1] if PROGRESS in job.ports]

    def is_done(self, job: DrawingJob) -> bool:
        return job.encoded and all(canvas.is_drawn for canvas in job.canvases)

    @torch.inference_mode()
    def decode(self, job: DrawingJob) -> Generator[Drawn, None, None]:
        yield from self.product.decode(job.plan, job.canvases, job.ports)
