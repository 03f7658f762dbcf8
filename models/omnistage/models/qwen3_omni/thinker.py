"""The Thinker of Qwen3-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and tells a Talker what it is to say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnistage.models.common.chat import ChatTokenizer
from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.encoders.features import Extent, Layout
from omnistage.models.common.encoders.starting import Ready
from omnistage.models.common.encoders.thinker import Handed, MediaThinker, rows_known
from omnistage.models.common.thinker import TEXT
from omnistage.models.conversation import Turn
from omnistage.models.interface import Wanted
from omnistage.models.qwen3_omni.config import ThinkerConfig
from omnistage.models.qwen3_omni.ports import IDS, PLACES, ROW_PORTS
from omnistage.models.qwen3_omni.prompt import laid_out, spoken

END = "<|im_end|>"


class Qwen3Thinker(MediaThinker):
    """Implements `ThinkerModel`. Build it with `loading.load_thinker`."""

    replies_by_id = True

    def __init__(self, config: ThinkerConfig, ready: Ready, tokenizer: ChatTokenizer) -> None:
        """See MediaThinker."""
        super().__init__(ready, tokenizer, ROW_PORTS)
        self.config = config

    def laid_out(self, prompt_ids: Sequence[int], extents: Sequence[Extent]) -> Layout:
        """See MediaThinker.laid_out."""
        return laid_out(prompt_ids, extents, self.config)

    def handed(self, prompt_ids: Sequence[int], extents: Sequence[Extent], layout: Layout, wanted: Wanted) -> Handed:
        """See MediaThinker.handed."""
        if self.config.speech is None or wanted.keys() <= {TEXT}:
            return Handed()
        said = spoken(prompt_ids, extents, layout, self.config, self.config.speech)
        known = (*rows_known(IDS, said.layout.ids[:, None], wanted), *rows_known(PLACES, said.layout.positions.T, wanted))
        return Handed(known, said.slots)


def tokenizer_of(directory: Path, config: ThinkerConfig) -> ChatTokenizer:
    """Raises BadCheckpoint."""
    tokenizer = ChatTokenizer(directory, config.text.vocab_size, END, config.ids.kinds)
    if config.speech is not None and config.speech.turn not in tokenizer.template.token_ids((Turn("user", ("",)),), []):
        raise BadCheckpoint(f"{directory}: the chat template begins no turn with 'im_start_token_id' {config.speech.turn} of config.json")
    return tokenizer
