"""The Talker of Qwen3-Omni (Xu et al. 2025): speaks the tokens of an answer as they come, one frame of codes after the other.

The rows of the conversation are the rows of the users' turns, and of the three tokens with which an answer begins. The row of a token is
its embedding in the Thinker; the row of a picture, a film or sound is a hidden row of the Thinker. After them come rows for the voice, then
the first token of the answer, with which the frames begin. The row of every further frame is the sum of the embeddings of its codes and the
next token of the answer. For one request alone it computes what `Qwen3OmniMoeForConditionalGeneration.generate` of Transformers does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.engine import Engine
from omnistage.models.interface import BadRequest, ModelInfo
from omnistage.models.qwen3_omni.ports import MEDIUM_ROW, PLACE, TEXT_ROW
from omnistage.models.qwen3_omni.talker_config import TalkerConfig
from omnistage.models.speech.talker import AXES, AddedRows, Manner, RowTalker, codes_port, positions_behind


class Qwen3Talker(RowTalker):
    """The Talker of Qwen3-Omni; implements `TalkerModel`. Build it with `loading_talker.load_talker`."""

    def __init__(self, config: TalkerConfig, engine: Engine, added: AddedRows, info: ModelInfo, context: int) -> None:
        """See RowTalker."""
        port = codes_port(config.groups, config.rate_hz)
        manner = Manner(PLACE, port, block=1, ends=frozenset({config.codec.eos}), silent=config.silent)
        super().__init__(manner, engine, added, info, context)
        self.config = config

    def lay_out(self, places: NDArray[np.int64], voice: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See RowTalker.lay_out. places: [AXES + 1, rows]; the last number of each place is the kind of its row. After the conversation
        come the rows for the voice; the last of them has `bos`, with which the codes begin. Raises BadRequest for an unknown kind."""
        config, codec = self.config, self.config.codec
        voice_items = (codec.nothink, codec.think_bos, codec.think_eos, config.speakers[voice], codec.pad, codec.bos)
        positions = positions_behind(places[:AXES], len(voice_items))
        if not np.isin(kinds := places[AXES], (TEXT_ROW, MEDIUM_ROW)).all():
            raise BadRequest("talker", f"the last number of a place is {TEXT_ROW} of text or {MEDIUM_ROW} of a medium, and no other")
        items = np.zeros((positions.shape[1], config.groups), np.int64)
        items[: -len(voice_items), 0] = np.where(kinds == TEXT_ROW, config.nothing, config.medium)
        items[-len(voice_items) :, 0] = voice_items
        return items, positions
