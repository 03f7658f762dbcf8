"""The Talker of Qwen2.5-Omni (Xu et al. 2025): speaks the rows of an answer as they come, one code after the other.

Between the conversation and the answer it adds the row of the voice's token. A frame is one code, and a code's embedding is as wide as a
row of the Thinker. It does what `Qwen2_5OmniForConditionalGeneration.generate` of Transformers intends. Versions 5.20 to 5.23 compute
something else for a single request: they drop its mask, and with it places and special codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.engine import Engine
from omnistage.models.interface import ModelInfo
from omnistage.models.qwen2_5_omni.config import TalkerConfig
from omnistage.models.qwen2_5_omni.ports import CODES_PORT
from omnistage.models.speech.talker import AXES, AddedRows, Manner, RowTalker, positions_behind


class Qwen2_5Talker(RowTalker):
    """The Talker of Qwen2.5-Omni; implements `TalkerModel`. Build it with `loading_talker.load_talker`."""

    def __init__(self, config: TalkerConfig, engine: Engine, added: AddedRows, info: ModelInfo, context: int) -> None:
        """See RowTalker."""
        codec = config.codec
        manner = Manner(
            AXES,
            CODES_PORT,
            config.block,
            ends=frozenset({codec.eos, codec.pad}),
            silent=config.silent,
            seen=frozenset({codec.mask, codec.pad, codec.bos}),
        )
        super().__init__(manner, engine, added, info, context)
        self.config = config

    def lay_out(self, places: NDArray[np.int64], voice: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See RowTalker.lay_out. The rows of the conversation have no code. The row of the voice's token has `pad`, the row of the answer's
        first token has `bos`."""
        codec, positions = self.config.codec, positions_behind(places, 2)
        items = np.full((positions.shape[1], 1), self.config.nothing, np.int64)
        items[-2:, 0] = codec.pad, codec.bos
        return items, positions
