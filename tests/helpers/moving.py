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
    AutoencoderKLWan,
    AutoencoderOobleck,
    EDMDPMSolverMultistepScheduler,
    StableAudioDiTModel,
    StableAudioPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.models.t5 import T5Config, T5EncoderModel
from transformers.models.umt5 import UMT5Config, UMT5EncoderModel

from omnistage.models.diffusers.quiet import quiet

FILM_SIDE, FRAMES, RATE_HZ, CHANNELS = 32, 5, 1600, 2


@cache
def film_maker() -> Path:
    """A Wan of two experts with UniPC. The folder is gone when the process ends; nobody may write to it."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
    return _saved(
        WanPipeline,
        tokenizer=letters(),
        text_encoder=UMT5EncoderModel(UMT5Config(**sizes)),
        vae=AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]),
        transformer=_expert(),
        transformer_2=_expert(),
        boundary_ratio=0.875,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


@cache
def sound_maker() -> Path:
    """A Stable Audio of 2 s with EDMDPMSolverMultistep. The folder is gone when the process ends; nobody may write to it."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
    return _saved(
        StableAudioPipeline,
        tokenizer=letters(),
        text_encoder=T5EncoderModel(T5Config(**sizes)),
        vae=AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[4, 5],
            decoder_channels=3,
            decoder_input_channels=8,
            audio_channels=CHANNELS,
            channel_multiples=[2, 4],
            sampling_rate=RATE_HZ,
        ),
        projection_model=StableAudioProjectionModel(text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=32),
        transformer=StableAudioDiTModel(
            sample_size=2 * RATE_HZ // 20,
            in_channels=8,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_attention_heads=2,
            out_channels=8,
            cross_attention_dim=32,
            time_proj_dim=16,
            global_states_input_dim=64,
            cross_attention_input_dim=32,
        ),
        scheduler=EDMDPMSolverMultistepScheduler(solver_order=2, sigma_min=0.3, sigma_max=500, prediction_type="v_prediction"),
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


def _expert() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=64,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )


def letters() -> PreTrainedTokenizerFast:
    """Letter by letter."""
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ,.;:!?"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64)
