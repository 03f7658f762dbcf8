"""The toy film maker: pictures in layers, films in pieces and sound, in steps that jobs of equal size share. See formulas.py. Its products
are made from its latents, but for the sound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.models.conversation import Media
from omnistage.models.interface import (
    MAX_CLIP_BYTES,
    BadRequest,
    Clip,
    Content,
    Drawn,
    DrawRequest,
    EncodedPicture,
    Load,
    ModelInfo,
    Piece,
    PortSpec,
    Preview,
    Sound,
    StepsDone,
    TensorRows,
    Wanted,
)
from omnistage.models.options import LoadOptions, check_counts, validate_options
from omnistage.models.requests import check_medium, check_plain_drawing
from omnistage.models.steps.loop import Aside
from omnistage.models.steps.session import Sessions
from omnistage.models.toy import formulas
from omnistage.models.toy.files import Unreadable, pixels_of, png
from omnistage.models.toy.stages import MAX_SESSIONS, Toy, ToyOptions

T = TypeVar("T")

REVISION = "2"
PROGRESS, CHECKPOINT = "progress", "checkpoint"
SIDE, STEPS, GUIDANCE = 32, 6, 4
PATCH_PIXELS = 64
"""Pixels of one plane that cost one unit, for each side of the guidance."""
MAX_CHECKPOINT_NUMBERS = 1 << 16
"""The limit of numbers in the checkpoint of a job; a larger state is not kept."""


@dataclass(frozen=True, slots=True)
class FilmOptions:
    """interval_s: pause before each step. max_chunk: limit of frames (thousands of samples) a piece. budget, step_budget: see
    steps.orders.Fair; a patch of 8 by 8 pixels of a frame costs 2, one for each side of the guidance. experts: how many parts the model
    has, each for its share of the steps. multistep: a step also reads the model's result of the step before. workers: how many steps run at
    once."""

    interval_s: float = 0.0
    max_chunk: int = 4
    budget: int = 1 << 16
    step_budget: int = 1 << 12
    experts: int = 1
    multistep: bool = False
    workers: int = 1

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> FilmOptions:
        film_options = cls(**validate_options(options, cls(), "the toy models"))
        check_counts(film_options, ("max_chunk", "budget", "step_budget", "experts", "workers"), "the toy models")
        return film_options


class ToyFilmJob:
    """One drawing. latent: its planes after `step` steps. before: the model's result in the last step. result: its result in the next."""

    def __init__(self, scene: ToyScene, ports: Wanted) -> None:
        self.scene, self.ports, self.step = scene, ports, 0
        places = (range(scene.planes), range(scene.height), range(scene.width))
        self.latent = formulas.noise(scene.request.seed, *map(np.array, places))
        self.before = self.result = np.zeros_like(self.latent)


