"""The reference for the Thinker: Transformers with a checkpoint of Qwen3-Omni, as in helpers/omni_reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor, _get_feat_extract_output_lengths

from helpers.omni_reference import RATE_HZ, OmniReference
from omnistage.models.qwen3_omni.config import read_thinker_config


class Qwen3Reference(OmniReference):
    marks: ClassVar = {"image": "<|image_pad|>", "audio": "<|audio_pad|>", "video": "<|video_pad|>"}
    around: ClassVar = ("<|audio_start|>", "<|audio_end|>")
    whole_of: ClassVar[Any] = Qwen3OmniMoeForConditionalGeneration
    config_of = read_thinker_config
    loading: ClassVar = {"enable_audio_output": False}

    def spectrograms(self, waves: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """See OmniReference. Each sound is prepared alone, because the processor fills sounds up to the longest one of a request."""
        made = [
            self._sounds(wave, sampling_rate=RATE_HZ, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt")
            for wave in waves
        ]
        features = pad_sequence([one["input_features"][0].T for one in made], batch_first=True).mT
        return features, pad_sequence([one["attention_mask"][0] for one in made], batch_first=True)

    def sound_rows(self, frames: int) -> int:
        return int(_get_feat_extract_output_lengths(frames, self._config.audio.chunk // 2))

    def film(self, inputs: dict[str, Any], place: int, sound: int) -> str:
        one = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=self._config.vision.merge),
            audio_bos_token=self.around[0],
            audio_eos_token=self.around[1],
            **{f"{name}_token": self.marks[name] for name in ("audio", "video")},
        )
        film = {"video_grid_thw": inputs["video_grid_thw"].numpy(), "video_second_per_grid": np.ones(len(inputs["video_grid_thw"]))}
        counted: Any = Qwen3OmniMoeProcessor
        rows: str = counted.replace_video_with_audio_token(
            one, film, place, {"num_audio_tokens": {0: sound}}, 0, position_id_per_seconds=self._config.position_ids_per_second
        )
        return rows
