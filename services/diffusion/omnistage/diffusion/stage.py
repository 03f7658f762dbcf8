"""From DiffusionParams to pictures, films and sound."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from omnistage.models.conversation import Media
from omnistage.models.interface import (
    MAX_CLIP_BYTES,
    Clip,
    Content,
    DiffusionModel,
    Drawn,
    DrawRequest,
    EncodedPicture,
    Note,
    P,
    Preview,
    Sound,
    StepsDone,
    TensorRows,
)
from omnistage.stage.content import code_outputs, codes_of, pieces, row_outputs, sound_outputs
from omnistage.stage.logic import Input, Output, SessionTiming, Start, Work
from omnistage.stage.model import ModelStage, refusals
from omnistage.stage.params import POSITIONS, bad_request, check_kind, media_of, output_type_of
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

MAX_PROMPT_CHARACTERS = 32_000
"""Largest number of characters of a prompt, as in OpenAI's interface; the gateway has it too."""
MAX_PIXELS = 16384
MAX_STEPS = 1000
MAX_GUIDANCE = 100
MAX_RESULTS = 8
MAX_PREVIEWS = 16
MAX_PREVIEW_SIDE = 1024
MAX_FRAMES = 1 << 16
MAX_SECONDS = 3600
MIN_RATE_HZ, MAX_RATE_HZ = 0.1, 120
MAX_FLOW_SHIFT = 100
MAX_LAYERS = 64
MIN_SIGMA = 1e-6
"""Smallest sigma, above 0 because some schedulers compute its logarithm in float32."""
MAX_SIGMA = 1e6
MAX_OPTION_CHARACTERS = 20_000
OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
MAX_PART_BYTES = 1 << 20
"""Largest number of bytes in one chunk of an encoded picture; stated in chunk.proto."""


class DiffusionStage(ModelStage[DiffusionModel[P]]):
    """A DiffusionModel as a stage. It has at most one port for each kind of content, except tensors; the model names the ports."""

    kind = stage_pb2.STAGE_KIND_DIFFUSION

    def __init__(self, model: DiffusionModel[P]) -> None:
        super().__init__(model)
        self._ports = {port.content: port for port in model.info.produces if port.content is not Content.TENSOR}
        self._rows = {port.name: port for port in model.info.produces if port.content in (Content.TENSOR, Content.CODES)}

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        check_kind(request.params, "diffusion")
        draw = replace(parse(request.params.diffusion, request.seed), client=request.client)
        codes = self._ports.get(Content.CODES)
        if codes is not None and codes.compact and codes.name not in start.ended_ports:
            draw = replace(draw, history=codes_of(start, codes))
        with refusals():
            prepared = await self._model.prepare(draw)
        self._check_places(prepared, start)
        return Work(partial(self._run, prepared))

    def _check_places(self, prepared: P, start: Start) -> None:
        """Raise BAD_REQUEST if `start` lets a port go on after its last item."""
        for port, count in self._model.items(prepared).items():
            if (first := start.first.get(port, 0)) > count:
                raise bad_request(POSITIONS, f"port {port!r} cannot go on at {first}: there are only {count} items")

    async def _run(self, prepared: P, inputs: AsyncIterator[Input], timing: SessionTiming, start: Start) -> AsyncGenerator[Output, None]:
        """Draw, and yield the outputs that are still to come. In a resumed session progress begins anew; for progress alone nothing is
        drawn. The starts of the ports are checked here too, because only now the start of a port of rows is certain."""
        self._check_places(prepared, start)
        timing.drew = self._model.info.draws is not False
        ports = start.find_open_ports(self._model.info.produces)
        if any(port.name in ports for port in self._model.info.produces if port.content is not Content.PROGRESS):
            with refusals():
                async with aclosing(self._model.draw(prepared, pieces(inputs, self._model.info.accepts), ports)) as drawings:
                    async for result in drawings:
                        if isinstance(result, Note):
                            timing.note(result.text)
                            continue
                        for output in self._outputs(result):
                            if output.port in ports:
                                yield output
        for name in ports:
            yield Output(name, 0, None, last=True)

    def _outputs(self, result: Drawn) -> Iterator[Output]:
        """The outputs for one result of the model. Raises TypeError if the model breaks its interface."""
        match result:
            case StepsDone(step, steps):
                if Content.PROGRESS in self._ports:
                    yield Output(self._ports[Content.PROGRESS].name, 0, chunk_pb2.ProgressChunk(done=step, total=steps))
            case Preview(data, media_type, step):
                yield from self._image(data, chunk_pb2.ImageChunk(media_type=media_type, preview_step=step), 0)
            case EncodedPicture(data, media_type, layer):
                yield from self._image(data, chunk_pb2.ImageChunk(media_type=media_type, layer=layer), 1)
            case Clip(data, media_type, frames, codecs):
                if not frames or len(data) > MAX_CLIP_BYTES:
                    raise TypeError(f"a piece of a film has {frames} frames and {len(data)} bytes; see interface.Clip")
                yield Output(self._ports[Content.VIDEO].name, frames, chunk_pb2.VideoChunk(data=data, media_type=media_type, codecs=codecs))
            case TensorRows(name, rows):
                if self._rows[name].content is Content.TENSOR:
                    yield from row_outputs(self._rows[name], rows, last=False)
                else:
                    yield from code_outputs(self._rows[name], rows)
            case Sound(samples):
                port = self._ports[Content.AUDIO]
                yield from sound_outputs(port, samples, round(port.rate_hz), chunk_pb2.AUDIO_ENCODING_PCM16)

    def _image(self, data: bytes, header: chunk_pb2.ImageChunk, count: int) -> Iterator[Output]:
        """The outputs for an encoded picture, in parts. header: the other fields of each part. count: items of the picture, for its last
        part; 0 for a preview."""
        for part, is_last in _parts(data):
            chunk = chunk_pb2.ImageChunk(data=part)
            chunk.MergeFrom(header)
            yield Output(self._ports[Content.IMAGE].name, count if is_last else 0, chunk)


