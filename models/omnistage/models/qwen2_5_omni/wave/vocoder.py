"""The vocoder of Qwen2.5-Omni's Token2Wav, BigVGAN (Lee et al. 2023): from mel frames to samples, many windows at once."""

from __future__ import annotations

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from omnistage.models.qwen2_5_omni.wave.config import VocoderConfig

FIELD = 28
"""Mel frames on each side of a frame that its samples depend on, with the published kernels and rates."""


class Vocoder:
    """Transformers' net, but for its end, which takes one window only."""

    def __init__(self, config: VocoderConfig) -> None:
        self.config = config
        self.net = Qwen2_5OmniToken2WavBigVGANModel(
            Qwen2_5OmniBigVGANConfig(
                mel_dim=config.mel_bins,
                upsample_initial_channel=config.channels,
                resblock_kernel_sizes=list(config.block_kernel_sizes),
                resblock_dilation_sizes=[list(each) for each in config.block_dilations],
                upsample_rates=list(config.rates),
                upsample_kernel_sizes=list(config.kernel_sizes),
            )
        )

    def samples(self, mel: torch.Tensor) -> torch.Tensor:
        """mel: [windows, frames, mel_bins], as the flow gives it. Returns float32 [windows, frames * frame_samples] in -1..1."""
        net = self.net
        x = net.conv_pre(net.process_mel_spectrogram(mel.transpose(1, 2)))
        count = net.num_residual_blocks
        for level, upsamplings in enumerate(net.ups):
            x = upsamplings[0](x)
            x = sum(block(x) for block in net.resblocks[level * count : (level + 1) * count]) / count
        return net.conv_post(net.activation_post(x)).squeeze(1).clamp(-1.0, 1.0)
