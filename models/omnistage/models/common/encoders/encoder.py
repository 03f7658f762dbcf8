"""The interface of the encoders of all families, and the sizes of encoders that other modules need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from omnistage.models.common.encoders.features import Grid
from omnistage.models.common.encoders.patches import Patching

Need = Callable[[str], torch.Tensor]
"""Returns the weight of a name. Raises BadCheckpoint if it is missing."""


class VisionSizes(Patching, Protocol):
    """Sizes of an encoder of pictures. unit: patches of one output row. patch_bytes: approximate memory of a patch in a pass, in bytes: its
    values and everything that a layer computes from it at once, in float32."""

    @property
    def unit(self) -> int: ...
    @property
    def patch_bytes(self) -> int: ...


class AudioSizes(Protocol):
    """Sizes of a sound encoder. chunk: frames of a spectrogram that convolutions see together. piece: frames of a part that is encoded by
    itself: whole windows of attention. rows_hz: output rows for a second of sound. least_ms: milliseconds of the shortest sound that has a
    row. frame_bytes: as VisionSizes.patch_bytes, for a frame. adds_silence: as in Spectrograms."""

    @property
    def mel_bins(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def piece(self) -> int: ...
    @property
    def rows_hz(self) -> float: ...
    @property
    def least_ms(self) -> int: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def adds_silence(self) -> bool: ...


class MediaSizes(Protocol):
    """The sizes of a Thinker's encoders."""

    @property
    def vision(self) -> VisionSizes: ...
    @property
    def audio(self) -> AudioSizes: ...


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
