"""The config of a Thinker with encoders, and the rows of its prompt, made of the token ids of a conversation, with their positions on three
axes.

A row has a time, a height and a width. In text all three are equal and grow by one from row to row. In a picture, height and width count
its rows and columns. In a film and its sound, the time grows by a fixed number in a second, so that picture and sound of one moment have
the same time (TMRoPE, Xu et al. 2025).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.parts import DecoderConfig, ExpertSizes
from omnistage.models.checkpoint.decoder import RopeConfig, rope_of, rope_theta_of
from omnistage.models.checkpoint.files import BadCheckpoint, Config
from omnistage.models.encoders.encoder import AudioSizes, MediumExtent, Placed, PromptLayout, VisionSizes
from omnistage.models.speech.talker import AXES

RENAMED = {
    "thinker.model.language_model.": "thinker.model.",
    "thinker.model.visual.": "thinker.visual.",
    "thinker.model.audio_tower.": "thinker.audio_tower.",
}
"""Beginning of a weight's name in Transformers 5 -> its beginning in the published checkpoints."""

MAX_SOUND_POSITIONS = 1 << 16
"""Largest number of positions of a sound encoder, because each has a row in memory."""

FRAMES_HZ = 100.0
"""Frames of a sound's spectrogram in a second."""


def vision_sizes(config: Config) -> dict[str, Any]:
    """The values of VisionSizes, from a vision_config. Raises BadCheckpoint."""
    return {
        "layers": config.size("depth"),
        "hidden_size": config.size("hidden_size"),
        "ffn_size": config.size("intermediate_size"),
        "heads": config.size("num_heads"),
        "patch_size": config.size("patch_size"),
        "frames": config.size("temporal_patch_size"),
        "merge": config.size("spatial_merge_size"),
        "output_size": config.size("out_hidden_size"),
        "channels": next((config.size(name) for name in ("in_channels", "in_chans") if config.has(name)), 3),
        "rope_theta": rope_theta_of(config, "axial"),
    }


def audio_sizes(config: Config) -> dict[str, int]:
    """The values of AudioSizes that are equally named in all families, from an audio_config. Raises BadCheckpoint."""
    return {
        "layers": config.size("encoder_layers"),
        "hidden_size": config.size("d_model"),
        "ffn_size": config.size("encoder_ffn_dim"),
        "heads": config.size("encoder_attention_heads"),
        "mel_bins": config.size("num_mel_bins"),
        "positions": config.size("max_source_positions", MAX_SOUND_POSITIONS),
        "output_size": config.size("output_dim"),
    }


