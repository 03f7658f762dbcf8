"""Films as the product of a drawing, and the memory that they need.

Frames leave while the VAE still decodes, in a file that can be played while it comes. The memory above the weights is computed before
any of it is used: the tensors that a film keeps from its first step to its last, the memory that a step computes with, and the memory
that the decoder holds for a frame and for its memory of earlier frames."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import finalize

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnistage.models.diffusers.folder import mute_libraries
from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan
from omnistage.models.interface import (
    MAX_CLIP_BYTES,
    BadRequest,
    Clip,
    Content,
    Drawn,
    DrawRequest,
    ElementType,
    Failed,
    PortSpec,
    Preview,
    TensorRows,
    Wanted,
)
from omnistage.models.media.film_file import MAX_RATE_HZ, MIN_RATE_HZ, FilmWriter, Track, film_kind, told_kinds
from omnistage.models.memory import free_bytes
from omnistage.models.options import LoadOptions
from omnistage.models.reports import bytes_told

VIDEO, LATENTS, PIXELS = "video", "latents", "pixels"
MAX_HELD = 16
"""How many messages of a film may wait for more frames."""
Frame = NDArray[np.uint8]
"""[height, width, 3], RGB."""


class FilmPainter(Painter):
    """The loop of films. Latents come from a causal VAE: [1, channels, frames, height, width]."""

    def frames(self, plan: DrawingPlan) -> int:
        """The number of frames of the latents: the first stands for one frame of the film, each other one for several."""
        return 1 + (plan.frames - 1) // int(self.pipe.vae_scale_factor_temporal)

    def grid_places(self, plan: DrawingPlan) -> int:
        """The number of places of one frame of the latents."""
        side = int(self.pipe.vae_scale_factor_spatial)
        return plan.height // side * (plan.width // side)

    def values(self, plan: DrawingPlan) -> int:
        return self.channels * self.frames(plan) * self.grid_places(plan)

    def product(self, model: str) -> Films:
        return Films(self, model)

    def finished(self, canvas: Canvas) -> Tensor:
        """The canvas's latents after the last step, float32."""
        return canvas.latents

    @abstractmethod
    def decoded(self, latents: Tensor) -> Iterator[Tensor]:
        """Yields the decoded frames of latents, as the VAE makes them one after the other: [1, 3, frames, height, width], -1 to 1."""

    def shown(self, latents: Tensor) -> Iterator[Frame]:
        """Yields the frames of a film. Raises Failed for values that are no numbers: the film would be flat, and pass for a film."""
        for part in self.decoded(latents):
            if not torch.isfinite(part).all():
                raise Failed("the VAE makes no number of the film: with these weights it cannot be drawn")
            frames = self.pipe.video_processor.postprocess_video(part, output_type="np")[0]
            yield from (frames * 255).round().astype(np.uint8)


