"""The reference for Code2Wav of Qwen2.5-Omni: the sound that Transformers makes of codes, when it is given the noise that it would draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5OmniForConditionalGeneration

from omnistage.models.qwen2_5_omni.wave.code2wav import noise


class WaveReference:
    """Token2Wav of a checkpoint, in float32, the whole sequence at once."""

    def __init__(self, folder: Path, whole: Any = None) -> None:
        """whole: the checkpoint, where it is loaded already."""
        whole = whole or Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.net = whole.eval().token2wav.float()
        self.voices = torch.load(folder / "spk_dict.pt", weights_only=True)

    def sound(self, codes: NDArray[np.uint32], voice: str, seed: int, steps: int = 9) -> NDArray[np.float32]:
        """[480 * codes] samples. codes: [n, 1]."""
        dit = self.net.config.dit_config
        frames = len(codes) * dit.repeats
        drawn = noise(seed, 0, -(-frames // dit.block_size), dit.block_size, dit.mel_dim)[:frames]
        values = self.voices[voice]
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(torch, "randn", lambda *shape, **how: drawn[None])
            given = torch.from_numpy(codes[:, 0].astype(np.int64))[None], values["cond"].float(), values["ref_mel"].float()
            made = self.net(*given, num_steps=steps + 1)
        samples: NDArray[np.float32] = made.numpy()
        return samples
