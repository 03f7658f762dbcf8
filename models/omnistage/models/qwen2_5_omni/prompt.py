"""Lays out the prompt of Qwen2.5-Omni, as `get_rope_index` of Transformers' `Qwen2_5OmniThinker` does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from omnistage.models.encoders.encoder import MediumExtent, PromptLayout
from omnistage.models.encoders.prompt import PromptRows
from omnistage.models.qwen2_5_omni.config import ThinkerConfig


def lay_out(ids: Sequence[int], extents: Sequence[MediumExtent], config: ThinkerConfig) -> PromptLayout:
    """See PromptRows.lay_out."""
    return _Rows(config).lay_out(ids, extents)


class _Rows(PromptRows):
    """The rows of one prompt of Qwen2.5-Omni."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__(config)
        self._config = config

    def film_with_sound(self, extent: MediumExtent) -> None:
        """Add the rows of a film and its sound. The rows of each `seconds_per_chunk` seconds stand together, rows of pictures first. The
        marks around the sound have the positions of the marks around the film."""
        config, begin = self._config, self.next
        self.add(np.array([config.ids.audio_start]), np.full((3, 1), begin - 1))
        picture_rows, sound_rows = self.seen(extent), self.heard(extent.sound)
        step = int(config.position_ids_per_second * config.seconds_per_chunk)
        pieces = list[NDArray[np.int64]]()
        parts = [_chunks(positions[0] - begin, step) for _, positions in (picture_rows, sound_rows)]
        for index in range(max(map(len, parts))):
            for offset, chunks in zip((0, len(picture_rows[0])), parts, strict=True):
                if index < len(chunks):
                    pieces.append(np.arange(*chunks[index]) + offset)
        order = np.concatenate(pieces)
        positions = np.concatenate((picture_rows[1], sound_rows[1]), 1)
        self.run(np.concatenate((picture_rows[0], sound_rows[0]))[order], positions[:, order], order)
        # Later positions follow the positions of the last piece, even if the other medium has larger ones, because the model was trained
        # so.
        self.next = int(positions[:, pieces[-1]].max()) + 1
        self.add(np.array([config.ids.audio_end]), np.full((3, 1), self.next))
        self.next -= 1


def _chunks(times: NDArray[np.int64], step: int) -> list[tuple[int, int]]:
    """Cut rows into chunks by their times. times: of each row, [rows]. Returns for each chunk the index of its first row, and the index
    after its last row. The n-th chunk ends before the first row with a time of n * step or later."""
    chunks, start = list[tuple[int, int]](), 0
    for index in range(len(times)):
        if times[index] >= (len(chunks) + 1) * step:
            chunks.append((start, index))
            start = index
    chunks.append((start, len(times)))
    return chunks
