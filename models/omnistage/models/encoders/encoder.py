"""The encoders of media: the form in which a Thinker gets media and where they stand in a prompt, the patches that a picture encoder takes,
and the interface of the encoders of all families. Then come parts of which families make their nets: rotary positions of patches on two
axes, attention in which rows see only their own segment (windows and frames of a picture, chunks of sound), and the layers and the table of
positions of Whisper (Radford et al. 2022)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from omnistage.engine.linear import Linear, LinearMaker

Pixels = NDArray[np.uint8]
"""Frames as uint8 [frames, height, width, 3]; height and width are multiples of the pixels on a merged row's side."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of patches of a picture or film: frames: in time (a patch of a film has two frames), height, width."""

    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True, slots=True)
class MediumExtent:
    """The size of a medium, on which its rows in a prompt depend. grid: the patches of a picture or film, before they are merged to rows;
    None: sound. seconds: duration of the frames of one patch; 0: a picture. sound: number of rows of sound, also of a film's sound."""

    grid: Grid | None = None
    seconds: float = 0.0
    sound: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A medium as rows for a Thinker. rows: [rows, width], rows of pictures before rows of sound. digest: hash of everything from which the
    rows were made."""

    extent: MediumExtent
    rows: torch.Tensor
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a medium's rows in a prompt. first: slot of the first row. order: for each slot from there on, which row of the medium
    stands there, int64 [rows] (rows of pictures are counted before rows of sound); None: in their order."""

    first: int
    order: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """The rows of a prompt. ids: int64 [rows]. positions: int64 [axes, rows]. delta: a row after the prompt has the position slot + delta.
    media: places of the media, in order."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    media: tuple[Placed, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class VisionSizes(ABC):
    """The sizes of an encoder of pictures and films, from its config. patch_size: pixels on a side of a patch. frames: frames of a patch.
    merge: merge * merge patches become an output row. output_size: width of an output row. channels: number of colours of a picture.
    rope_theta: theta of the rotary positions of patches. film_square: side in pixels of the squares in which the published processor counts
    the bounds of a film's frames, whatever the patches are. A family adds the values that only its encoder has."""

    film_square: ClassVar[int]

    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    patch_size: int
    frames: int
    merge: int
    output_size: int
    channels: int
    rope_theta: float

    @property
    def patch_values(self) -> int:
        """Number of values of one patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def unit(self) -> int:
        """Number of patches that become one output row."""
        return self.merge**2

    @property
    @abstractmethod
    def patch_bytes(self) -> int:
        """Approximate memory of a patch in a pass, in bytes: its values and everything that a layer computes from it at once, in
        float32."""


@dataclass(frozen=True, slots=True)
class AudioSizes(ABC):
    """The sizes of a sound encoder, from its config. mel_bins: number of values of one frame of the spectrogram. positions: number of rows
    of the table of positions. output_size: width of an output row. chunk: frames of a spectrogram that convolutions see together. piece:
    frames of a part that is encoded by itself: whole windows of attention. rows_hz: output rows for a second of sound. least_ms:
    milliseconds of the shortest sound that has a row. adds_silence: as in Spectrograms. A family adds the values that only its encoder
    has."""

    least_ms: ClassVar[int]
    adds_silence: ClassVar[bool]

    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    mel_bins: int
    positions: int
    output_size: int
    chunk: int
    piece: int
    rows_hz: float

    @property
    @abstractmethod
    def frame_bytes(self) -> int:
        """As VisionSizes.patch_bytes, for a frame of the spectrogram."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """Mean and standard deviation of red, green and blue, by which colours from 0 to 1 are normalized."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def grid_of(pixels: Pixels, config: VisionSizes) -> Grid:
    """The grid of patches of some frames."""
    frames, height, width, _ = pixels.shape
    return Grid(-(-frames // config.frames), height // config.patch_size, width // config.patch_size)


def patches_of(pixels: Pixels, config: VisionSizes, colours: Normalization) -> torch.Tensor:
    """The patches of frames, float32 [patches of the grid, patch_values]; the patches of an output row are next to each other. The values
    of a patch are in the order colour, frame, row, column, as Transformers' `Qwen2VLImageProcessor` makes them. Copies of the last frame
    fill the last patch."""
    scale = torch.tensor([255.0 * std for std in colours.std])
    shift = torch.tensor([mean / std for mean, std in zip(colours.mean, colours.std, strict=True)])
    frames = torch.from_numpy(pixels)
    if missing := -len(frames) % config.frames:
        frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
    grid = grid_of(pixels, config)
    merge, size = config.merge, config.patch_size
    shape = (grid.frames, config.frames, grid.height // merge, merge, size, grid.width // merge, merge, size, config.channels)
    # Axes of the result: time, row and column of an output row, row and column of a patch in it, then colour, frame, row and column.
    ordered = frames.view(shape).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    values = ordered.reshape(grid.patches, config.channels, -1).float()
    return values.div_(scale[:, None]).sub_(shift[:, None]).view(grid.patches, config.patch_values)


Need = Callable[[str], torch.Tensor]
"""Returns the weight of a name. Raises BadCheckpoint if it is missing."""


class VisionEncoder(Protocol):
    """Makes rows of pictures and films."""

    @property
    def config(self) -> VisionSizes: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid], on_layer: Callable[[], None] = ...) -> list[torch.Tensor]:
        """The rows of pictures and films, [grid.patches / unit, width] for each grid.

        patches: of all grids, [patches, patch_values]; the patches of an output row are next to each other. on_layer: called before each
        layer; an error of this call ends the work."""


class AudioEncoder(Protocol):
    """Makes rows of sounds."""

    @property
    def config(self) -> AudioSizes: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, frames: int) -> int:
        """Number of rows that this many frames of a spectrogram become."""

    def pieces(self, spectrogram: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut the spectrogram of one sound into parts that do not see each other: `encode` makes the same rows from each part alone as from
        the whole."""

    def encode(self, spectrograms: Sequence[torch.Tensor], on_layer: Callable[[], None] = ...) -> list[torch.Tensor]:
        """The rows of sounds, or of pieces of sounds, [rows(frames), width] for each. spectrograms: [frames, mel_bins] each. on_layer: as
        for pictures."""


def places_of(grids: Sequence[Grid], merge: int, device: torch.device) -> torch.Tensor:
    """Row and column of each patch, int64 [patches, 2]; the patches of an output row are next to each other. merge: patches on the side of
    the square that becomes an output row."""
    return torch.cat([_places(grid, merge, device) for grid in grids])


def _places(grid: Grid, merge: int, device: torch.device) -> torch.Tensor:
    """See `places_of`, for one grid."""
    places = torch.cartesian_prod(torch.arange(grid.height, device=device), torch.arange(grid.width, device=device))
    blocks = places.view(grid.height // merge, merge, grid.width // merge, merge, 2).transpose(1, 2)
    return blocks.reshape(-1, 2).repeat(grid.frames, 1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the angles by which the heads of each patch turn, float32 [patches, 1, head size] each."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, places: torch.Tensor, head_size: int, theta: float) -> Self:
        """places: row and column of each patch, [patches, 2]. theta: base of the frequencies. Half of a head's pairs turn by the row, half
        by the column."""
        half = head_size // 2
        frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half)
        angles = (places[..., None].float() * frequencies).flatten(1)
        angles = torch.cat((angles, angles), -1)[:, None]
        return cls(angles.cos(), angles.sin())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The heads, turned by their angles. x: [patches, heads, head size]."""
        float_x = x.float()
        first_half, second_half = float_x.chunk(2, -1)
        return (float_x * self.cos + torch.cat((-second_half, first_half), -1) * self.sin).to(x.dtype)


MAX_ROWS = 1 << 14
"""Largest number of rows of equally long segments in one call of attention, to bound its memory."""


class Segments:
    """Consecutive segments of rows. lengths: number of rows of each segment, in order."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._indices_by_length: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            self._indices_by_length.setdefault(length, []).append(index)

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Each row's attention to the rows of its segment, [rows, heads * head size]. query, key, value: [rows, heads, head size]."""
        parts = [torch.split(tensor, self.lengths) for tensor in (query, key, value)]
        out = torch.empty(len(query), query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        outs = torch.split(out, self.lengths)
        for length, indices in self._indices_by_length.items():
            call_size = max(MAX_ROWS // length, 1)
            for first in range(0, len(indices), call_size):
                call_indices = indices[first : first + call_size]
                queries, keys, values = (torch.stack([part[index] for index in call_indices]).transpose(1, 2) for part in parts)
                attended = functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)
                for index, rows in zip(call_indices, attended, strict=True):
                    outs[index].copy_(rows.reshape(length, -1))
        return out


LONGEST_WAVE = 10000.0
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm with weight and bias, both [width]; called with rows [rows, width]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float = NORM_EPS

    @classmethod
    def of(cls, weight: Need, name: str, eps: float = NORM_EPS) -> Self:
        return cls(weight(f"{name}.weight").clone(), weight(f"{name}.bias").clone(), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class WhisperLayer:
    """One layer of an encoder. weight: returns a weight by its name in Transformers. name: beginning of the names of its weights. heads:
    number of attention heads. has_key_bias: whether the product of keys has a bias."""

    def __init__(self, weight: Need, name: str, heads: int, linear: LinearMaker, *, has_key_bias: bool) -> None:
        attention = f"{name}.self_attn"
        queries, values = weight(f"{attention}.q_proj.bias"), weight(f"{attention}.v_proj.bias")
        keys = weight(f"{attention}.k_proj.bias") if has_key_bias else torch.zeros_like(queries)
        self._heads = heads
        self._attention_norm = LayerNorm.of(weight, f"{name}.self_attn_layer_norm")
        matrix = torch.cat([weight(f"{attention}.{part}_proj.weight") for part in "qkv"])
        self._query_key_value = linear(matrix, torch.cat((queries, keys, values)))
        self._output = product_of(weight, f"{attention}.out_proj", linear)
        self._ffn_norm = LayerNorm.of(weight, f"{name}.final_layer_norm")
        self._up, self._down = (product_of(weight, f"{name}.{part}", linear) for part in ("fc1", "fc2"))

    def __call__(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Apply the layer. x: [rows, width]; the result too. segments: which rows see each other."""
        query, key, value = self._query_key_value(self._attention_norm(x)).view(len(x), 3, self._heads, -1).unbind(1)
        x = x + self._output(segments.attention(query, key, value))
        return x + self._down(functional.gelu(self._up(self._ffn_norm(x))))


def product_of(weight: Need, name: str, linear: LinearMaker) -> Linear:
    """The product with the weight and bias of a name."""
    return linear(weight(f"{name}.weight"), weight(f"{name}.bias"))


def sinusoids(length: int, width: int) -> torch.Tensor:
    """The table of positions as in Vaswani et al. 2017, sines first, then cosines, float32 [length, width]."""
    half = width // 2
    scales = torch.exp(-math.log(LONGEST_WAVE) / (half - 1) * torch.arange(half, dtype=torch.float32))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * scales
    return torch.cat((angles.sin(), angles.cos()), 1)
