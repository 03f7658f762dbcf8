"""Makes a checkpoint of Qwen2.5-Omni with random weights, in the published files: for tests, and for trials that need no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.makers import CheckpointOrder
from omnistage.models.tiny.omni import with_tokenizer, write_settings
from omnistage.models.tiny.qwen2_5_omni import weights
from omnistage.models.tiny.qwen2_5_omni.sizes import MEL_BINS, SIZES, Ids, Size, config
from omnistage.models.tiny.qwen2_5_omni.tokenizer import write_tokenizer
from omnistage.models.tiny.random_weights import noise

PREPROCESSOR = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "Qwen2_5OmniProcessor",
}
"""Entries of preprocessor_config.json that are added to the entries for both families."""


def make(directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder. Raises FetchError if the vocabulary of Qwen cannot be fetched."""
    size = SIZES[order.size]
    dtype = order.dtype or size.dtype
    ids = with_tokenizer(directory, order, progress, write_tokenizer)
    values = config(size, ids, dtype)
    write_settings(directory, values, PREPROCESSOR)
    torch.save(_speakers(size, ids, order.seed), directory / "spk_dict.pt")
    weights.write(directory, values, order.seed, getattr(torch, dtype), progress)


def _speakers(size: Size, ids: Ids, seed: int) -> dict[str, dict[str, Any]]:
    """The contents of spk_dict.pt: for each voice its token, vector [1, speaker], and an example's mel frames [1, frames, 80], float32."""
    return {
        name: {
            "bos_token": number,
            "cond": noise(f"{name} cond", (1, size.dit.speaker), seed),
            "ref_mel": noise(f"{name} ref_mel", (1, size.voice_frames, MEL_BINS), seed, 2.0) - 5.0,
        }
        for name, number in ids.speakers.items()
    }
