"""Small pipelines of films and of sound with random weights, for which there is no loop of our own."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.t5 import T5Config, T5EncoderModel
from transformers.models.umt5 import UMT5Config, UMT5EncoderModel

from helpers.drawings import kept_folder
from omnistage.models.diffusers.folder import mute_libraries

FILM_SIDE, FRAMES, RATE_HZ, CHANNELS = 32, 5, 1600, 1
FILM_RATE_HZ, FILM_CHANNELS = 8000, 2
"""The rate and the channels of the sound of a film."""
ENCODER = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 100}


@cache
def film_maker() -> Path:
    """An LTX-Video, which draws by the frames a second. The folder is gone when the process ends; nobody may write to it."""
    torch.manual_seed(0)
    blocks: dict[str, Any] = {"block_out_channels": (8, 8), "layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, True)}
    shape = {**blocks, **{f"decoder_{name}": each for name, each in blocks.items()}, "decoder_inject_noise": (False,) * 3}
    shape |= {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "downsample_type": ("conv",) * 2}
    shape |= {"upsample_residual": (False,) * 2, "upsample_factor": (1, 1)}
    heads: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "cross_attention_dim": 24, "num_layers": 1}
    vae = AutoencoderKLLTXVideo(**shape, latent_channels=8, patch_size=2)
    transformer = LTXVideoTransformer3DModel(**heads, in_channels=8, out_channels=8, caption_channels=32)
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


@cache
def heard_film_maker() -> Path:
    """An LTX-2, which makes films with sound: 8 frames more or fewer, of 64x64 pixels. The folder is gone when the process ends; nobody may
    write to it."""
    torch.manual_seed(0)
    text = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    sight = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16, "patch_size": 8}
    encoder = Gemma3Config(text_config={**text, "num_key_value_heads": 1}, vision_config=sight, mm_tokens_per_image=4)
    blocks = {"block_out_channels": (8,) * 3, "layers_per_block": (1,) * 4, "spatio_temporal_scaling": (True,) * 3}
    shape: dict[str, Any] = {**blocks, **{f"decoder_{name}": each for name, each in blocks.items()}}
    shape |= {"down_block_types": ("LTX2VideoDownBlock3D",) * 3, "downsample_type": ("spatiotemporal",) * 3}
    shape |= {"upsample_residual": (False,) * 3, "upsample_factor": (1,) * 3}
    heard: dict[str, Any] = {"base_channels": 4, "num_res_blocks": 1, "resolution": 32, "sample_rate": 1600, "mel_hop_length": 16}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
    tall: dict[str, Any] = {**heads, "in_channels": 4, "out_channels": 4}
    low = {**tall, "attention_head_dim": 4, "cross_attention_dim": 8, "sampling_rate": 1600, "hop_length": 16}
    connector = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    connectors = {f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in connector.items()}
    voice: dict[str, Any] = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]], "output_sampling_rate": FILM_RATE_HZ}
    voice |= {"upsample_kernel_sizes": [10, 8, 8], "upsample_factors": [5, 4, 4]}
    return _saved(
        LTX2Pipeline,
        tokenizer=letters(),
        text_encoder=Gemma3ForConditionalGeneration(encoder),
        connectors=LTX2TextConnectors(caption_channels=32, text_proj_in_factor=2, connector_rope_base_seq_len=32, **connectors),
        transformer=LTX2VideoTransformer3DModel(
            **tall, **{f"audio_{name}": value for name, value in low.items()}, num_layers=1, caption_channels=32
        ),
        vae=AutoencoderKLLTX2Video(latent_channels=4, decoder_inject_noise=(False,) * 4, **shape),
        audio_vae=AutoencoderKLLTX2Audio(**heard, latent_channels=2, mel_bins=8),
        vocoder=LTX2Vocoder(in_channels=16, hidden_channels=32, out_channels=FILM_CHANNELS, **voice),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def streams_of(data: bytes) -> tuple[tuple[int, float], tuple[NDArray[np.float32], int]]:
    """The streams of a file: how many frames there are and how many seconds they last, and the samples, [samples, channels], with their
    rate."""
    with av.open(io.BytesIO(data), "r") as container:
        (video,), (audio,) = container.streams.video, container.streams.audio
        rate_hz, frames, samples = video.average_rate, 0, list[NDArray[np.generic]]()
        assert rate_hz is not None
        for frame in container.decode(video, audio):
            if isinstance(frame, av.AudioFrame):
                samples.append(frame.to_ndarray())
            else:
                frames += 1
        return (frames, float(frames / rate_hz)), (np.concatenate(samples, 1).T.astype(np.float32), audio.rate)


def frames_of(data: bytes) -> tuple[list[NDArray[np.generic]], float]:
    """Frames of a file, [height, width, 3], and their rate."""
    with av.open(io.BytesIO(data), "r") as container:
        rate = container.streams.video[0].average_rate
        assert rate is not None
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], float(rate)


def show_same_frames(found: bytes, expected: bytes) -> bool:
    """Whether two films show the same frames, encoded in two ways: each frame is clearly nearer to its own frame of the other film than to
    any other frame. For films whose frames differ from each other, as those of random weights do."""
    one, other = (np.stack(frames_of(data)[0]).astype(int) for data in (found, expected))
    if one.shape != other.shape:
        return False
    apart = np.abs(one[:, None] - other).mean((2, 3, 4))
    own = apart.diagonal().copy()
    np.fill_diagonal(apart, np.inf)
    return bool((own * 1.5 < apart.min(1)).all())


def _saved(pipeline: Any, **parts: Any) -> Path:
    home = kept_folder()
    with mute_libraries():
        pipeline(**parts).save_pretrained(home)
    return home


def letters() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ,.;:!?"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64)
