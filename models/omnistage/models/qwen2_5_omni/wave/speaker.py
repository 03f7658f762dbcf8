"""The speaker: all that Code2Wav of Qwen2.5-Omni knows of a voice before the voice has said anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from omnistage.models.qwen2_5_omni.wave.config import DitConfig


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice as the net of the flow takes it. vector: the vector of the voice, float32 [voice_size]. examples: vectors made from its
    example and from silence of equal length, float32 [2, speaker.size]."""

    vector: torch.Tensor
    examples: torch.Tensor

    def to(self, device: torch.device) -> Speaker:
        return Speaker(self.vector.to(device), self.examples.to(device))


def example_net(config: DitConfig) -> torch.nn.Module:
    """ECAPA-TDNN (Desplanques et al. 2020): [n, frames, mel_bins] to [n, speaker.size]."""
    net: torch.nn.Module = ECAPA_TimeDelayNet(
        Qwen2_5OmniDiTConfig(
            mel_dim=config.mel_bins,
            enc_dim=config.speaker.size,
            enc_channels=list(config.speaker.channels),
            enc_kernel_sizes=list(config.speaker.kernel_sizes),
            enc_dilations=list(config.speaker.dilations),
            enc_attention_channels=config.speaker.attention_channels,
            enc_res2net_scale=config.speaker.scale,
            enc_se_channels=config.speaker.squeeze_channels,
        )
    )
    return net


def speaker(net: torch.nn.Module, vector: torch.Tensor, example: torch.Tensor) -> Speaker:
    """The speaker of a voice. vector: [1, voice_size]. example: [1, frames, mel_bins]."""
    return Speaker(vector[0], net(torch.cat((example, torch.zeros_like(example)))))
