"""The Thinker of Qwen2.5-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnistage.models.encoders.encoder import MediumExtent, PromptLayout
from omnistage.models.encoders.starting import Ready
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.prompt import lay_out
from omnistage.models.text.chat import ChatTokenizer

END = "<|im_end|>"


class Qwen2_5Thinker(MediaThinker):
    """The Thinker of Qwen2.5-Omni; implements `ThinkerModel`. Build it with `loading.load_thinker`."""

    def __init__(self, config: ThinkerConfig, ready: Ready, tokenizer: ChatTokenizer) -> None:
        """See MediaThinker."""
        super().__init__(ready, tokenizer)
        self.config = config

    def lay_out(self, prompt_ids: Sequence[int], extents: Sequence[MediumExtent]) -> PromptLayout:
        """See MediaThinker.lay_out."""
        return lay_out(prompt_ids, extents, self.config)


def tokenizer_of(directory: Path, config: ThinkerConfig) -> ChatTokenizer:
    """The tokenizer of a checkpoint. Raises BadCheckpoint."""
    return ChatTokenizer(directory, config.text.vocab_size, END, config.ids.kinds)
