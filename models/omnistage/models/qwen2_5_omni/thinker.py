"""The Thinker of Qwen2.5-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnistage.engine.engine import Engine
from omnistage.models.common.chat import ChatTokenizer
from omnistage.models.common.encoders.features import Extent, Layout
from omnistage.models.common.encoders.reader import MediaReader
from omnistage.models.common.encoders.thinker import MediaThinker
from omnistage.models.common.team import Team
from omnistage.models.common.worker import Worker
from omnistage.models.interface import ModelInfo
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.ports import ROW_PORTS
from omnistage.models.qwen2_5_omni.prompt import laid_out

END = "<|im_end|>"


class QwenThinker(MediaThinker):
    """Implements `ThinkerModel`. Build it with `loading.load_thinker`."""

    def __init__(
        self,
        config: ThinkerConfig,
        engine: Engine,
        tokenizer: ChatTokenizer,
        reader: MediaReader,
        encoders: Worker,
        info: ModelInfo,
        context: int,
        team: Team | None = None,
    ) -> None:
        """See MediaThinker."""
        super().__init__(engine, tokenizer, reader, encoders, ROW_PORTS, info, context, team)
        self.config = config

    def laid_out(self, prompt_ids: Sequence[int], extents: Sequence[Extent]) -> Layout:
        """See MediaThinker.laid_out."""
        return laid_out(prompt_ids, extents, self.config)


def tokenizer_of(directory: Path, config: ThinkerConfig) -> ChatTokenizer:
    """Raises BadCheckpoint."""
    return ChatTokenizer(directory, config.text.vocab_size, END, config.ids.kinds)