def _parts(data: bytes) -> Iterator[tuple[tensor_pb2.InlinePart, bool]]:
    """The data in parts of at most 1 MiB, and for each part whether it is the last one."""
    size = len(data)
    for offset in range(0, size, MAX_PART_BYTES):
        part = data[offset : offset + MAX_PART_BYTES]
        yield tensor_pb2.InlinePart(data=part, offset=offset, total_bytes=size), offset + len(part) == size


def parse(params: stage_pb2.DiffusionParams, seed: int) -> DrawRequest:
    """Check the parameters of a drawing and return them as models take them. Raises BAD_REQUEST with the field that is bad."""
    if not params.prompt.strip():
        raise bad_request("diffusion.prompt", "a prompt is needed")
    for name in ("prompt", "negative_prompt"):
        if len(getattr(params, name)) > MAX_PROMPT_CHARACTERS:
            raise bad_request(f"diffusion.{name}", f"at most {MAX_PROMPT_CHARACTERS} characters")
    _at_most(params.width, MAX_PIXELS, "width", minimum=1)
    _at_most(params.height, MAX_PIXELS, "height", minimum=1)
    _at_most(params.results, MAX_RESULTS, "results", minimum=1)
    _at_most(params.previews, MAX_PREVIEWS, "previews")
    _at_most(params.preview_side, MAX_PREVIEW_SIDE, "preview_side", minimum=1)
    _at_most(params.step_cache, 1, "step_cache")
    _at_most(params.steps, MAX_STEPS, "steps", minimum=1)
    _at_most(params.frames, MAX_FRAMES, "frames", minimum=1)
    _at_most(params.layers, MAX_LAYERS, "layers")
    _at_most(params.duration_s, MAX_SECONDS, "duration_s")
    _at_most(params.frames_per_second, MAX_RATE_HZ, "frames_per_second", minimum=MIN_RATE_HZ)
    _at_most(params.flow_shift, MAX_FLOW_SHIFT, "flow_shift")
    _at_most(params.begin_s, MAX_SECONDS, "begin_s")
    for name in ("guidance_scale", "guidance_scale_2"):
        if params.HasField(name):
            _at_most(getattr(params, name), MAX_GUIDANCE, name)
    if params.HasField("strength") and not 0 < params.strength <= 1:
        raise bad_request("diffusion.strength", "must be above 0, at most 1")
    _check_sigmas(params.sigmas)
    _check_options(params.options)
    return DrawRequest(
        seed=seed,
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        images=tuple(media_of(image, "diffusion.images") for image in params.images),
        width=params.width,
        height=params.height,
        frames=params.frames,
        seconds=params.duration_s,
        layers=params.layers,
        steps=params.steps,
        guidance_scale=params.guidance_scale if params.HasField("guidance_scale") else None,
        guidance_scale_2=params.guidance_scale_2 if params.HasField("guidance_scale_2") else None,
        frames_per_second=params.frames_per_second,
        flow_shift=params.flow_shift,
        begin_s=params.begin_s,
        results=params.results or 1,
        previews=params.previews,
        preview_side=params.preview_side,
        step_cache=params.step_cache,
        sigmas=tuple(params.sigmas),
        strength=params.strength if params.HasField("strength") else None,
        mask_image=_picture(params, "mask_image"),
        control_image=_picture(params, "control_image"),
        options=dict(params.options),
        media_type=params.media_type and output_type_of(params.media_type, "diffusion", "image/png, or be left out"),
    )


def _picture(params: stage_pb2.DiffusionParams, name: str) -> Media | None:
    return media_of(getattr(params, name), f"diffusion.{name}") if params.HasField(name) else None


def _check_sigmas(sigmas: Sequence[float]) -> None:
    if not all(MIN_SIGMA <= sigma <= MAX_SIGMA for sigma in sigmas):
        raise bad_request("diffusion.sigmas", f"each must be from {MIN_SIGMA:g} to {MAX_SIGMA:g}")
    # Compared in float32, the form that schedulers expect.
    if any(sigma <= next_sigma for sigma, next_sigma in pairwise(np.array(sigmas, np.float32))):
        raise bad_request("diffusion.sigmas", "each must be below the one before it: give the noisiest first")


def _check_options(options: Mapping[str, str]) -> None:
    for name, value in options.items():
        if not OPTION_NAME.fullmatch(name):
            raise bad_request("diffusion.options", f"{name[:64]!r} is no name of an option: give letters, digits and _, at most 64")
        if len(value) > MAX_OPTION_CHARACTERS:
            raise bad_request("diffusion.options", f"{name} has {len(value)} characters: give at most {MAX_OPTION_CHARACTERS}")


def _at_most(value: float, maximum: float, name: str, *, minimum: float = 0) -> None:
    """Raise BAD_REQUEST for a value below `minimum` or above `maximum`, and for NaN. 0 always passes, because it means that the field was
    left out."""
    if not math.isfinite(value) or (value and not minimum <= value <= maximum):
        raise bad_request(f"diffusion.{name}", f"must be from {minimum} to {maximum}")
