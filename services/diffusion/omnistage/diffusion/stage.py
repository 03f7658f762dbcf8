"""From DiffusionParams to pictures, films and sound."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
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
    PromptRead,
    Sound,
    StepsDone,
    TensorRows,
)
from omnistage.stage.content import code_outputs, codes_of, pieces, row_outputs, sound_outputs
from omnistage.stage.logic import Input, Output, SessionTiming, Start, Work
from omnistage.stage.model import ModelStage, refusals
from omnistage.stage.params import POSITIONS, bad_request, check_params, media_of, output_type_of, values_for
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

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
        check_params(request.params, "diffusion")
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
                        if isinstance(result, PromptRead):
                            timing.prompt_tokens = result.tokens
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
    """The parameters of a drawing, checked, as models take them. Raises BAD_REQUEST with the field that is bad."""
    if not params.prompt.strip():
        raise bad_request("diffusion.prompt", "a prompt is needed")
    # Compared in float32, the form that schedulers expect.
    if any(sigma <= next_sigma for sigma, next_sigma in pairwise(np.array(params.sigmas, np.float32))):
        raise bad_request("diffusion.sigmas", "each must be below the one before it: give the noisiest first")
    _check_options(params.options)
    options = values_for(DrawRequest, params)
    if params.media_type:
        options["media_type"] = output_type_of(params.media_type, "diffusion", "image/png, or be left out")
    return DrawRequest(
        seed=seed,
        images=tuple(media_of(image, "diffusion.images") for image in params.images),
        mask_image=_picture(params, "mask_image"),
        control_image=_picture(params, "control_image"),
        **options,
    )


def _picture(params: stage_pb2.DiffusionParams, name: str) -> Media | None:
    return media_of(getattr(params, name), f"diffusion.{name}") if params.HasField(name) else None


def _check_options(options: Mapping[str, str]) -> None:
    for name, value in options.items():
        if not OPTION_NAME.fullmatch(name):
            raise bad_request("diffusion.options", f"{name[:64]!r} is no name of an option: give letters, digits and _, at most 64")
        if len(value) > MAX_OPTION_CHARACTERS:
            raise bad_request("diffusion.options", f"{name} has {len(value)} characters: give at most {MAX_OPTION_CHARACTERS}")