class Pauses:
    """A worker without a thread: the arithmetic of a toy takes no time except a pause before each step."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    async def run(self, call: Callable[[], T], /) -> T:
        await asyncio.sleep(self._interval_s)
        return call()

    def aside(self, call: Callable[[], None], /) -> Future[None]:
        """See Worker.aside: runs the call at once."""
        done = Future[None]()
        call()
        done.set_result(None)
        return done


class FilmMaker(Toy):
    """The toy film maker: a `DiffusionModel`, and the `Drawing` of its own sessions."""

    def __init__(self, options: FilmOptions) -> None:
        super().__init__(ToyOptions(options.interval_s, options.max_chunk))
        self._pictures, self._film, self._sound = ToyPictures(), ToyFilm(self._draw_count), Noise(self._draw_count)
        self._options = options
        self.info = ModelInfo(
            NAME,
            f"{REVISION}.{options.experts}.{options.multistep:d}",
            accepts=(),
            produces=(
                *(port for product in (self._pictures, self._film, self._sound) for port in product.ports),
                PortSpec(PROGRESS, Content.PROGRESS),
                PortSpec(CHECKPOINT, Content.CODES, width=1, compact=True),
            ),
            max_sessions=MAX_SESSIONS,
            inputs=("text", "image"),
        )
        workers = [Pauses(options.interval_s) for _ in range(options.workers)]
        self.sessions = Sessions[ToyFilmJob](self, workers, budget=options.budget, step_budget=options.step_budget)
        self.groups: list[int] = []
        """For each step that was computed: how many jobs shared it."""

    def load(self) -> Load:
        return self.sessions.load

    def products(self, request: DrawRequest) -> tuple[ToyPictures | ToyFilm | Noise, ...]:
        """The products that a request asks for: pictures, or film and sound."""
        film = (self._film,) if request.frames else ()
        sound = (self._sound,) if request.seconds else ()
        return (*film, *sound) or (self._pictures,)

    async def prepare(self, request: DrawRequest) -> ToyScene:
        check_plain_drawing(request, NAME)
        products = self.products(request)
        for product in products:
            product.check(request)
        if request.media_type not in ("", products[0].media_type):
            text = f"{NAME} makes {products[0].media_type} of this request; ask for that or leave it out"
            raise BadRequest("diffusion.media_type", text)
        scale = GUIDANCE if request.guidance_scale is None else request.guidance_scale
        if scale != int(scale):
            raise BadRequest("diffusion.guidance_scale", f"{NAME} counts in whole numbers; ask for {round(scale)}")
        shown = sum(int(self._read(image).sum()) for image in request.images)
        steer = formulas.steer(request.prompt, request.negative_prompt, int(scale), shown)
        scene = ToyScene(request, request.width or SIDE, request.height or SIDE, request.steps or STEPS, steer)
        cost, budget = self._cost(scene), self._options.budget
        if cost > budget:
            raise BadRequest("diffusion.width", f"ask for fewer or smaller pictures: it costs {cost} of {budget}")
        if request.history is not None and (request.history.ndim != 2 or len(request.history) > self._checkpoint_rows(scene)):
            raise BadRequest("resume.history", f"port {CHECKPOINT!r} has at most {self._checkpoint_rows(scene)} rows of 1 for this request")
        return scene

    def _read(self, image: Media) -> NDArray[np.uint8]:
        """The pixels of a picture in the request. Raises BadRequest."""
        check_medium(image, self.info, "diffusion.images")
        try:
            return pixels_of(image.data)
        except Unreadable as error:
            raise BadRequest("diffusion.images", str(error)) from None

    def items(self, prepared: ToyScene) -> Mapping[str, int]:
        """See DiffusionModel.items. Ports of products that are not asked for have none."""
        counts = {port.name: 0 for product in (self._pictures, self._film, self._sound) for port in product.ports}
        for product in self.products(prepared.request):
            counts |= product.items(prepared)
        return counts

    async def draw(self, prepared: ToyScene, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Drawn, None]:
        job = ToyFilmJob(prepared, ports)
        self._restore(job)
        async with aclosing(self.sessions.draw(job, prepared.request.client)) as pieces:
            async for piece in pieces:
                yield piece

    # A Drawing -------------------------------------------------------------------------------------------------------------------------

    def _cost(self, scene: ToyScene) -> int:
        """The cost of a step: for each patch of each plane 2 units, one for each side of the guidance."""
        return 2 * scene.planes * -(-scene.height * scene.width // PATCH_PIXELS)

    def cost(self, job: ToyFilmJob) -> int:
        return self._cost(job.scene)

    def decoder_share(self, job: ToyFilmJob) -> float:
        return 0.0

    def steps(self, job: ToyFilmJob) -> int:
        return job.scene.steps

    def _expert(self, job: ToyFilmJob) -> int:
        return job.step * self._options.experts // job.scene.steps

    def key(self, job: ToyFilmJob) -> Hashable:
        return job.scene.height, job.scene.width, self._expert(job)

    def step(self, jobs: Sequence[ToyFilmJob], aside: Aside | None) -> None:
        """Compute the next step of all jobs in one multiplication, as a model would in one pass."""
        self.groups.append(len(jobs))
        latents = formulas.expert(self._expert(jobs[0])) * np.concatenate([job.latent for job in jobs])
        for job, part in zip(jobs, np.split(latents, np.cumsum([len(job.latent) for job in jobs])[:-1]), strict=True):
            job.result = part

    def take(self, job: ToyFilmJob) -> Sequence[Drawn]:
        """See Drawing.take: finish the step; returns its progress, a preview if one is due, and the checkpoint in the middle."""
        scene, previews = job.scene, job.scene.request.previews
        job.step += 1
        job.latent = (job.result + self._options.multistep * job.before + scene.steer + job.step) % 256
        job.before = job.result % 256
        outputs: list[Drawn] = [StepsDone(job.step, scene.steps)] if PROGRESS in job.ports else []
        is_preview_due = job.step * previews // scene.steps > (job.step - 1) * previews // scene.steps
        if IMAGE in job.ports and is_preview_due:
            outputs.append(Preview(png((job.latent[0] // 16 * 16).astype(np.uint8)), PICTURE, job.step))  # In 16 shades.
        # If the checkpoint is not asked for, MAX_CHECKPOINT_NUMBERS stands for a place that no row reaches.
        if job.step == scene.steps // 2 and job.ports.get(CHECKPOINT, MAX_CHECKPOINT_NUMBERS) < self._checkpoint_rows(scene):
            outputs.append(TensorRows(CHECKPOINT, self._state(job)[job.ports[CHECKPOINT] :]))
        return outputs

    def is_done(self, job: ToyFilmJob) -> bool:
        return job.step == job.scene.steps

    def give_up(self, job: ToyFilmJob) -> None:
        """Nothing is to be freed: a job holds only itself."""

    def decode(self, job: ToyFilmJob) -> Generator[Drawn, None, None]:
        for product in self.products(job.scene.request):
            yield from product.decode(job.scene, job.latent, job.ports)

    # The state from which another replica goes on in the middle of the steps -----------------------------------------------------------

    def _checkpoint_rows(self, scene: ToyScene) -> int:
        """The number of rows in the checkpoint of a scene; 0 if it would be too large or there is only one step."""
        values = (1 + self._options.multistep) * scene.planes * scene.height * scene.width
        return values if values <= MAX_CHECKPOINT_NUMBERS and scene.steps > 1 else 0

    def _state(self, job: ToyFilmJob) -> NDArray[np.uint32]:
        parts = (job.latent, job.before) if self._options.multistep else (job.latent,)
        return np.stack(parts).astype(np.uint32).reshape(-1, 1)

    def _restore(self, job: ToyFilmJob) -> None:
        """Set a job to the middle of its steps if the request's history has the whole checkpoint."""
        history = job.scene.request.history
        if history is None or not len(history) or len(history) < self._checkpoint_rows(job.scene):
            return
        job.latent, *before = history.astype(np.int64).reshape(-1, *job.latent.shape)  # As `_state` writes it: with `multistep` two parts.
        job.before = before[0] if before else job.before
        job.step = job.scene.steps // 2


