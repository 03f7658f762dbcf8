"""The Talker of `make-tiny qwen3-omni`: its part of config.json in the published form, and the names and shapes of its weights. All values
that are not in a size are as published: the last 1024 items of the Talker are no codes, and its special items stand there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

from omnistage.models.tiny.qwen3_omni.experts import experts_apart
from omnistage.models.tiny.qwen3_omni.sizes import RESERVED, SPEAKERS, SPECIAL, TalkerSize
from omnistage.models.tiny.weights import state_of


def config(size: TalkerSize, thinker_hidden: int, accept_hidden_layer: int, ids: Mapping[str, int]) -> dict[str, Any]:
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


def weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by published name. config: as from `config`."""
    state = state_of(lambda: Qwen3OmniMoeTalkerForConditionalGeneration(Qwen3OmniMoeTalkerConfig(**config)))
    return {name: tuple(value.shape) for name, value in published_weights(state).items()}


def published_weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of Transformers' Talker by their published names."""
    return experts_apart({f"talker.{name}": value for name, value in state.items()})
