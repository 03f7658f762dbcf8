"""The memory that a film needs above the weights, computed before any of it is used: the tensors that a film keeps from its first step to
its last, the memory that a step computes with, and the memory that the decoder holds for a frame and for its memory of earlier frames."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnistage.models.diffusers.films import FilmPainter, decode_frames
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan
from omnistage.models.diffusers.quiet import quiet
from omnistage.models.interface import BadRequest
from omnistage.models.memory import free_bytes
from omnistage.models.options import LoadOptions
from omnistage.models.reports import bytes_told

SHARE = {"cpu": 0.5, "cuda": 0.9}
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
WORDS = 512
"""Tokens of words that a pass has in addition to the tokens of the film."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes that films need. kept: for one film as long as it is drawn. step: for a pass, with guidance. frame: for decoding."""

    kept: int
    step: int
    frame: int

    @property
    def total(self) -> int:
        """The largest number of bytes at one time: a film is not decoded while a pass is computed, because one thread does both."""
        return self.kept + max(self.step, self.frame)


class FilmMemory:
    """The memory that one painter's films need. budget: bytes that a film may use above the weights."""

    def __init__(self, painter: FilmPainter, budget: int) -> None:
        self._painter, self.budget = painter, budget

    def taken(self, plan: DrawingPlan) -> Taken:
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
        return Taken(
            kept=painter.values(plan) * 4 * (COPIES + painter.memory.tensors) * plan.results,
            step=(painter.tokens(plan) + WORDS) * rows * token,
            frame=constant + place * painter.grid_places(plan) + pixels * frames * FRAME_BYTES,
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
        if (total_bytes := self.taken(plan).total) <= self.budget:
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
        return self.taken(plan).total <= self.budget

    def told(self, plan: DrawingPlan) -> str:
        """The memory that the film of a plan needs, as text."""
        memory = self.taken(plan)
        film_text, step_text, frame_text = map(bytes_told, (memory.kept, memory.step, memory.frame))
        parts = f"{film_text} as long as it is drawn, {step_text} in a step, {frame_text} while it is decoded"
        return f"{bytes_told(memory.total)} above the weights ({parts}), and {bytes_told(self.budget)} may be taken"


def budget_of(options: LoadOptions, film_bytes: int) -> int:
    """The bytes that a film may use; call it after the weights are loaded. film_bytes: the user's value; 0: a power of two below the free
    memory, so that replicas whose free memory differs a little come to the same value."""
    if film_bytes:
        return film_bytes
    free = free_bytes(options.device, options.gpu_memory_utilization, options.memory_share)
    return 1 << int(free * SHARE[options.device.partition(":")[0]]).bit_length() >> 1


def _measure_decoding(vae: Any, height: int, width: int) -> int:
    """The most bytes that tensors take at one time while LATENT_FRAMES latents are decoded. height, width: of these latents. Nothing is
    computed: the tensors are on torch's device `meta`, on which they have sizes only."""
    with torch.device("meta"), quiet():
        empty = type(vae).from_config(vae.config).to(vae.dtype)
        latents = torch.empty(1, vae.config.z_dim, LATENT_FRAMES, height, width, dtype=vae.dtype)
        with TensorBytes() as count:
            for _ in decode_frames(empty, latents):
                pass
    return int(count.most)


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # Torch does not say what it is.
    """Counts the bytes of new tensors, as long as they exist. now: bytes at present. most: the largest number at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self.now, self.most = dict[int, int](), 0, 0

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
        if key not in self._held:
            self._held[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            finalize(storage, self._let_go, key).atexit = False

    def _let_go(self, key: int) -> None:
        self.now -= self._held.pop(key)
