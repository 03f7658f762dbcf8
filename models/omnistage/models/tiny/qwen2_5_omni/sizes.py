"""The sizes of the checkpoints of `make-tiny qwen2.5-omni`, and their config.json in the published form.

All values that are not in a size are as published for Qwen/Qwen2.5-Omni-7B: 128 mel bins, patches of 14 x 14 x 2, 8448 items of the
Talker, and for Code2Wav 22 layers of which 10 looks ahead and 0 and 20 look back, 80 mel bins, and rates of the vocoder that make 240
samples of a frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ITEMS = 8448
"""Items of the Talker: codes, and the items that begin, end and fill them."""
CODES_END = 8294
CODE_EMBEDDINGS = 8193
"""The 8192 codes, and one more."""
MEL_BINS = 80
"""Mel bins of the speech that is made; sound that is heard has 128."""


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """A Qwen2 decoder. rope_sections: pairs of components of a head that turn by time, height and width: half of head_size together."""

    layers: int
    hidden: int  # Width of a row.
    ffn: int  # Width inside an MLP.
    heads: int
    kv_heads: int  # Heads of keys and values.
    head_size: int
    rope_sections: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class VisionSize:
    """The picture encoder. full_attention: layers that see the whole picture; the others see windows of 112 x 112 pixels."""

    layers: int
    hidden: int  # Width of a row.
    ffn: int  # Width inside an MLP.
    heads: int
    full_attention: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AudioSize:
    """The sound encoder."""

    layers: int
    hidden: int  # Width of a row.
    ffn: int  # Width inside an MLP.
    heads: int


@dataclass(frozen=True, slots=True)
class DitSize:
    """The 22 layers that make mel frames of codes. speaker: width of a voice's vector. encoder*: sizes of the part for examples."""

    hidden: int  # Width of a row.
    heads: int
    head_size: int
    code_embedding: int  # Width of a code's vector.
    speaker: int
    encoder: int
    encoder_channels: tuple[int, int, int, int, int]
    encoder_attention: int
    encoder_squeeze: int


@dataclass(frozen=True, slots=True)
class Size:
    """A whole model. vocoder: channels before six upsamplings, each of which halves them. voice_frames: mel frames of a voice's example."""

    thinker: DecoderSize
    vision: VisionSize
    audio: AudioSize
    talker: DecoderSize
    dit: DitSize
    vocoder: int
    voice_frames: int
    dtype: str


