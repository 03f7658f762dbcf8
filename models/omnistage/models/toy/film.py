"""The toy film maker: pictures in layers, films in pieces and sound, drawn in steps that drawings of equal size share. See formulas.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.models.common.requests import check_medium, check_place
from omnistage.models.conversation import Media
from omnistage.models.interface import (
    MAX_CLIP_BYTES,
    BadRequest,
    Clip,
    Content,
    Drawn,
    DrawRequest,
    Load,
    ModelInfo,
    Picture,
    Piece,
    PortSpec,
    Preview,
    Progress,
    Sound,
    Wanted,
)
from omnistage.models.options import LoadOptions, checked_options
from omnistage.models.steps.interface import Aside
from omnistage.models.steps.session import Sessions
from omnistage.models.toy import formulas
from omnistage.models.toy.files import Unreadable, pixels_of, png
from omnistage.models.toy.stages import MAX_SESSIONS, Toy, ToyOptions

T = TypeVar("T")

REVISION = "1"
STILL, FILM, SOUND = "image/png", "video/x-grey8", "audio/x-pcm16"
"""What can be asked for. A film is one byte for each pixel of each frame, without a header."""

SIDE, STEPS, GUIDANCE = 32, 6, 4
MAX_SIDE, MAX_FRAMES, MAX_SECONDS = 256, 64, 10
PATCH_PIXELS = 64
"""Of what one unit of cost stands for."""


@dataclass(frozen=True, slots=True)
class FilmOptions:
    """interval_s: pause before each unit of work. max_chunk: most frames or thousands of samples in a piece. budget, step_budget: see
    steps.fair; a patch of 8 by 8 pixels of a frame costs 2, one for each side of the guidance."""

    interval_s: float = 0.0
    max_chunk: int = 4
    budget: int = 1 << 16
    step_budget: int = 1 << 12

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> FilmOptions:
        return cls(**checked_options(options, cls(), "the toy models"))


@dataclass(frozen=True, slots=True)
class Scene:
    """A request with its defaults filled in. steer: what guidance, images and prompts add in each step."""

    request: DrawRequest
    width: int
    height: int
    steps: int
    steer: int

    @property
    def pictures(self) -> int:
        """How many are drawn, all layers counted; none beside a film or sound."""
        return 0 if self.request.frames or self.request.seconds else self.request.results * max(self.request.layers, 1)

    @property
    def samples(self) -> int:
        return round(self.request.seconds * formulas.SAMPLE_RATE_HZ)

    @property
    def planes(self) -> int:
        """Latent frames."""
        return self.request.frames or self.request.results


class Job:
    """latent: [planes, height, width], after `step` steps. tripled: what the last `step` made of it."""

    def __init__(self, scene: Scene, wanted: Wanted) -> None:
        self.scene, self.wanted, self.step = scene, wanted, 0
        places = (range(scene.planes), range(scene.height), range(scene.width))
        self.latent = formulas.noise(scene.request.seed, *map(np.array, places))
        self.tripled = self.latent


class Pauses:
    """A worker without a thread: the arithmetic of a toy takes no time, but for a pause before each step."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    async def run(self, call: Callable[[], T], /) -> T:
        await asyncio.sleep(self._interval_s)
        return call()

    def aside(self, call: Callable[[], None], /) -> Future[None]:
        done = Future[None]()
        call()
        done.set_result(None)
        return done


