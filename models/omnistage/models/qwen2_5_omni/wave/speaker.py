"""Makes a speaker, which is everything about a voice that Code2Wav of Qwen2.5-Omni needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from omnistage.models.qwen2_5_omni.wave.config import DitConfig


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice in the form that the net of the flow needs. vector: the voice's own vector, float32 [voice_size]. examples: a vector made
    from the voice's example, and a vector made from silence of equal length, float32 [2, speaker.size]."""

    vector: torch.Tensor
    examples: torch.Tensor

    def to(self, device: torch.device) -> Speaker:
        return Speaker(self.vector.to(device), self.examples.to(device))


def example_net(config: DitConfig) -> torch.nn.Module:
    """The net (ECAPA-TDNN, Desplanques et al. 2020) that makes vectors [n, speaker.size] from examples [n, frames, mel_bins]."""
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
    """The speaker of a voice. net: from `example_net`. vector: [1, voice_size]. example: [1, frames, mel_bins]."""
    return Speaker(vector[0], net(torch.cat((example, torch.zeros_like(example)))))
