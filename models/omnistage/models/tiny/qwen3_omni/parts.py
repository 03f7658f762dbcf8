"""The parts of `make-tiny qwen3-omni`: tokenizer, Thinker, Talker and Code2Wav, each with its part of config.json in the published form,
and the names and shapes of its weights. The tokenizer has any vocabulary, with the special tokens and the chat form of Qwen3-Omni.

All values that are not in a size are as published for Qwen/Qwen3-Omni-30B-A3B-Instruct: 128 mel bins, chunks of a second, patches of 16 x
16 x 2; the last 1024 items of the Talker are no codes, and its special items stand there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeTalkerConfig,
    Qwen3OmniMoeThinkerConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeTalkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from omnistage.models.text.answer import CLOSES, OPENS
from omnistage.models.tiny.makers import write_json
from omnistage.models.tiny.omni import QWEN_ENTRIES, QWEN_ROWS, published_name, template_of
from omnistage.models.tiny.qwen3_omni.sizes import (
    MEL_BINS,
    RESERVED,
    SPEAKERS,
    SPECIAL,
    AudioSize,
    TalkerSize,
    TextSize,
    ThinkerSize,
    VisionSize,
)
from omnistage.models.tiny.tokenizer import ORDINARY, VISION_SPECIAL, ByteVocabulary, TokenizerDesign, write_files
from omnistage.models.tiny.weights import state_of

WRITTEN = (*ORDINARY, "<tool_response>", "</tool_response>", OPENS, CLOSES)
SPOKEN = (*("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),)
"""Special tokens that stand last in the published vocabulary."""

ROLES = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""The names by which Transformers' processor asks for tokens."""

TEMPLATE = template_of(
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|audio_start|><|audio_pad|><|audio_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)

THINKING_TEMPLATE = TEMPLATE.replace(
    "{{- message['content'] -}}",
    """\
{%- if message['role'] == 'assistant' -%}
{{- message['content'].split('CLOSES')[-1].lstrip('\\n') -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}""".replace("CLOSES", CLOSES),
).replace("assistant\\n' -}}", f"assistant\\n{OPENS}\\n' -}}}}")
"""The template of Thinking: an answer begins within a thought, and the thoughts of earlier answers are left out."""