class FilmMaker(Toy):
    """Implements `DiffusionModel`, and the `Drawing` of its sessions."""

    def __init__(self, options: FilmOptions) -> None:
        super().__init__(ToyOptions(options.interval_s, options.max_chunk))
        self.info = ModelInfo(
            "toy-film",
            REVISION,
            accepts=(),
            produces=(
                PortSpec("image", Content.IMAGE),
                PortSpec("video", Content.VIDEO),
                PortSpec("audio", Content.AUDIO, rate_hz=formulas.SAMPLE_RATE_HZ, width=1),
                PortSpec("progress", Content.PROGRESS),
            ),
            max_sessions=MAX_SESSIONS,
            inputs=("text", "image"),
        )
        self.sessions = Sessions[Job](self, [Pauses(options.interval_s)], budget=options.budget, step_budget=options.step_budget)
        self._film = options
        self.groups: list[int] = []
        """How many stepped together, step for step."""

    def load(self) -> Load:
        return self.sessions.load

    async def prepare(self, request: DrawRequest) -> Scene:
        for name, value, most in (
            ("width", request.width, MAX_SIDE),
            ("height", request.height, MAX_SIDE),
            ("frames", request.frames, MAX_FRAMES),
            ("duration_s", request.seconds, MAX_SECONDS),
        ):
            if value > most:
                raise BadRequest(f"diffusion.{name}", f"{self.info.name} makes at most {most}")
        if request.frames and (request.layers or request.results > 1):
            raise BadRequest("diffusion.frames", "one film at a time, without layers: leave results and layers out")
        able = FILM if request.frames else SOUND if request.seconds else STILL
        if request.media_type not in ("", able):
            raise BadRequest("diffusion.media_type", f"{self.info.name} makes {able} of this request; ask for that or leave it out")
        scale = GUIDANCE if request.guidance_scale is None else request.guidance_scale
        if scale != int(scale):
            raise BadRequest("diffusion.guidance_scale", f"{self.info.name} counts in whole numbers; ask for {round(scale)}")
        shown = sum(int(self._read(image).sum()) for image in request.images)
        steer = formulas.steer(request.prompt, request.negative_prompt, int(scale), shown)
        scene = Scene(request, request.width or SIDE, request.height or SIDE, request.steps or STEPS, steer)
        if self._cost(scene) > self._film.budget:
            raise BadRequest("diffusion.width", f"ask for fewer or smaller pictures: it costs {self._cost(scene)} of {self._film.budget}")
        return scene

    def _read(self, image: Media) -> NDArray[np.uint8]:
        check_medium(image, self.info, "diffusion.images")
        try:
            return pixels_of(image.data)
        except Unreadable as error:
            raise BadRequest("diffusion.images", str(error)) from None

    async def draw(self, prepared: Scene, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Drawn, None]:
        check_place(wanted, "image", prepared.pictures, "pictures")
        check_place(wanted, "video", prepared.request.frames, "frames")
        check_place(wanted, "audio", prepared.samples, "samples")
        async with aclosing(self.sessions.draw(Job(prepared, wanted), prepared.request.client)) as pieces:
            async for piece in pieces:
                yield piece

    # A Drawing -------------------------------------------------------------------------------------------------------------------------

    def _cost(self, scene: Scene) -> int:
        return 2 * scene.planes * -(-scene.height * scene.width // PATCH_PIXELS)

    def cost(self, job: Job) -> int:
        return self._cost(job.scene)

    def steps(self, job: Job) -> int:
        return job.scene.steps

    def key(self, job: Job) -> Hashable:
        return job.scene.height, job.scene.width

    def step(self, jobs: Sequence[Job], aside: Aside | None) -> None:
        """All planes of all jobs in one multiplication, as a model would have them in one product."""
        self.groups.append(len(jobs))
        tripled = 3 * np.concatenate([job.latent for job in jobs])
        for job, part in zip(jobs, np.split(tripled, np.cumsum([len(job.latent) for job in jobs])[:-1]), strict=True):
            job.tripled = part

    def take(self, job: Job) -> Sequence[Drawn]:
        scene, previews = job.scene, job.scene.request.previews
        job.step += 1
        job.latent = (job.tripled + scene.steer + job.step) % 256
        shown: list[Drawn] = [Progress(job.step, scene.steps)] if "progress" in job.wanted else []
        if "image" in job.wanted and job.step * previews // scene.steps > (job.step - 1) * previews // scene.steps:
            shown.append(Preview(png((job.latent[0] // 16 * 16).astype(np.uint8)), STILL, job.step))
        return shown

    def is_done(self, job: Job) -> bool:
        return job.step == job.scene.steps

    def give_up(self, job: Job) -> None:
        """It holds nothing beside itself."""

    def decode(self, job: Job) -> Generator[Drawn, None, None]:
        scene, wanted = job.scene, job.wanted
        layers = max(scene.request.layers, 1)
        for number in range(wanted.get("image", scene.pictures), scene.pictures):
            result, layer = divmod(number, layers)
            yield Picture(png(formulas.layer(job.latent[result], layer)), STILL, layer)
        most = MAX_CLIP_BYTES // (scene.height * scene.width)
        frame = wanted.get("video", scene.request.frames)
        while frame < scene.request.frames:
            part = job.latent[frame : frame + min(self._cut(), most)].astype(np.uint8)
            frame += len(part)
            yield Clip(part.tobytes(), FILM, len(part))
        sample = wanted.get("audio", scene.samples)
        while sample < scene.samples:
            count = min(1000 * self._cut(), scene.samples - sample)
            yield Sound(formulas.film_sound(scene.request.seed, scene.steer, sample, count))
            sample += count


def load_film(folder: Path | None, options: LoadOptions) -> FilmMaker:
    """Of the table of families."""
    return FilmMaker(FilmOptions.from_settings(dict(options.family)))