Run = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids [rows] and positions [3, rows] of consecutive rows."""


@dataclass(frozen=True, slots=True)
class MediaIds:
    """The token ids that stand for a row of a picture, a film and a sound, and the ids before and after a sound."""

    image: int
    video: int
    audio: int
    audio_start: int
    audio_end: int

    @property
    def kinds(self) -> dict[int, str]:
        """The kind of medium that each id stands for."""
        return {self.image: "image", self.audio: "audio", self.video: "video"}

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> Self:
        """Read the ids from a thinker_config: a medium's own id as `image_token_id` or as `image_token_index`, and so on. Raises
        BadCheckpoint, also for equal ids, and for ids outside the vocabulary."""
        names = {each.name: (f"{each.name}_token_index", f"{each.name}_token_id") for each in fields(cls)}
        read = cls(**{name: config.value(index if config.has(index) else token_id, int) for name, (index, token_id) in names.items()})
        ids = astuple(read)
        if len({*ids}) < len(ids) or min(ids) < 0 or max(ids) >= vocab_size:
            ids_text = ", ".join(f"{token_id} for {name}" for name, token_id in asdict(read).items())
            raise BadCheckpoint(f"{config.place}: the token ids of media must differ, and be 0 to {vocab_size - 1}: they are {ids_text}")
        return read


@dataclass(frozen=True, slots=True)
class ThinkerSizes:
    """The config of a Thinker with encoders. text: the language model. experts: of its layers; None: these have no experts. rope: of its
    positions. ids: token ids of media. position_ids_per_second: number of positions that a second of sound or film takes. biased: see
    `decoder_weights`. tied: whether the logits use the embedding if there is no head. A family adds the values that only its Thinker has,
    and gives `vision` and `audio` the types of its encoders."""

    text: DecoderConfig
    experts: ExpertSizes | None
    rope: RopeConfig
    vision: VisionSizes
    audio: AudioSizes
    ids: MediaIds
    position_ids_per_second: int
    biased: tuple[str, ...]
    tied: bool


def thinker_sizes(config: Config, text: DecoderConfig, default_sections: tuple[int, ...] = ()) -> dict[str, Any]:
    """The values of ThinkerSizes that are equally named in all families, from a thinker_config. text: its sizes. default_sections: see
    `rope_of`. Raises BadCheckpoint."""
    return {
        "text": text,
        "rope": rope_of(config.section("text_config"), axes=AXES, default_sections=default_sections),
        "ids": MediaIds.of(config, text.vocab_size),
        "position_ids_per_second": config.size("position_id_per_seconds") if config.has("position_id_per_seconds") else 25,
        "tied": config.value("tie_word_embeddings", bool, False),
    }


class PromptRows(ABC):
    """Collects the rows of one prompt; it is made for each prompt. A family decides how the rows of a film and its sound are mixed."""

    def __init__(self, config: ThinkerSizes) -> None:
        self._config = config
        self._ids: list[NDArray[np.int64]] = []
        self._positions: list[NDArray[np.int64]] = []
        self._media: list[Placed] = []
        self.next = 0
        """The position of the next row of text."""
        self._max_position = 0
        """The largest position so far."""
        self._count = 0
        """Number of rows so far."""

    def lay_out(self, ids: Sequence[int], extents: Sequence[MediumExtent]) -> PromptLayout:
        """The rows of a prompt. ids: token ids, in which one id stands for all rows of a medium. extents: sizes of the media, in order."""
        token_ids = np.array(ids, np.int64)
        indices = np.flatnonzero(np.isin(token_ids, [*self._config.ids.kinds]))
        start = 0
        for index, extent in zip(indices.tolist(), extents, strict=True):
            self._text(token_ids[start:index])
            self._medium(extent)
            start = index + 1
        self._text(token_ids[start:])
        delta = self._max_position + 1 - self._count
        return PromptLayout(np.concatenate(self._ids), np.concatenate(self._positions, 1), delta, tuple(self._media))

    def _text(self, token_ids: NDArray[np.int64]) -> None:
        if len(token_ids):
            self.add(token_ids, self._count_positions(len(token_ids)))

    def _medium(self, extent: MediumExtent) -> None:
        """Add the rows of one medium."""
        if extent.grid is None:
            self.run(*self.make_sound_run(extent.sound))
        elif not extent.sound:
            self.run(*self.make_picture_run(extent))
        else:
            self.film_with_sound(extent)

    @abstractmethod
    def film_with_sound(self, extent: MediumExtent) -> None:
        """Add the rows of a film and its sound, mixed by time, with the marks around the sound."""

    def make_sound_run(self, rows: int) -> Run:
        """The ids and positions of the rows of a sound. rows: their number."""
        return np.full(rows, self._config.ids.audio), self._count_positions(rows)

    def _count_positions(self, rows: int) -> NDArray[np.int64]:
        """The next positions of `rows` rows, equal on all axes and growing by one, [3, rows]."""
        return np.broadcast_to(np.arange(rows) + self.next, (3, rows))

    def make_picture_run(self, extent: MediumExtent) -> Run:
        """The ids and positions of the rows of a picture, or of a film without its sound."""
        grid, config = extent.grid, self._config
        assert grid is not None
        merge = config.vision.merge
        # In float32, as in Transformers: other rounding would give other positions.
        times = (np.arange(grid.frames, dtype=np.float32) * np.float32(extent.seconds) * config.position_ids_per_second).astype(np.int64)
        axes = np.meshgrid(times, np.arange(grid.height // merge), np.arange(grid.width // merge), indexing="ij")
        positions = np.stack([axis.reshape(-1) for axis in axes]) + self.next
        token_id = config.ids.video if extent.seconds else config.ids.image
        return np.full(positions.shape[1], token_id), positions

    def run(self, ids: NDArray[np.int64], positions: NDArray[np.int64], order: NDArray[np.int64] | None = None) -> None:
        """Add the rows of a medium, and record where they stand. order: see Placed."""
        self._media.append(Placed(self._count, order))
        self.add(ids, positions)

    def add(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Add rows. ids: [rows]. positions: [3, rows]."""
        self._ids.append(ids)
        self._positions.append(positions)
        self._count += len(ids)
        self.next = int(positions.max()) + 1
        self._max_position = max(self._max_position, self.next - 1)
