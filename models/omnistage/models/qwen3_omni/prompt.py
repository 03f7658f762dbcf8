"""The prompt of Qwen3-Omni: `get_rope_index` of Transformers' `Qwen3OmniMoeThinker`; and what of it goes to the Talker.

Transformers counts the time of a film in fractions; here a fraction is cut off. At two frames a second, and so for all films but slow and
long ones, there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnistage.models.common.encoders.features import Extent, Layout
from omnistage.models.common.encoders.prompt import PromptRows
from omnistage.models.qwen3_omni.config import SpeechSource, ThinkerConfig


def laid_out(ids: Sequence[int], extents: Sequence[Extent], config: ThinkerConfig) -> Layout:
    """See PromptRows.laid_out."""
    return _Rows(config).laid_out(ids, extents)


class _Rows(PromptRows):
    def film_with_sound(self, extent: Extent) -> None:
        """What is seen stands before what is heard from its time on. The marks around the sound stand within those around the film."""
        ids = self._sizes.ids
        self.add(np.array([ids.audio_start]), np.full((3, 1), self.next))
        seen, heard = self.seen(extent), self.heard(extent.sound)
        positions = np.concatenate((seen[1], heard[1]), 1)
        order = np.argsort(positions[0], kind="stable")
        self.run(np.concatenate((seen[0], heard[0]))[order], positions[:, order], order)
        # What follows counts on from what is left where one of both has ended, even where that one reached further.
        is_heard = order >= len(seen[0])
        left = np.flatnonzero(is_heard != is_heard[-1])[-1] + 1
        self.next = int(positions[:, order[left:]].max()) + 1
        self.add(np.array([ids.audio_end]), np.full((3, 1), self.next))


@dataclass(frozen=True, slots=True)
class Spoken:
    """What the Talker has of a prompt: what users said and, last, the ids that open the answer. layout: of these alone. slots: where the
    rows of their media stand in the whole prompt, int64."""

    layout: Layout
    slots: NDArray[np.int64]


def spoken(ids: Sequence[int], extents: Sequence[Extent], whole: Layout, config: ThinkerConfig, speech: SpeechSource) -> Spoken:
    """ids, extents: as of `laid_out`. whole: what that made of them."""
    written, kinds = np.array(ids, np.int64), [*config.ids.kinds]
    kept = _is_said_by_users(written, speech)
    seen = [extent for extent, is_kept in zip(extents, kept[np.isin(written, kinds)], strict=True) if is_kept]
    kept[np.flatnonzero(written == speech.turn)[-1] :] = True
    slots = np.flatnonzero(_is_said_by_users(whole.ids, speech) & np.isin(whole.ids, kinds))
    return Spoken(laid_out(written[kept].tolist(), seen, config), slots)


def _is_said_by_users(ids: NDArray[np.int64], speech: SpeechSource) -> NDArray[np.bool_]:
    """Of each id. The id behind that with which a turn begins tells whose turn it is."""
    begun = np.maximum.accumulate(np.where(ids == speech.turn, np.arange(len(ids)), 0))
    is_user: NDArray[np.bool_] = ids[np.minimum(begun + 1, len(ids) - 1)] == speech.user
    return is_user
