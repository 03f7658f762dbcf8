"""Lays out the prompt of Qwen3-Omni, as `get_rope_index` of Transformers' `Qwen3OmniMoeThinker` does, and the part of the prompt that goes
to the Talker.

Transformers counts the time of a film in fractions; here the fraction is cut off. At two frames a second, and so for all but slow and long
films, there is no fraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnistage.models.encoders.encoder import MediumExtent, PromptLayout
from omnistage.models.encoders.prompt import PromptRows
from omnistage.models.qwen3_omni.config import SpeechSource, ThinkerConfig
from omnistage.models.qwen3_omni.ports import MEDIUM_ROW, TEXT_ROW


def lay_out(ids: Sequence[int], extents: Sequence[MediumExtent], config: ThinkerConfig) -> PromptLayout:
    """See PromptRows.lay_out."""
    return _Rows(config).lay_out(ids, extents)


class _Rows(PromptRows):
    """The rows of one prompt of Qwen3-Omni."""

    def film_with_sound(self, extent: MediumExtent) -> None:
        """Add the rows of a film and its sound, ordered by time; at equal times, rows of pictures stand first. The marks around the sound
        stand within the marks around the film."""
        ids = self._sizes.ids
        self.add(np.array([ids.audio_start]), np.full((3, 1), self.next))
        picture_rows, sound_rows = self.seen(extent), self.heard(extent.sound)
        positions = np.concatenate((picture_rows[1], sound_rows[1]), 1)
        order = np.argsort(positions[0], kind="stable")
        self.run(np.concatenate((picture_rows[0], sound_rows[0]))[order], positions[:, order], order)
        # Either the film or the sound ends first. Later positions follow the other's rows after that end, even if earlier rows had larger
        # positions.
        is_heard = order >= len(picture_rows[0])
        tail_start = np.flatnonzero(is_heard != is_heard[-1])[-1] + 1
        self.next = int(positions[:, order[tail_start:]].max()) + 1
        self.add(np.array([ids.audio_end]), np.full((3, 1), self.next))


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """The part of a prompt that the Talker gets: the users' turns, then the ids that open the answer. slots: slots of these rows in the
    whole prompt, int64. places: places of these rows, int64 [PLACE, rows]."""

    slots: NDArray[np.int64]
    places: NDArray[np.int64]


def spoken_part(
    ids: Sequence[int],
    extents: Sequence[MediumExtent],
    prompt: PromptLayout,
    config: ThinkerConfig,
    speech: SpeechSource,
    opens: int | None = None,
) -> TalkerPrompt:
    """The part of a prompt that the Talker gets. prompt: all of it, which `lay_out` made from `ids` and `extents`. opens: the id with which
    the prompt begins a thought, which is not spoken; None: the prompt begins no thought."""
    id_array, kinds = np.array(ids, np.int64), [*config.ids.kinds]
    is_spoken = _is_heard(id_array, speech, opens)
    spoken_extents = [extent for extent, is_kept in zip(extents, is_spoken[np.isin(id_array, kinds)], strict=True) if is_kept]
    layout = lay_out(id_array[is_spoken].tolist(), spoken_extents, config)
    rows = np.where(np.isin(layout.ids, kinds), MEDIUM_ROW, TEXT_ROW)
    return TalkerPrompt(np.flatnonzero(_is_heard(prompt.ids, speech, opens)), np.concatenate((layout.positions, rows[None])))


def _is_heard(ids: NDArray[np.int64], speech: SpeechSource, opens: int | None) -> NDArray[np.bool_]:
    """For each id, whether the Talker gets its row, bool [ids]. The second id of a turn shows whose turn it is. speech, opens: as in
    `spoken_part`."""
    turn_starts = np.maximum.accumulate(np.where(ids == speech.turn, np.arange(len(ids)), 0))
    is_user: NDArray[np.bool_] = ids[np.minimum(turn_starts + 1, len(ids) - 1)] == speech.user
    is_user[turn_starts[-1] :] = True
    if opens is not None:
        is_user[np.flatnonzero(ids == opens)[-1] :] = False
    return is_user