SIZES: Mapping[str, Size] = {
    "tiny": Size(
        # All heads together are so wide that attention runs as it does in a model of any size.
        thinker=DecoderSize(layers=3, hidden=192, ffn=320, heads=6, kv_heads=2, head_size=32, rope_sections=(4, 6, 6)),
        vision=VisionSize(layers=3, hidden=64, ffn=96, heads=4, full_attention=(1,)),
        audio=AudioSize(layers=2, hidden=64, ffn=128, heads=4),
        talker=DecoderSize(layers=2, hidden=96, ffn=192, heads=6, kv_heads=2, head_size=32, rope_sections=(4, 6, 6)),
        dit=DitSize(
            hidden=64,
            heads=4,
            head_size=16,
            code_embedding=32,
            speaker=24,
            encoder=16,
            encoder_channels=(32, 32, 32, 32, 96),
            encoder_attention=16,
            encoder_squeeze=16,
        ),
        vocoder=128,
        voice_frames=60,
        dtype="float32",
    ),
    "small": Size(
        thinker=DecoderSize(layers=6, hidden=256, ffn=768, heads=8, kv_heads=2, head_size=32, rope_sections=(4, 6, 6)),
        vision=VisionSize(layers=4, hidden=128, ffn=256, heads=4, full_attention=(1, 3)),
        audio=AudioSize(layers=3, hidden=128, ffn=512, heads=4),
        talker=DecoderSize(layers=4, hidden=192, ffn=512, heads=8, kv_heads=2, head_size=32, rope_sections=(4, 6, 6)),
        dit=DitSize(
            hidden=128,
            heads=4,
            head_size=32,
            code_embedding=64,
            speaker=64,
            encoder=32,
            encoder_channels=(64, 64, 64, 64, 192),
            encoder_attention=32,
            encoder_squeeze=32,
        ),
        vocoder=256,
        voice_frames=120,
        dtype="float32",
    ),
    "100m": Size(
        thinker=DecoderSize(layers=16, hidden=1024, ffn=2112, heads=16, kv_heads=4, head_size=64, rope_sections=(8, 12, 12)),
        vision=VisionSize(layers=8, hidden=384, ffn=1024, heads=6, full_attention=(3, 7)),
        audio=AudioSize(layers=6, hidden=384, ffn=1536, heads=6),
        talker=DecoderSize(layers=8, hidden=512, ffn=1408, heads=12, kv_heads=4, head_size=64, rope_sections=(8, 12, 12)),
        dit=DitSize(
            hidden=256,
            heads=4,
            head_size=64,
            code_embedding=128,
            speaker=192,
            encoder=128,
            encoder_channels=(256, 256, 256, 256, 768),
            encoder_attention=64,
            encoder_squeeze=64,
        ),
        vocoder=512,
        voice_frames=400,
        dtype="bfloat16",
    ),
}


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids that the config names. speakers: by voice, the token that selects it for the Talker. rows: rows of the embedding."""

    pad: int
    im_start: int
    im_end: int
    audio: int
    audio_bos: int
    audio_eos: int
    vision_bos: int
    vision_eos: int
    vision_pad: int
    image: int
    video: int
    user: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    speakers: Mapping[str, int]
    rows: int


def config(size: Size, ids: Ids, dtype: str) -> dict[str, Any]:
    """The contents of config.json. dtype: "float32" or "bfloat16"."""
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "enable_audio_output": True,
        "enable_talker": True,
        "model_type": "qwen2_5_omni",
        "talker_config": _talker(size, ids, dtype),
        "thinker_config": _thinker(size, ids, dtype),
        "token2wav_config": _token2wav(size),
        "torch_dtype": dtype,
        "transformers_version": "4.50.0.dev0",
    }


def _decoder(size: DecoderSize) -> dict[str, Any]:
    """The values of a decoder in the configs of Thinker and Talker."""
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "init_std": 0.02,
        "initializer_range": 0.02,
        "intermediate_size": size.ffn,
        "max_position_embeddings": 32768,
        "max_window_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": list(size.rope_sections), "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }


def _media(ids: Ids) -> dict[str, Any]:
    """The values about media in the configs of Thinker and Talker."""
    return {
        "audio_end_token_id": ids.audio_eos,
        "audio_start_token_id": ids.audio_bos,
        "audio_token_index": ids.audio,
        "image_token_index": ids.image,
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "video_token_index": ids.video,
        "vision_end_token_id": ids.vision_eos,
        "vision_start_token_id": ids.vision_bos,
    }


def _thinker(size: Size, ids: Ids, dtype: str) -> dict[str, Any]:
    audio, vision = size.audio, size.vision
    return {
        **_media(ids),
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "audio_config": {
            "activation_dropout": 0.0,
            "activation_function": "gelu",
            "attention_dropout": 0.0,
            "d_model": audio.hidden,
            "dropout": 0.0,
            "encoder_attention_heads": audio.heads,
            "encoder_ffn_dim": audio.ffn,
            "encoder_layers": audio.layers,
            "init_std": 0.02,
            "initializer_range": 0.02,
            "max_source_positions": 1500,
            "model_type": "qwen2_5_omni_audio_encoder",
            "n_window": 100,
            "num_hidden_layers": audio.layers,
            "num_mel_bins": 128,
            "output_dim": size.thinker.hidden,
            "scale_embedding": False,
        },
        "bos_token_id": ids.im_start,
        "eos_token_id": ids.im_end,
        "ignore_index": -100,
        "init_std": 0.02,
        "initializer_range": 0.02,
        "model_type": "qwen2_5_omni_thinker",
        "pad_token_id": ids.pad,
        "text_config": {**_decoder(size.thinker), "model_type": "qwen2_5_omni_text", "vocab_size": ids.rows},
        "torch_dtype": dtype,
        "user_token_id": ids.user,
        "vision_config": {
            "depth": vision.layers,
            "embed_dim": vision.hidden,
            "fullatt_block_indexes": list(vision.full_attention),
            "hidden_act": "silu",
            "hidden_size": vision.hidden,
            "in_channels": 3,
            "in_chans": 3,
            "init_std": 0.02,
            "initializer_range": 0.02,
            "intermediate_size": vision.ffn,
            "model_type": "qwen2_5_omni_vision_encoder",
            "num_heads": vision.heads,
            "out_hidden_size": size.thinker.hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 25,
            "window_size": 112,
        },
        "vision_token_id": ids.vision_pad,
    }


def _talker(size: Size, ids: Ids, dtype: str) -> dict[str, Any]:
    return {
        **_media(ids),
        **_decoder(size.talker),
        "architectures": ["Qwen2OmniTalkerForConditionalGeneration"],
        "embedding_size": size.thinker.hidden,
        "head_dim": size.talker.head_size,
        "model_type": "qwen2_5_omni_talker",
        "spatial_merge_size": 2,
        "torch_dtype": dtype,
        "tts_codec_end_token_id": CODES_END,
        "tts_codec_mask_token_id": 8296,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_start_token_id": 8293,
        "tts_text_end_token_id": ids.tts_eos,
        "tts_text_pad_token_id": ids.tts_pad,
        "tts_text_start_token_id": ids.tts_bos,
        "vocab_size": ITEMS,
    }


def _token2wav(size: Size) -> dict[str, Any]:
    """The part of config.json for Code2Wav: the flow (dit_config) and the vocoder (bigvgan_config)."""
    dit = size.dit
    return {
        "bigvgan_config": {
            "mel_dim": MEL_BINS,
            "model_type": "qwen2_5_omni_bigvgan",
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
            "resblock_kernel_sizes": [3, 7, 11],
            "upsample_initial_channel": size.vocoder,
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
            "upsample_rates": [5, 3, 2, 2, 2, 2],
            "use_bias_at_final": False,
        },
        "dit_config": {
            "block_size": 24,
            "depth": 22,
            "dim": dit.hidden,
            "dropout": 0.1,
            "emb_dim": dit.code_embedding,
            "enc_attention_channels": dit.encoder_attention,
            "enc_channels": list(dit.encoder_channels),
            "enc_dilations": [1, 2, 3, 4, 1],
            "enc_dim": dit.encoder,
            "enc_emb_dim": dit.speaker,
            "enc_kernel_sizes": [5, 3, 3, 3, 1],
            "enc_res2net_scale": 2,
            "enc_se_channels": dit.encoder_squeeze,
            "ff_mult": 2,
            "head_dim": dit.head_size,
            "heads": dit.heads,
            "hidden_size": dit.hidden,
            "look_ahead_layers": [10],
            "look_backward_layers": [0, 20],
            "max_position_embeddings": 32768,
            "mel_dim": MEL_BINS,
            "model_type": "qwen2_5_omni_dit",
            "num_attention_heads": dit.heads,
            "num_embeds": CODE_EMBEDDINGS,
            "num_hidden_layers": 22,
            "repeats": 2,
            "rope_theta": 10000.0,
            "torch_dtype": "float32",
        },
        "model_type": "qwen2_5_omni_token2wav",
    }
