"""From a conversation to the rows of a prompt: token ids, and positions on three axes.

The checkpoint's own chat template writes the conversation; what users wrote stands in it as text, whatever it looks like. Where the
template puts a medium, its rows come. A row has a time, a height and a width: those of text are equal and count on; those of a picture
count rows and columns; those of a film and its sound count time, 25 a second, so that what was seen and heard together is at the same time
(TMRoPE, Xu et al. 2025, and `get_rope_index` of Transformers' `Qwen2_5OmniThinker`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import render_jinja_template

from omnistage.models.common.encoders.features import Extent
from omnistage.models.conversation import Turn
from omnistage.models.interface import BadRequest
from omnistage.models.qwen2_5_omni.config import MediaIds, ThinkerConfig

_MARK = re.compile("\ue000([0-9]+)\ue001")
"""Stands for a text of the conversation while the template is written; both characters are of Unicode's private use."""


class ChatTemplate:
    """The template of a checkpoint.

    special: ids of the special tokens by their text. encode: text without special tokens to ids. media: ids of the tokens that stand for
    media, by medium.
    """

    def __init__(self, template: str, special: Mapping[str, int], encode: Callable[[str], Sequence[int]], ids: MediaIds) -> None:
        self._template, self._special, self._encode = template, special, encode
        self._media = {ids.image: "image", ids.audio: "audio", ids.video: "video"}
        self._split = re.compile("|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or "(?!)")

    def token_ids(self, turns: Sequence[Turn], media: Sequence[str]) -> list[int]:
        """Token ids of a conversation, open for the assistant's answer, with one id for each medium. media: image, audio or video, for
        each part that is no text, in order. Raises BadRequest for a conversation that the template refuses."""
        texts, kinds = list[str](), iter(media)
        conversation = [{"role": turn.role, "content": _content(turn, texts, kinds)} for turn in turns]
        try:
            made = render_jinja_template([conversation], chat_template=self._template, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise BadRequest("thinker.messages", f"the checkpoint's chat template refuses this conversation: {error}") from None
        ids = list(self._ids(made[0][0], texts))
        placed = [self._media[token_id] for token_id in ids if token_id in self._media]
        if placed != list(media):
            raise BadRequest("thinker.messages", f"the checkpoint's chat template has no place for all of: {', '.join(media)}")
        return ids

    def _ids(self, rendered: str, texts: Sequence[str]) -> Iterator[int]:
        """Special tokens of the template are tokens, those in texts of the conversation are text."""
        plain = ""
        for index, part in enumerate(_MARK.split(rendered)):
            if index % 2:
                plain += texts[int(part)]
                continue
            end = 0
            for found in self._split.finditer(part):
                yield from self._encode(plain + part[end : found.start()])
                yield self._special[found.group()]
                plain, end = "", found.end()
            plain += part[end:]
        yield from self._encode(plain)


def _content(turn: Turn, texts: list[str], kinds: Iterator[str]) -> str | list[dict[str, str]]:
    """The parts of a turn as templates know them, with marks in the place of text."""
    content = []
    for part in turn.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": f"\ue000{len(texts)}\ue001"})
            texts.append(part)
        else:
            kind = next(kinds)
            content.append({"type": kind, kind: ""})
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


# Media in the prompt -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows of a medium in a prompt. first: the first of them. order: which of its rows (those of pictures before those of sound) stands
    where, int64 [rows]; None: they stand as they are."""

    first: int
    order: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt. ids: int64 [rows]. positions: int64 [3, rows]. delta: position minus slot of the rows behind it. media: in order."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    media: tuple[Placed, ...]

    def __len__(self) -> int:
        return len(self.ids)


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