def load_film(folder: Path | None, options: LoadOptions) -> FilmMaker:
    """A Loader of the table of families."""
    return FilmMaker(FilmOptions.from_settings(dict(options.family)))


# Products ----------------------------------------------------------------------------------------------------------------------------


NAME = "toy-film"
IMAGE, VIDEO, AUDIO = "image", "video", "audio"
PICTURE, FILM, SOUND = "image/png", "video/x-grey8", "audio/x-pcm16"
"""The types that a request may name. A film is one byte for each pixel of each frame, without a header."""

MAX_SIDE, MAX_FRAMES, MAX_SECONDS = 256, 64, 10

Latent = NDArray[np.int64]
"""[planes, height, width]."""


@dataclass(frozen=True, slots=True)
class ToyScene:
    """A request with its defaults filled in. width, height: in pixels. steer: the number that each step adds, see formulas.steer."""

    request: DrawRequest
    width: int
    height: int
    steps: int
    steer: int

    @property
    def planes(self) -> int:
        """Planes of the latent: frames of the film, or pictures."""
        return self.request.frames or self.request.results


def check_most(field: str, value: float, maximum: float) -> None:
    if value > maximum:
        raise BadRequest(f"diffusion.{field}", f"{NAME} makes at most {maximum}")


@dataclass(frozen=True, slots=True)
class ToyPictures:
    """Implements `Product`: one or more pictures, each in layers."""

    ports = (PortSpec(IMAGE, Content.IMAGE),)
    media_type = PICTURE

    def check(self, request: DrawRequest) -> None:
        check_most("width", request.width, MAX_SIDE)
        check_most("height", request.height, MAX_SIDE)

    def items(self, scene: ToyScene) -> Mapping[str, int]:
        return {IMAGE: scene.request.results * max(scene.request.layers, 1)}

    def decode(self, scene: ToyScene, latent: Latent, ports: Wanted) -> Generator[Drawn, None, None]:
        count, layers = self.items(scene)[IMAGE], max(scene.request.layers, 1)
        for number in range(ports.get(IMAGE, count), count):  # None if the port is not asked for.
            result, layer = divmod(number, layers)
            yield EncodedPicture(png(formulas.layer(latent[result], layer)), PICTURE, layer)


