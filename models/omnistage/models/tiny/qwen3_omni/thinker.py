"""The Thinker of `make-tiny qwen3-omni`: its config in the published form, and the shapes of its weights. All values that are not in a size
are as published for Qwen/Qwen3-Omni-30B-A3B-Instruct: 128 mel bins, chunks of a second, patches of 16 x 16 x 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from omnistage.models.tiny.omni import published_name
from omnistage.models.tiny.qwen3_omni.experts import experts_apart
from omnistage.models.tiny.qwen3_omni.sizes import MEL_BINS, AudioSize, TextSize, ThinkerSize, VisionSize
from omnistage.models.tiny.qwen3_omni.tokenizer import MAX_TOKENS, Ids
from omnistage.models.tiny.weights import state_of


def config(size: ThinkerSize, ids: Ids, dtype: str) -> dict[str, Any]:
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


def weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
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
