"""From the token ids of a conversation to the rows of its prompt, and their positions on three axes.

A row has a time, a height and a width: those of text are equal and count on; those of a picture count rows and columns; those of a film and
its sound count time, 25 a second, so that what was seen and heard together is at the same time (TMRoPE, Xu et al. 2025, and
`get_rope_index` of Transformers' `Qwen2_5OmniThinker`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from omnistage.models.common.encoders.features import Extent, Layout, Placed
from omnistage.models.qwen2_5_omni.config import ThinkerConfig


def laid_out(ids: Sequence[int], extents: Sequence[Extent], config: ThinkerConfig) -> Layout:
    """The prompt of token ids, in which each id of a medium stands for all of its rows. extents: of the media, in order."""
    written = np.array(ids, np.int64)
    indices = np.flatnonzero(np.isin(written, (config.ids.image, config.ids.video, config.ids.audio)))
    rows, start = _Rows(config), 0
    for index, extent in zip(indices.tolist(), extents, strict=True):
        rows.text(written[start:index])
        rows.medium(extent)
        start = index + 1
    rows.text(written[start:])
    return rows.layout()


class _Rows:
    def __init__(self, config: ThinkerConfig) -> None:
        self._config = config
        self._ids: list[NDArray[np.int64]] = []
        self._positions: list[NDArray[np.int64]] = []
        self._media: list[Placed] = []
        self._next = 0
        self._most = 0
        self._count = 0

    def text(self, token_ids: NDArray[np.int64]) -> None:
        if len(token_ids):
            self._add(token_ids, self._counted(len(token_ids)))

    def medium(self, extent: Extent) -> None:
        if extent.grid is None:
            self._run(*self._sound(extent.sound))
        elif not extent.sound:
            self._run(*self._seen(extent))
        else:
            self._film_with_sound(extent)

    def layout(self) -> Layout:
        ids, positions = np.concatenate(self._ids), np.concatenate(self._positions, 1)
        return Layout(ids, positions, self._most + 1 - self._count, tuple(self._media))

    def _sound(self, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.full(rows, self._config.ids.audio), self._counted(rows)

    def _counted(self, rows: int) -> NDArray[np.int64]:
        """Positions that count on, the same on all axes."""
        return np.broadcast_to(np.arange(rows) + self._next, (3, rows))

    def _seen(self, extent: Extent) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        grid, config = extent.grid, self._config
        assert grid is not None
        merge = config.vision.merge
        # float32, as in Transformers: another rounding would be another position.
        times = (np.arange(grid.frames, dtype=np.float32) * np.float32(extent.seconds) * config.position_ids_per_second).astype(np.int64)
        axes = np.meshgrid(times, np.arange(grid.height // merge), np.arange(grid.width // merge), indexing="ij")
        positions = np.stack([axis.reshape(-1) for axis in axes]) + self._next
        token_id = config.ids.video if extent.seconds else config.ids.image
        return np.full(positions.shape[1], token_id), positions

    def _film_with_sound(self, extent: Extent) -> None:
        """What is seen and heard in the same two seconds stands together, what is seen first. The marks around the sound have the
        positions of those around the film."""
        config = self._config
        self._add(np.array([config.ids.audio_start]), np.full((3, 1), self._next - 1))
        seen, heard = self._seen(extent), self._sound(extent.sound)
        step = int(config.position_ids_per_second * config.seconds_per_chunk)
        pieces = list[NDArray[np.int64]]()
        parts = [_chunks(positions[0] - self._next, step) for _, positions in (seen, heard)]
        for index in range(max(map(len, parts))):
            for offset, chunks in zip((0, len(seen[0])), parts, strict=True):
                if index < len(chunks):
                    pieces.append(np.arange(*chunks[index]) + offset)
        order = np.concatenate(pieces)
        positions = np.concatenate((seen[1], heard[1]), 1)
        self._run(np.concatenate((seen[0], heard[0]))[order], positions[:, order], order)
        # What follows counts on from the last piece, even where the other one lasts longer: so the model was trained.
        self._next = int(positions[:, pieces[-1]].max()) + 1
        self._add(np.array([config.ids.audio_end]), np.full((3, 1), self._next))
        self._next -= 1

    def _run(self, ids: NDArray[np.int64], positions: NDArray[np.int64], order: NDArray[np.int64] | None = None) -> None:
        self._media.append(Placed(self._count, order))
        self._add(ids, positions)

    def _add(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._ids.append(ids)
        self._positions.append(positions)
        self._count += len(ids)
        self._next = int(positions.max()) + 1
        self._most = max(self._most, self._next - 1)


def _chunks(times: NDArray[np.int64], step: int) -> list[tuple[int, int]]:
    """First index and the one behind the last of each chunk: the n-th ends before the first time that is not below n steps."""
    chunks, start = list[tuple[int, int]](), 0
    for index in range(len(times)):
        if times[index] >= (len(chunks) + 1) * step:
            chunks.append((start, index))
            start = index
    chunks.append((start, len(times)))
    return chunks
