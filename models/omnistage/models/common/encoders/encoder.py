"""What every family's encoders offer, and what of their sizes the rest has to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from omnistage.models.common.encoders.features import Grid
from omnistage.models.common.encoders.patches import Patching

Need = Callable[[str], torch.Tensor]
"""The weight of a name. Raises BadCheckpoint where there is none."""


class VisionSizes(Patching, Protocol):
    """unit: patches of one output row. patch_bytes: of a patch in a pass, roughly: its values, and what a layer has of it at once, in
    float32."""

    @property
    def unit(self) -> int: ...
    @property
    def patch_bytes(self) -> int: ...


class AudioSizes(Protocol):
    """chunk: frames of a spectrogram that convolutions see together. piece: frames that are encoded at once, whole windows of attention.
    rows_hz: output rows of a second. least_ms: a sound that is as long has a row. frame_bytes: as VisionSizes.patch_bytes."""

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


class MediaSizes(Protocol):
    """Of a Thinker."""

    @property
    def vision(self) -> VisionSizes: ...
    @property
    def audio(self) -> AudioSizes: ...


class VisionEncoder(Protocol):
    @property
    def config(self) -> VisionSizes: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid], on_layer: Callable[[], None] = ...) -> list[torch.Tensor]:
        """The rows of pictures and films, [grid.patches / unit, width] each.

        patches: [patches of all grids, patch_values], those of a merged row next to each other. on_layer: called before each layer; what
        it raises ends the work."""


class AudioEncoder(Protocol):
    @property
    def config(self) -> AudioSizes: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, frames: int) -> int:
        """Rows that come of so many frames of a spectrogram."""

    def pieces(self, spectrogram: torch.Tensor) -> Sequence[torch.Tensor]:
        """Parts of the spectrogram of one sound that do not see each other: `encode` makes of each what it makes of it in the whole."""

    def encode(self, spectrograms: Sequence[torch.Tensor], on_layer: Callable[[], None] = ...) -> list[torch.Tensor]:
        """The rows of sounds, or of pieces of some, [rows(frames), width] each. spectrograms: [frames, mel_bins] each. on_layer: as for
        pictures."""
