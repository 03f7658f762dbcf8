"""Small pipelines of films and of sound with random weights, for which there is no loop of our own."""

from __future__ import annotations

import atexit
import io
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.models.t5 import T5Config, T5EncoderModel
from transformers.models.umt5 import UMT5Config, UMT5EncoderModel

from omnistage.models.diffusers.quiet import quiet

FILM_SIDE, FRAMES, RATE_HZ, CHANNELS = 32, 5, 1600, 1
ENCODER = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 100}


@cache
def film_maker() -> Path:
    """An LTX-Video, which draws by the frames a second. The folder is gone when the process ends; nobody may write to it."""
    torch.manual_seed(0)
    two: dict[str, Any] = {"spatio_temporal_scaling": (True, True), "decoder_spatio_temporal_scaling": (True, True)}
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        decoder_inject_noise=(False, False, False),
        down_block_types=("LTXVideoDownBlock3D", "LTXVideoDownBlock3D"),
        downsample_type=("conv", "conv"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
        **two,
    )
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=1,
        caption_channels=32,
    )
    parts = {"tokenizer": letters(), "text_encoder": T5EncoderModel(T5Config(**ENCODER)), "vae": vae, "transformer": transformer}
    return _saved(LTXPipeline, **parts, scheduler=FlowMatchEulerDiscreteScheduler())


@cache
def sound_maker() -> Path:
    """A LongCat-AudioDiT, of at most 30 s. The folder is gone when the process ends; nobody may write to it."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"channels": 8, "c_mults": [1, 2], "strides": [4, 4], "downsampling_ratio": 16}
    return _saved(
        LongCatAudioDiTPipeline,
        tokenizer=letters(),
        text_encoder=UMT5EncoderModel(UMT5Config(**ENCODER)),
        vae=LongCatAudioDiTVae(**shape, latent_dim=8, encoder_latent_dim=16, sample_rate=RATE_HZ),
        transformer=LongCatAudioDiTTransformer(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=32, latent_dim=8),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, invert_sigmas=False),
    )


def frames_of(data: bytes) -> tuple[list[NDArray[np.generic]], float]:
    """Frames of a file, [height, width, 3], and their rate."""
    with av.open(io.BytesIO(data), "r") as container:
        rate = container.streams.video[0].average_rate
        assert rate is not None
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], float(rate)


def _saved(pipeline: Any, **parts: Any) -> Path:
    home = tempfile.mkdtemp(prefix="omnistage-drawings-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    with quiet():
        pipeline(**parts).save_pretrained(home)
    return Path(home)


def letters() -> PreTrainedTokenizerFast:
    """Letter by letter."""
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ,.;:!?"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64)
