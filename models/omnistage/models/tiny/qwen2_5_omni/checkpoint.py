"""A checkpoint of Qwen2.5-Omni with random weights, in the files of the published ones: for tests and trials of all but sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omnistage.models.common.progress import Progress
from omnistage.models.tiny.files import write_json
from omnistage.models.tiny.makers import Order
from omnistage.models.tiny.qwen2_5_omni import weights
from omnistage.models.tiny.qwen2_5_omni.sizes import MEL_BINS, SIZES, Ids, Size, config
from omnistage.models.tiny.qwen2_5_omni.tokenizer import build_vocabulary, write_tokenizer
from omnistage.models.tiny.qwen_vocabulary import fetch_vocabulary
from omnistage.models.tiny.random_weights import noise

PREPROCESSOR = {
    "chunk_length": 300,
    "dither": 0.0,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_fft": 400,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "right",
    "padding_value": 0.0,
    "patch_size": 14,
    "processor_class": "Qwen2_5OmniProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16000,
    "temporal_patch_size": 2,
}


def make(directory: Path, order: Order, progress: Progress) -> None:
    """Fill an empty folder that is there. Raises FetchError where the vocabulary of Qwen cannot be had."""
    size = SIZES[order.size]
    dtype = order.dtype or size.dtype
    vocabulary = fetch_vocabulary(progress=progress) if order.tokenizer == "qwen" else build_vocabulary()
    progress("writing the tokenizer", 0.0)
    ids = write_tokenizer(directory, vocabulary)
    progress("writing the tokenizer", 1.0)
    values = config(size, ids, dtype)
    write_json(directory / "config.json", values)
    write_json(directory / "generation_config.json", {"_from_model_config": True, "transformers_version": values["transformers_version"]})
    write_json(directory / "preprocessor_config.json", PREPROCESSOR)
    torch.save(_speakers(size, ids, order.seed), directory / "spk_dict.pt")
    weights.write(directory, values, order.seed, getattr(torch, dtype), progress)


def _speakers(size: Size, ids: Ids, seed: int) -> dict[str, dict[str, Any]]:
    """spk_dict.pt: each voice's token, its vector [1, speaker] and an example's mel frames [1, frames, 80], float32."""
    return {
        name: {
            "bos_token": number,
            "cond": noise(f"{name} cond", (1, size.dit.speaker), seed),
            "ref_mel": noise(f"{name} ref_mel", (1, size.voice_frames, MEL_BINS), seed, 2.0) - 5.0,
        }
        for name, number in ids.speakers.items()
    }
