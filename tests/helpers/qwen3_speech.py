"""The speech of a whole checkpoint of Qwen3-Omni and its sound, by two references: one after the other from the rows of Transformers'
Thinker, with positions of the Talker as the Thinker counts its own; and Transformers' own `generate`, which cannot speak of sound beside
pictures and leaves out that a film is heard."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from helpers.omni_reference import Seen
from helpers.qwen3_reference import Qwen3Reference
from helpers.talker_loop import PENALTY, GivenRows, RowsOfUsers, TalkerLoop
from omnistage.models.conversation import Turn

Frame = tuple[int, ...]

SPECIAL = ("bos", "eos", "pad")


class Qwen3Speech(Qwen3Reference, TalkerLoop):
    """Greedy speech of a checkpoint in float32."""

    loading: ClassVar = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.talker = self.whole.talker

    def given_to(self, turns: Sequence[Turn], seen: Seen, tokens: Sequence[int], voice: str) -> GivenRows:
        """The input of the Talker for an answer. tokens: those of the answer, but for the one that was drawn last."""
        ids, inputs = self.inputs(turns, seen)
        config, thinker = self.whole.config, self.model
        both = torch.cat([ids, torch.tensor([list(tokens)])], 1)
        with torch.inference_mode():
            made = thinker(input_ids=both, attention_mask=torch.ones_like(both), output_hidden_states=True, **inputs)
            special = thinker.get_input_embeddings()(torch.tensor([[getattr(config, f"tts_{name}_token_id") for name in SPECIAL]]))
        kept, opened = self._heard(ids[0].tolist())
        media = torch.isin(
            ids[:, kept], torch.tensor([getattr(config.thinker_config, f"{k}_token_id") for k in ("audio", "image", "video")])
        )
        embedded, hidden = made.hidden_states[0], made.hidden_states[config.talker_config.accept_hidden_layer]
        heard = RowsOfUsers(hidden[:, kept], embedded[:, kept], media)
        said = torch.cat([ids[:, kept], torch.full((1, 9), config.tts_pad_token_id)], 1)
        lengths = inputs["feature_attention_mask"].sum(-1) if "feature_attention_mask" in inputs else None
        places, _ = thinker.get_rope_index(
            said,
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            torch.ones_like(said),
            inputs.get("use_audio_in_video", False),
            lengths,
            inputs.get("video_second_per_grid"),
        )
        return self.given(self.whole, heard, embedded[:, opened:], special, voice, places)

    def _heard(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Places of what users said in a prompt, and where the answer begins."""
        config, kept, is_user, begun = self.whole.config, list[int](), False, 0
        for place, token in enumerate(ids):
            if token == config.im_start_token_id:
                is_user, begun = ids[place + 1] == config.user_token_id, place
            if is_user:
                kept.append(place)
        return kept, begun

    def generated(self, turns: Sequence[Turn], seen: Seen, never: Collection[int], voice: str, tokens: int, count: int) -> list[Frame]:
        """So many frames of Transformers' `generate`, which gives one less than it is asked for, after an answer of so many tokens."""
        ids, inputs = self.inputs(turns, seen)
        found = list[torch.Tensor]()

        def taken(codes: torch.Tensor, **how: Any) -> torch.Tensor:
            found.append(codes)
            return torch.zeros(1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.whole.code2wav, "chunked_decode", taken)
            self.whole.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                speaker=voice,
                thinker_max_new_tokens=tokens,
                thinker_min_new_tokens=tokens,
                thinker_do_sample=False,
                thinker_suppress_tokens=list(never),
                thinker_eos_token_id=self.whole.config.im_end_token_id,
                talker_max_new_tokens=count + 1,
                talker_do_sample=False,
                talker_repetition_penalty=1.0,  # it warns of one that is given so, and does the same
                talker_logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(PENALTY)]),
                **inputs,
            )
        (codes,) = found
        return [tuple(frame) for frame in codes[0].T.tolist()]

    def sound(self, frames: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """In one forward of all frames."""
        with torch.inference_mode():
            samples: NDArray[np.float32] = self.whole.code2wav(torch.tensor(frames).T[None])[0, 0].numpy()
        return samples