MAX_TOKENS = 131072
DESIGN = TokenizerDesign(VISION_SPECIAL, MAX_TOKENS, WRITTEN, SPOKEN, ROLES, TEMPLATE, "Qwen3OmniMoeProcessor", repeats=False)


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids that the config names. rows: number of rows of the embedding."""

    im_start: int
    im_end: int
    system: int
    user: int
    assistant: int
    image: int
    video: int
    audio: int
    vision_start: int
    vision_end: int
    audio_start: int
    audio_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    rows: int


def write_tokenizer(directory: Path, vocabulary: ByteVocabulary, template: str = TEMPLATE) -> Ids:
    """Write the tokenizer's files in the published layout. Returns the ids that the config must name."""
    added = write_files(directory, vocabulary, replace(DESIGN, template=template))
    write_json(directory / "chat_template.json", {"chat_template": template})
    words = {name: vocabulary.entries[name] for name in ("system", "user", "assistant")}
    marks = {
        **{name: f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "vision_end", "audio_start", "audio_end")},
        **{name: f"<|{name}_pad|>" for name in ("image", "video", "audio")},
        "tts_pad": "<tts_pad>",
        "tts_bos": "<tts_text_bos>",
        "tts_eos": "<tts_text_eod>",
    }
    # The last rows of the embedding belong to no token, as in the published embedding.
    rows = QWEN_ROWS if len(vocabulary.entries) == QWEN_ENTRIES else (max(added.values()) // 64 + 2) * 64
    return Ids(**words, **{name: added[mark] for name, mark in marks.items()}, rows=rows)


# The Thinker -------------------------------------------------------------------------------------------------------------------------


def thinker_config(size: ThinkerSize, ids: Ids, dtype: str) -> dict[str, Any]:
    """The Thinker's part of config.json. dtype: "float32" or "bfloat16"."""
    return {
        "audio_config": _audio(size.audio, size.text.hidden),
        "audio_end_token_id": ids.audio_end,
        "audio_start_token_id": ids.audio_start,
        "audio_token_id": ids.audio,
        "dtype": dtype,
        "image_token_id": ids.image,
        "initializer_range": 0.02,
        "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "text_config": _text(size.text, ids),
        "user_token_id": ids.user,
        "video_token_id": ids.video,
        "vision_config": _vision(size.vision, size.text.hidden),
        "vision_end_token_id": ids.vision_end,
        "vision_start_token_id": ids.vision_start,
    }


def thinker_weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by published name. config: as from `config`."""
    state = state_of(lambda: Qwen3OmniMoeThinkerForConditionalGeneration(Qwen3OmniMoeThinkerConfig(**config)))
    return {
        name: tuple(value.shape)
        for name, value in experts_apart({published_name(f"thinker.{name}"): value for name, value in state.items()}).items()
    }


def _text(size: TextSize, ids: Ids) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": size.head_size,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.expert,
        "max_position_embeddings": MAX_TOKENS // 2,
        "mlp_only_layers": [],
        "model_type": "qwen3_omni_moe_text",
        "moe_intermediate_size": size.expert,
        "norm_topk_prob": True,
        "num_attention_heads": size.heads,
        "num_experts": size.experts,
        "num_experts_per_tok": size.chosen,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"interleaved": True, "mrope_interleaved": True, "mrope_section": list(size.rope_sections), "rope_type": "default"},
        "rope_theta": 1000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_qk_norm": True,
        "use_sliding_window": False,
        "vocab_size": ids.rows,
    }


def _vision(size: VisionSize, output: int) -> dict[str, Any]:
    """The values of the picture encoder. output: width of the rows that it makes."""
    return {
        "deepstack_visual_indexes": list(size.deepstack),
        "depth": size.layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": size.hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": size.ffn,
        "model_type": "qwen3_omni_moe_vision_encoder",
        "num_heads": size.heads,
        "num_position_embeddings": size.grid**2,
        "out_hidden_size": output,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _audio(size: AudioSize, output: int) -> dict[str, Any]:
    """The values of the sound encoder. output: width of the rows that it makes."""
    return {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "conv_chunksize": 500,
        "d_model": size.hidden,
        "downsample_hidden_size": size.channels,
        "dropout": 0.0,
        "encoder_attention_heads": size.heads,
        "encoder_ffn_dim": size.ffn,
        "encoder_layers": size.layers,
        "initializer_range": 0.02,
        "max_source_positions": 1500,
        "model_type": "qwen3_omni_moe_audio_encoder",
        "n_window": 50,
        "n_window_infer": size.window,
        "num_hidden_layers": size.layers,
        "num_mel_bins": MEL_BINS,
        "output_dim": output,
        "scale_embedding": False,
    }


# The Talker --------------------------------------------------------------------------------------------------------------------------


def talker_config(size: TalkerSize, thinker_hidden: int, accept_hidden_layer: int, ids: Mapping[str, int]) -> dict[str, Any]:
    """The Talker's part of config.json. thinker_hidden: width of the Thinker's rows. ids: token ids of the Thinker's config."""
    common = {"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6}
    common |= {"max_position_embeddings": 32768, "rope_theta": 1_000_000, "sliding_window": None, "tie_word_embeddings": False}
    return {
        "accept_hidden_layer": accept_hidden_layer,
        **{name: size.codes + place for name, place in SPECIAL.items()},
        "code_predictor_config": {
            **common,
            "head_dim": size.predictor_head_size,
            "hidden_size": size.hidden,
            "intermediate_size": size.predictor_ffn,
            "max_window_layers": 28,
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "num_attention_heads": size.predictor_heads,
            "num_code_groups": size.groups,
            "num_hidden_layers": size.predictor_layers,
            "num_key_value_heads": size.predictor_kv_heads,
            "rope_scaling": None,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": size.codes,
        },
        "initializer_range": 0.02,
        "model_type": "qwen3_omni_moe_talker",
        "num_code_groups": size.groups,
        "output_router_logits": False,
        "position_id_per_seconds": 13,
        "spatial_merge_size": 2,
        "speaker_id": {name: size.codes + place for name, place in SPEAKERS.items()},
        "text_config": {
            **common,
            "decoder_sparse_step": 1,
            "head_dim": size.head_size,
            "hidden_size": size.hidden,
            "intermediate_size": size.between,
            "mlp_only_layers": [],
            "model_type": "qwen3_omni_moe_talker_text",
            "moe_intermediate_size": size.expert,
            "norm_topk_prob": True,
            "num_attention_heads": size.heads,
            "num_experts": size.experts,
            "num_experts_per_tok": size.chosen,
            "num_hidden_layers": size.layers,
            "num_key_value_heads": size.kv_heads,
            "rope_scaling": {"interleaved": True, "mrope_section": list(size.sections), "rope_type": "default", "type": "default"},
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": size.shared,
            "use_cache": True,
            "vocab_size": size.codes + RESERVED,
        },
        "thinker_hidden_size": thinker_hidden,
        **ids,
    }


def talker_weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by published name. config: as from `config`."""
    state = state_of(lambda: Qwen3OmniMoeTalkerForConditionalGeneration(Qwen3OmniMoeTalkerConfig(**config)))
    return {name: tuple(value.shape) for name, value in published_weights(state).items()}


def published_weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of Transformers' Talker by their published names."""
    return experts_apart({f"talker.{name}": value for name, value in state.items()})


def experts_apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split weights that Transformers 5 keeps for all experts of a layer, [experts, rows, columns], into one for each; the rest stays."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        experts, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for number, pair in enumerate(value):
                gate, up = pair.chunk(2)
                tensors |= {f"{experts}.{number}.gate_proj.weight": gate, f"{experts}.{number}.up_proj.weight": up}
        elif part == "down_proj":
            tensors |= {f"{experts}.{number}.down_proj.weight": down for number, down in enumerate(value)}
        else:
            tensors[name] = value
    return tensors


# Code2Wav ----------------------------------------------------------------------------------------------------------------------------


CODE2WAV_PREFIX = "code2wav."

CODE2WAV_GAINS = ((".q_proj.", 2.0), (".k_proj.", 2.0), (".conv1.", 0.6), (".conv2.", 0.4))
"""By how much matrices enlarge their input, by a part of their names; others by 1. Large gains make attention sharp, so frames differ."""

LAST_GAIN = 0.05
"""Gain of the last convolution: it keeps the sound below full scale, where all sounds would be equal."""

ADDED_GAIN = 0.5
"""Gain of the output of a layer or a ConvNeXt block, which is added to its input."""


def code2wav_config(codebooks: int = 16, codes: int = 2048) -> dict[str, Any]:
    """Code2Wav's part of config.json, with frames as long as published. codebooks: codes of a frame. codes: how many ids a codebook has."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "codebook_size": codes,
        "decoder_dim": 80,
        "hidden_act": "silu",
        "hidden_size": 40,
        "initializer_range": 0.02,
        "intermediate_size": 56,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "model_type": "qwen3_omni_moe_code2wav",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_quantizers": codebooks,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "sliding_window": 13,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def code2wav_weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by published name. config: as from `config`."""
    state = state_of(lambda: Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**config)))
    return {CODE2WAV_PREFIX + name: tuple(value.shape) for name, value in state.items()}


def code2wav_distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of the numbers of a weight, with which the sound is neither silent nor at full scale and depends on all codes."""
    owner, part = name.split(".")[-2:]
    if part in ("bias", "alpha", "beta"):
        return 0.0, 0.1
    if part in ("scale", "gamma"):
        return ADDED_GAIN, 0.1
    if len(shape) == 1:  # a norm
        return 1.0, 0.1
    if owner == "code_embedding":
        return 0.0, 4.0  # A frame has the mean of sixteen of them.
    # In the decoder two steps of an upsampling meet in each sample; before it they do not.
    inputs = shape[0] * (2 if ".block.1." in name else 1) if _is_transposed(name) else math.prod(shape[1:])
    gain = LAST_GAIN if len(shape) == 3 and shape[0] == 1 else next((gain for part, gain in CODE2WAV_GAINS if part in name), 1.0)
    return 0.0, gain / math.sqrt(inputs)


def _is_transposed(name: str) -> bool:
    return ".block.1." in name or (".upsample." in name and ".0.conv." in name)
