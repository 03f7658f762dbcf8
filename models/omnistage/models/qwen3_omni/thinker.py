"""The Thinker of Qwen3-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.conversation import Turn
from omnistage.models.encoders.encoder import MediumExtent, PromptLayout
from omnistage.models.encoders.starting import Ready
from omnistage.models.encoders.thinker import Handed, MediaThinker, rows_known
from omnistage.models.interface import Array, Wanted
from omnistage.models.qwen3_omni.config import ThinkerConfig
from omnistage.models.qwen3_omni.prompt import lay_out, spoken_part
from omnistage.models.speech.talker import PLACES
from omnistage.models.text.chat import ChatTokenizer
from omnistage.models.text.engine_model import array_of
from omnistage.models.text.thinker import TEXT

END = "<|im_end|>"


class Qwen3Thinker(MediaThinker):
    """The Thinker of Qwen3-Omni; implements `ThinkerModel`. Build it with `loading.load_thinker`."""

    def __init__(self, config: ThinkerConfig, ready: Ready, tokenizer: ChatTokenizer, embedding: torch.Tensor) -> None:
        """embedding: the embeddings of all tokens, [tokens, hidden_size], on the CPU. ready, tokenizer: see MediaThinker."""
        super().__init__(ready, tokenizer, partial(_row, embedding, ready.engine.spec.dtype))
        self.config = config

    def lay_out(self, prompt_ids: Sequence[int], extents: Sequence[MediumExtent]) -> PromptLayout:
        """See MediaThinker.lay_out."""
        return lay_out(prompt_ids, extents, self.config)

    def hand_over(self, prompt_ids: Sequence[int], extents: Sequence[MediumExtent], layout: PromptLayout, ports: Wanted) -> Handed:
        """See MediaThinker.hand_over."""
        if self.config.speech is None or ports.keys() <= {TEXT}:
            return Handed()
        thinks = self.tokenizer.thinks
        opens = thinks.opens if thinks and thinks.is_open else None
        part = spoken_part(prompt_ids, extents, layout, self.config, self.config.speech, opens)
        return Handed(rows_known(PLACES, part.places.T, ports), part.slots)


def _row(embedding: torch.Tensor, dtype: torch.dtype, token_id: int) -> Array:
    """The row of a token of the answer: its embedding, [1, hidden_size]."""
    return array_of(embedding[token_id : token_id + 1].to(dtype))


def tokenizer_of(directory: Path, config: ThinkerConfig) -> ChatTokenizer:
    """The tokenizer of a checkpoint. Raises BadCheckpoint, also if its template does not begin turns with the ids that the config names."""
    tokenizer = ChatTokenizer(directory, config.text.vocab_size, END, config.ids.kinds)
    if config.speech is not None:
        turn, user = config.speech.turn, config.speech.user
        ids = tokenizer.template.token_ids((Turn("user", ("",)),), [])
        *_, question_role, answer_role = None, None, *(role for mark, role in pairwise(ids) if mark == turn)
        if question_role != user or answer_role == user:
            fault = f"no turn of a user with 'im_start_token_id' {turn} and 'user_token_id' {user} of config.json"
            raise BadCheckpoint(f"{directory}: the chat template begins {fault}")
    return tokenizer