@dataclass(frozen=True, slots=True)
class ToyFilm:
    """Implements `Product`: a film. draw_count: returns how many frames the next piece has."""

    draw_count: Callable[[], int]
    ports = (PortSpec(VIDEO, Content.VIDEO),)
    media_type = FILM

    def check(self, request: DrawRequest) -> None:
        check_most("width", request.width, MAX_SIDE)
        check_most("height", request.height, MAX_SIDE)
        check_most("frames", request.frames, MAX_FRAMES)
        if request.layers or request.results > 1:
            raise BadRequest("diffusion.frames", "one film at a time, without layers: leave results and layers out")

    def items(self, scene: ToyScene) -> Mapping[str, int]:
        return {VIDEO: scene.request.frames}

    def decode(self, scene: ToyScene, latent: Latent, ports: Wanted) -> Generator[Drawn, None, None]:
        limit, frames = MAX_CLIP_BYTES // (scene.height * scene.width), scene.request.frames
        frame = ports.get(VIDEO, frames)
        while frame < frames:
            part = latent[frame : frame + min(self.draw_count(), limit)].astype(np.uint8)
            frame += len(part)
            yield Clip(part.tobytes(), FILM, len(part))


@dataclass(frozen=True, slots=True)
class Noise:
    """Implements `Product`: sound. draw_count: returns how many thousand samples the next piece has."""

    draw_count: Callable[[], int]
    ports = (PortSpec(AUDIO, Content.AUDIO, rate_hz=formulas.SAMPLE_RATE_HZ, width=1),)
    media_type = SOUND

    def check(self, request: DrawRequest) -> None:
        check_most("duration_s", request.seconds, MAX_SECONDS)

    def items(self, scene: ToyScene) -> Mapping[str, int]:
        return {AUDIO: round(scene.request.seconds * formulas.SAMPLE_RATE_HZ)}

    def decode(self, scene: ToyScene, latent: Latent, ports: Wanted) -> Generator[Drawn, None, None]:
        samples = self.items(scene)[AUDIO]
        sample = ports.get(AUDIO, samples)
        while sample < samples:
            count = min(1000 * self.draw_count(), samples - sample)
            yield Sound(formulas.film_sound(scene.request.seed, scene.steer, sample, count))
            sample += count
