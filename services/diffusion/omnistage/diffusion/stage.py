"""From DiffusionParams to pictures."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from omnistage.host.watchdog import Watched
from omnistage.models.interface import BadRequest, DiffusionModel, DrawRequest, Picture
from omnistage.stage.describe import describe
from omnistage.stage.logic import Input, LogicLoad, Output, Start, Timing, Work
from omnistage.stage.params import POSITIONS, bad_request, check_kind, refusals
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

MAX_PROMPT_CHARACTERS = 20_000
MAX_PART_BYTES = 1 << 20
MEDIA_TYPES = frozenset({"", "image/png"})


class DiffusionStage:
    """A DiffusionModel as a stage."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        self.description = describe(stage_pb2.STAGE_KIND_DIFFUSION, model.info)

    @property
    def threads(self) -> Sequence[Watched]:
        return self._model.threads

    def load(self) -> LogicLoad:
        return LogicLoad(queued=self._model.load().queued)

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_kind(request.params, "diffusion")
        draw = replace(parse(request.params.diffusion, request.seed), first=start.first.get("image", 0))
        if draw.first > draw.results:
            raise bad_request(POSITIONS, f"port 'image' cannot go on at picture {draw.first}: {draw.results} are asked for")
        with refusals(BadRequest):
            self._model.check(draw)
        return Work(partial(self._run, draw))

    async def warm_up(self) -> None:
        await self._model.warm_up()

    async def close(self) -> None:
        await self._model.close()

    async def _run(self, request: DrawRequest, inputs: AsyncIterator[Input], timing: Timing, start: Start) -> AsyncGenerator[Output, None]:
        """Progress begins anew with a resumed session; pictures that the caller has are not drawn again."""
        wants_progress, wants_image = "progress" not in start.ended, "image" not in start.ended
        if wants_image and request.first < request.results:
            with refusals(BadRequest):
                async with aclosing(self._model.draw(request)) as pictures:
                    async for picture in pictures:
                        if picture.data:
                            for output in _parts(picture):
                                yield output
                        elif wants_progress:
                            yield Output("progress", 0, chunk_pb2.ProgressChunk(done=picture.step, total=picture.steps))
        if wants_progress:
            yield Output("progress", 0, None, last=True)
        if wants_image:
            yield Output("image", 0, None, last=True)


def parse(params: stage_pb2.DiffusionParams, seed: int) -> DrawRequest:
    """Checked parameters. Raises BAD_REQUEST with the field that is bad."""
    if not params.prompt.strip():
        raise bad_request("diffusion.prompt", "a prompt is needed")
    if len(params.prompt) > MAX_PROMPT_CHARACTERS or len(params.negative_prompt) > MAX_PROMPT_CHARACTERS:
        raise bad_request("diffusion.prompt", f"at most {MAX_PROMPT_CHARACTERS} characters")
    if params.results > 8:
        raise bad_request("diffusion.results", "must be from 1 to 8")
    if params.previews > 16:
        raise bad_request("diffusion.previews", "must be from 0 to 16")
    if params.steps > 1000:
        raise bad_request("diffusion.steps", "must be at most 1000")
    guidance = params.guidance_scale if params.HasField("guidance_scale") else None
    if guidance is not None and not (math.isfinite(guidance) and 0 <= guidance <= 100):
        raise bad_request("diffusion.guidance_scale", "must be from 0 to 100")
    if params.frames or params.duration_s or params.layers:
        field = "frames" if params.frames else "duration_s" if params.duration_s else "layers"
        raise bad_request(f"diffusion.{field}", "this model draws still pictures of one layer; leave it out")
    if params.media_type not in MEDIA_TYPES:
        raise bad_request("diffusion.media_type", f"must be one of {sorted(MEDIA_TYPES - {''})}, or be left out")
    if params.images:
        raise bad_request("diffusion.images", "this model takes no pictures")
    return DrawRequest(
        seed=seed,
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        width=params.width,
        height=params.height,
        steps=params.steps,
        guidance_scale=guidance,
        results=params.results or 1,
        previews=params.previews,
    )


def _parts(picture: Picture) -> list[Output]:
    """A picture as one chunk, or in parts of at most 1 MiB; all but the last have count 0, and so has a preview."""
    parts = []
    size = len(picture.data)
    for offset in range(0, size, MAX_PART_BYTES):
        data = picture.data[offset : offset + MAX_PART_BYTES]
        whole = offset + len(data) == size and not picture.preview
        inline = tensor_pb2.InlinePart(data=data, offset=offset, total_bytes=size)
        chunk = chunk_pb2.ImageChunk(data=inline, media_type=picture.media_type)
        if picture.preview:
            chunk.preview_step = picture.step
        parts.append(Output("image", 1 if whole else 0, chunk))
    return parts