class Films:
    """The product of a film model, a `CanvasProduct`. model: the model's name, for messages."""

    def __init__(self, painter: FilmPainter, model: str) -> None:
        self._painter, self._model = painter, model

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """Rows of latents are places of the VAE's grid, row by row from the top, one frame after the other; rows of pixels are pixels."""
        return (
            PortSpec(VIDEO, Content.VIDEO),
            PortSpec(LATENTS, Content.TENSOR, width=self._painter.channels, element_type=ElementType.FLOAT32),
            PortSpec(PIXELS, Content.TENSOR, width=3, element_type=ElementType.UINT8),
        )

    def check(self, request: DrawRequest) -> None:
        check_film(request, self._model)

    def items(self, plan: DrawingPlan) -> Mapping[str, int]:
        places = self._painter.frames(plan) * self._painter.grid_places(plan)
        return {VIDEO: plan.frames, LATENTS: places, PIXELS: plan.frames * plan.height * plan.width}

    def first(self, plan: DrawingPlan, ports: Wanted) -> int:
        """0 if the film must be drawn; 1 if the client has all wanted items of it. States alone may be wanted: these have to be drawn."""
        are_sent = [ports[port] >= count for port, count in self.items(plan).items() if port in ports]
        return int(bool(are_sent) and all(are_sent))

    def preview(self, canvas: Canvas) -> Sequence[Preview]:
        return []

    def decode(self, plan: DrawingPlan, latents: Sequence[Canvas], ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields the latents of a film, and then its pixels and clips frame by frame, from the wanted items on."""
        for canvas in latents:
            film_latents = self._painter.finished(canvas)
            if LATENTS in ports:
                yield TensorRows(LATENTS, _places(film_latents)[ports[LATENTS] :])
            if VIDEO in ports or PIXELS in ports:
                yield from self._film(plan, film_latents, ports)

    def _film(self, plan: DrawingPlan, latents: Tensor, ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields pixels and clips of a film. Pixels leave before they are encoded. The file is always made from its beginning."""
        clips = Clips(plan, plan.rate_hz, ports[VIDEO]) if VIDEO in ports else None
        size = plan.height * plan.width
        for number, frame in enumerate(self._painter.shown(latents)):
            skipped = max(ports.get(PIXELS, plan.frames * size) - number * size, 0)  # Without the port all pixels are skipped.
            if skipped < size:
                yield TensorRows(PIXELS, frame.reshape(-1, 3)[skipped:])
            if clips is not None:
                yield from clips.with_frame(frame)


class Clips:
    """The file of a film, in messages. rate_hz: frames a second. first: first wanted frame. track: the sound. The wanted part begins with a
    key frame: earlier frames may come from another batch, and one level of one pixel would spoil all frames after it."""

    def __init__(self, plan: DrawingPlan, rate_hz: float, first: int, track: Track | None = None) -> None:
        kind = film_kind(plan.media_type)
        assert kind is not None  # `check_film` has checked it.
        self._kind, self._first, self._frames_to_come = kind, first, plan.frames
        self._place = 0  # The number of frames in the clips so far.
        self._writer = FilmWriter(kind, rate_hz, plan.frames, track)
        self._data, self._frames = bytearray(), 0  # Bytes and number of the frames that wait for the next clip.

    def with_frame(self, frame: Frame) -> Iterator[Clip]:
        """Yields the clips that are complete with the next frame. A large clip waits for more frames, because each message must have a
        frame of its own: a message without a frame would come twice in a resumed session. Raises Failed if waiting cannot help."""
        self._frames_to_come -= 1
        begins_wanted_part = self._first > 0 and self._place >= self._first and not self._data
        if begins_wanted_part:
            self._first = 0
        if piece := self._writer.write(frame, is_key=begins_wanted_part):
            self._data += piece.data
            self._frames += piece.frames
        count = -(-len(self._data) // MAX_CLIP_BYTES)
        if count > self._frames:
            if not self._frames_to_come or count > MAX_HELD:
                raise Failed(f"{self._frames} frames of the film have {len(self._data)} bytes: ask for fewer pixels")
            return
        for number in range(count):
            part = bytes(self._data[number * MAX_CLIP_BYTES : (number + 1) * MAX_CLIP_BYTES])
            clip_frames = self._frames - count + 1 if number == count - 1 else 1  # All but the last clip have one frame each.
            if self._place >= self._first:
                yield Clip(part, self._kind.media_type, clip_frames, self._writer.codecs)
            self._place += clip_frames
        self._data, self._frames = bytearray(), 0


def check_film(request: DrawRequest, model: str) -> None:
    """Raises BadRequest for a rate or a kind of file that is not made here. model: its name, for the text of the error."""
    if request.frames_per_second:
        check_rate(request.frames_per_second, "diffusion.frames_per_second")
    kind = film_kind(request.media_type)
    if kind is None:
        raise BadRequest("diffusion.media_type", f"{model} makes {told_kinds()}: ask for one of these or leave it out")
    if not kind.is_there:
        raise BadRequest("diffusion.media_type", f"FFmpeg has no {kind.encoder} here, so {kind.name} is not made: ask for {told_kinds()}")


def check_rate(rate_hz: float, field: str) -> None:
    """Raises BadRequest for a number of frames a second that no file can have, NaN among them."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise BadRequest(field, f"films have {MIN_RATE_HZ:g} to {MAX_RATE_HZ:g} frames a second, {rate_hz:g} were asked for")


def decode_frames(vae: Any, latents: Tensor) -> Iterator[Tensor]:
    """Decodes each frame of [1, channels, frames, height, width] to [1, 3, frames, height, width], equal to the output of a causal VAE (Wan
    et al. 2025) for all frames together. The past of its convolutions is kept here, so several films can be decoded in turns."""
    if hasattr(getattr(vae, "_hf_hook", None), "pre_forward"):  # Like `decode`: fetch a VAE that is offloaded as a whole.
        vae._hf_hook.pre_forward(vae)
    past: list[Any] = [None] * vae._cached_conv_counts["decoder"]
    rows = vae.post_quant_conv(latents)
    for number in range(rows.shape[2]):
        frame = vae.decoder(rows[:, :, number : number + 1], feat_cache=past, feat_idx=[0], first_chunk=number == 0)
        if vae.config.patch_size is not None:
            frame = unpatchify(frame, patch_size=vae.config.patch_size)
        yield frame.clamp(-1.0, 1.0)


def _places(latents: Tensor) -> NDArray[np.float32]:
    """The latents as rows, one for each place: [frames * height * width, channels]."""
    places: NDArray[np.float32] = latents[0].permute(1, 2, 3, 0).flatten(0, 2).float().cpu().numpy()
    return places


MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""By device: the part of the free memory that one film may take. On a CPU other programs need memory too."""
GRIDS = ((6, 6), (10, 10))
"""Sizes of latents for which decoding is measured: its memory is a constant, and the same number of bytes for each place."""
LATENT_FRAMES = 3
"""The number of frames of latents after which the decoder remembers as much as it ever does."""
COPIES = 4
"""Copies of latents in float32: the latents, the input and the output of the transformer, and a copy for the VAE."""
FRAME_BYTES = 3 * (3 * 4 + 1)
"""Bytes of a pixel while its frame is made: for each colour the VAE's value, the same from 0 to 1, the same times 255, and the byte."""
BLOCK_ROWS, INNER_ROWS = 8, 2
"""How many rows a block has for each token, at most: rows as wide as the transformer, and as its MLP. Some are in float32."""
WORD_TOKENS = 512
"""Tokens of words that a pass has in addition to the tokens of the film."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory for films. film_bytes: for one film while it is drawn. step_bytes: for a pass, with guidance. frame_bytes: for decoding."""

    film_bytes: int
    step_bytes: int
    frame_bytes: int

    @property
    def total_bytes(self) -> int:
        """The largest number of bytes at one time: a film is not decoded while a pass is computed, because one thread does both."""
        return self.film_bytes + max(self.step_bytes, self.frame_bytes)


class FilmMemory:
    """The memory that one painter's films need. budget: bytes that a film may use above the weights."""

    def __init__(self, painter: FilmPainter, budget: int) -> None:
        self._painter, self.budget = painter, budget

    def estimate(self, plan: DrawingPlan) -> MemoryNeed:
        """The bytes that the films of a plan need, computed from the sizes of the models."""
        painter, rows = self._painter, 1 if plan.negative is None else 2
        config = painter.pipe.transformer.config
        width = int(config.num_attention_heads) * int(config.attention_head_dim)
        token = (BLOCK_ROWS * width + INNER_ROWS * int(config.ffn_dim)) * painter.dtype.itemsize
        constant, place = self._decoding
        pixels, vae = plan.width * plan.height, painter.pipe.vae
        # A film from a picture is encoded whole, grey after the picture, and only a whole film can be decoded in tiles.
        is_whole = bool(plan.images) or painter.grid_places(plan) > getattr(vae, "tiled_above", math.inf)
        frames = plan.frames if is_whole else int(painter.pipe.vae_scale_factor_temporal)
        return MemoryNeed(
            film_bytes=painter.values(plan) * 4 * (COPIES + painter.memory.tensors) * plan.results,
            step_bytes=(painter.tokens(plan) + WORD_TOKENS) * rows * token,
            frame_bytes=constant + place * painter.grid_places(plan) + pixels * frames * FRAME_BYTES,
        )

    @cached_property
    def _decoding(self) -> tuple[int, int]:
        """The bytes that decoding needs for any film, and the bytes for each place of the latents; measured at two sizes."""
        sizes = [height * width for height, width in GRIDS]
        with torch.inference_mode():
            first, second = (_measure_decoding(self._painter.pipe.vae, height, width) for height, width in GRIDS)
        place = -(-(second - first) // (sizes[1] - sizes[0]))
        return max(first - place * sizes[0], 0), place

    def check(self, plan: DrawingPlan, limits: DrawingLimits) -> None:
        """Raises BadRequest for a film that needs more memory than the budget; its text says which values fit."""
        if (total_bytes := self.estimate(plan).total_bytes) <= self.budget:
            return
        field, advice = self._advice(plan, limits)
        fault = f"{plan.frames} frames of {plan.width}x{plan.height} take {bytes_told(total_bytes)} of memory above the weights"
        raise BadRequest(f"diffusion.{field}", f"{fault}, and {bytes_told(self.budget)} may be taken (option film_bytes): {advice}")

    def _advice(self, plan: DrawingPlan, limits: DrawingLimits) -> tuple[str, str]:
        """The field to lower, and advice how far: frames, or the size if no film of that size fits."""
        fewest = (plan.frames - 1) % limits.frame_multiple + 1
        able = [count for count in range(fewest, plan.frames, limits.frame_multiple) if self._fits(replace(plan, frames=count))]
        if able:
            return "frames", f"ask for at most {able[-1]} of this size"
        return "width" if plan.width >= plan.height else "height", "ask for fewer pixels"

    def _fits(self, plan: DrawingPlan) -> bool:
        return self.estimate(plan).total_bytes <= self.budget

    def describe(self, plan: DrawingPlan) -> str:
        """The memory that the film of a plan needs, as text."""
        memory = self.estimate(plan)
        film_text, step_text, frame_text = map(bytes_told, (memory.film_bytes, memory.step_bytes, memory.frame_bytes))
        parts = f"{film_text} as long as it is drawn, {step_text} in a step, {frame_text} while it is decoded"
        return f"{bytes_told(memory.total_bytes)} above the weights ({parts}), and {bytes_told(self.budget)} may be taken"


def budget_of(options: LoadOptions, film_bytes: int) -> int:
    """The bytes that a film may use; call it after the weights are loaded. film_bytes: the user's value; 0: a power of two below the free
    memory, so that replicas whose free memory differs a little come to the same value."""
    if film_bytes:
        return film_bytes
    available_bytes = free_bytes(options.device, options.gpu_memory_utilization, options.memory_share)
    return 1 << int(available_bytes * MEMORY_SHARE[options.device.partition(":")[0]]).bit_length() >> 1


def _measure_decoding(vae: Any, height: int, width: int) -> int:
    """The most bytes that tensors take at one time while LATENT_FRAMES latents are decoded. height, width: of these latents. Nothing is
    computed: the tensors are on torch's device `meta`, on which they have sizes only."""
    with torch.device("meta"), mute_libraries():
        empty = type(vae).from_config(vae.config).to(vae.dtype)
        latents = torch.empty(1, vae.config.z_dim, LATENT_FRAMES, height, width, dtype=vae.dtype)
        with TensorBytes() as count:
            for _ in decode_frames(empty, latents):
                pass
    return int(count.peak_bytes)


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # Torch does not say what it is.
    """Counts the bytes of new tensors, as long as they exist. current_bytes: at present. peak_bytes: the largest number at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage_bytes, self.current_bytes, self.peak_bytes = dict[int, int](), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation of torch, and counts the tensors that it makes."""
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        return output

    def _hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor. Views share the memory of another tensor: it exists as long as any of them."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storage_bytes:
            self._storage_bytes[key] = storage.nbytes()
            self.current_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
            finalize(storage, self._let_go, key).atexit = False

    def _let_go(self, key: int) -> None:
        self.current_bytes -= self._storage_bytes.pop(key)
