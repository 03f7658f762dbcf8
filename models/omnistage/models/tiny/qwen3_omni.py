"""Makes a checkpoint of Qwen3-Omni with random weights, in the published files: for tests, and for trials that need no sense. Its tokenizer
has any vocabulary, with the special tokens and the chat form of Qwen3-Omni.

The weights are drawn so that the model's answers are worth comparing: finite, different for different media, and not one token for ever. A
weight depends only on the seed and its own name, and is made by exact operations, so that every machine makes the same bytes.

All values that are not in a size are as published for Qwen/Qwen3-Omni-30B-A3B-Instruct. Most of these are the defaults of Transformers'
classes. The last 1024 items of the Talker are no codes, and its special items stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration

from omnistage.models.reports import ShowProgress
from omnistage.models.text.answer import CLOSES, OPENS
from omnistage.models.tiny.makers import CheckpointOrder
from omnistage.models.tiny.omni import Values, config_of, decoder_gains, media_ids, write_ordered, write_settings
from omnistage.models.tiny.tokenizer import ORDINARY, QWEN_ROWS, ROLES, VISION_SPECIAL, TokenizerDesign, has_qwen, template_of
from omnistage.models.tiny.weights import State, WeightDistribution, published_weights, write_weights

PREPROCESSOR: Values = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3OmniMoeProcessor"}
"""Entries of preprocessor_config.json that are added to the entries for both families."""

TEXT_TOKENS = (*ORDINARY, "<tool_response>", "</tool_response>", OPENS, CLOSES)
TTS_TOKENS = ("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>")
"""Special tokens that stand last in the published vocabulary."""

TOKENS = (*("<|image_pad|>", "<|audio_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),)
"""The tokens of ROLES."""

TEMPLATE = template_of(
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|audio_start|><|audio_pad|><|audio_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)
_ANSWER = (
    "{%- if message['role'] == 'assistant' -%}{{- message['content'].split('CLOSES')[-1].lstrip('\\n') -}}{%- else -%}TEXT{%- endif -%}"
)
_TEXT = "{{- message['content'] -}}"
THINKING_TEMPLATE = TEMPLATE.replace(_TEXT, _ANSWER.replace("CLOSES", CLOSES).replace("TEXT", _TEXT)).replace(
    "assistant\\n' -}}", f"assistant\\n{OPENS}\\n' -}}}}"
)
"""The template of Thinking: an answer begins within a thought, and the thoughts of earlier answers are left out."""

MAX_TOKENS = 131072
DESIGN = TokenizerDesign(
    *(VISION_SPECIAL, MAX_TOKENS, TEXT_TOKENS, TTS_TOKENS, dict(zip(ROLES, TOKENS, strict=True)), TEMPLATE, "Qwen3OmniMoeProcessor"),
    repeats=False,
)

# The sizes ---------------------------------------------------------------------------------------------------------------------------


TALKER: Values = {
    "text": {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "experts": {"intermediate_size": 76, "num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "predictor": {"num_hidden_layers": 2, "intermediate_size": 136, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40},
    "shared_expert": 56,
    "codes": 160,
    "groups": 16,
}
"""The Talker of the tiny size. Names as in the sections of config.json. shared_expert: width of the expert for all rows. predictor: of
codes. codes: how many ids a codebook has. groups: codes of a frame."""

SIZES: Mapping[str, Values] = {
    "tiny": {
        "text": {"num_hidden_layers": 4, "hidden_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
        "experts": {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 80},
        "vision": {"depth": 4, "hidden_size": 80, "intermediate_size": 112, "num_heads": 5, "deepstack_visual_indexes": [0, 2]},
        "audio": {"encoder_layers": 2, "d_model": 96, "encoder_ffn_dim": 160, "encoder_attention_heads": 4},
        "convolutions": {"downsample_hidden_size": 24, "n_window_infer": 300},
        "grid": 7,
        "hidden_layer": 3,
        "talker": TALKER,
    },
    "small": {
        "text": {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 32},
        "experts": {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
        "vision": {"depth": 6, "hidden_size": 144, "intermediate_size": 320, "num_heads": 9, "deepstack_visual_indexes": [1, 3, 4]},
        "audio": {"encoder_layers": 3, "d_model": 160, "encoder_ffn_dim": 448, "encoder_attention_heads": 5},
        "convolutions": {"downsample_hidden_size": 48, "n_window_infer": 800},
        "grid": 24,
        "hidden_layer": 4,
        "talker": {
            "text": {**TALKER["text"], "num_hidden_layers": 4, "hidden_size": 192},
            "experts": {"intermediate_size": 144, "num_experts": 20, "num_experts_per_tok": 3, "moe_intermediate_size": 80},
            "predictor": {**TALKER["predictor"], "num_hidden_layers": 3, "intermediate_size": 272},
            "shared_expert": 112,
            "codes": 2048,
            "groups": 16,
        },
    },
}
"""Names as in the sections of config.json. grid: rows and columns of the picture encoder's table of positions. hidden_layer: layer of the
Thinker whose rows the Talker gets for media, as `hidden_states` of Transformers counts. talker: as TALKER."""

RESERVED = 1024
"""How many items the Talker has after its codes."""

SPECIAL = {
    **{f"codec_{name}": 100 + index for index, name in enumerate(("pad_id", "bos_id", "eos_token_id"))},
    **{f"codec_{name}_id": 107 + index for index, name in enumerate(("nothink", "think_bos", "think_eos"))},
}
"""Items by their names in the config, counted from the first item that is no code."""

SPEAKERS = {"chelsie": 253, "ethan": 254, "aiden": 255}
"""Items by voice, counted as above."""


def config(size: Values, ids: Mapping[str, int], dtype: str) -> dict[str, Any]:
    """The contents of config.json. size: of SIZES. ids: of tokens. dtype: "float32" or "bfloat16"."""
    media = {"user_token_id": ids["user"], **media_ids(ids, TOKENS, "id")}
    hidden, talker, audio = size["text"]["hidden_size"], size["talker"], {**size["audio"], **size["convolutions"]}
    # The last rows of the embedding belong to no token, as in the published embedding.
    rows = QWEN_ROWS if has_qwen(ids) else ((len(ids) - 1) // 64 + 2) * 64
    values = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "code2wav_config": code2wav_config(talker["groups"], talker["codes"]),
        "dtype": dtype,
        **{f"{name}_token_id": ids[f"<|{name}|>"] for name in ("im_start", "im_end")},
        **{f"{role}_token_id": ids[role] for role in ("system", "user", "assistant")},
        "talker_config": talker_config(talker, hidden, size["hidden_layer"], media),
        "thinker_config": {
            "audio_config": {**audio, "num_hidden_layers": audio["encoder_layers"], "output_dim": hidden},
            "dtype": dtype,
            "position_id_per_seconds": 13,
            "seconds_per_chunk": 2,
            "text_config": {
                **_decoder(size, interleaved=True, mrope_interleaved=True),
                "intermediate_size": size["experts"]["moe_intermediate_size"],
                "max_position_embeddings": MAX_TOKENS // 2,
                "shared_expert_intermediate_size": 0,
                **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), False),
                "use_qk_norm": True,
                "vocab_size": rows,
            },
            "vision_config": {**size["vision"], "num_position_embeddings": size["grid"] ** 2, "out_hidden_size": hidden},
            **media,
        },
        "transformers_version": "4.57.0.dev0",
        **{f"tts_{name}_token_id": ids[f"<tts_{token}>"] for name, token in (("pad", "pad"), ("bos", "text_bos"), ("eos", "text_eod"))},
    }
    return config_of(configs.Qwen3OmniMoeConfig, values)


def talker_config(size: Values, thinker_hidden: int, accept_hidden_layer: int, ids: Mapping[str, int]) -> dict[str, Any]:
    """The Talker's part of config.json. size: as TALKER. thinker_hidden: width of the Thinker's rows. ids: token ids of the Thinker's
    config."""
    values = {
        "accept_hidden_layer": accept_hidden_layer,
        **{name: size["codes"] + place for name, place in SPECIAL.items()},
        "code_predictor_config": {
            **size["predictor"],
            "hidden_size": size["text"]["hidden_size"],
            "num_code_groups": size["groups"],
            **dict.fromkeys(("rope_scaling", "sliding_window")),
            "rope_theta": 1_000_000,
            "use_sliding_window": False,
            "vocab_size": size["codes"],
        },
        "model_type": "qwen3_omni_moe_talker",
        "num_code_groups": size["groups"],
        "output_router_logits": False,
        "position_id_per_seconds": 13,
        "spatial_merge_size": 2,
        "speaker_id": {name: size["codes"] + place for name, place in SPEAKERS.items()},
        "text_config": {
            **_decoder(size, interleaved=True, type="default"),
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": size["shared_expert"],
            "vocab_size": size["codes"] + RESERVED,
        },
        "thinker_hidden_size": thinker_hidden,
        **ids,
    }
    return config_of(configs.Qwen3OmniMoeTalkerConfig, values)


def _decoder(size: Values, **rope: bool | str) -> dict[str, Any]:
    """The values of a decoder. rope: more entries of the object about positions. A head turns in pairs by time, height and width."""
    pairs = size["text"]["head_dim"] // 2
    height_pairs = pairs * 5 // 16  # As many pairs turn by width.
    return {
        **size["text"],
        **size["experts"],
        "mlp_only_layers": [],
        "sliding_window": None,
        "rope_scaling": {"mrope_section": [pairs - 2 * height_pairs, height_pairs, height_pairs], "rope_type": "default", **rope},
        "rope_theta": 1_000_000,
    }


def code2wav_config(codebooks: int = 16, codes: int = 2048) -> dict[str, Any]:
    """Code2Wav's part of config.json, with frames as long as published. codebooks: codes of a frame. codes: how many ids a codebook has."""
    values = {"model_type": "qwen3_omni_moe_code2wav", "codebook_size": codes, "num_quantizers": codebooks, "rope_theta": 10000}
    values |= {"decoder_dim": 80, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "sliding_window": 13}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return config_of(configs.Qwen3OmniMoeCode2WavConfig, values)


# The weights -------------------------------------------------------------------------------------------------------------------------


CONSTANTS = {
    r"\.bias$|^code2wav\..*\.(alpha|beta)$": (0.0, 0.1),
    r"^code2wav\..*\.(scale|gamma)$": (0.5, 0.1),  # of the output of a layer or a ConvNeXt block, which is added to its input
    r"^code2wav\.code_embedding\.": (0.0, 4.0),  # A frame has the mean of sixteen of them.
    r"\.(embed_tokens|pos_embed)\.|embedding": (0.0, 1.0),
}
GAINS = {
    r"^code2wav\..*\.(q|k)_proj\.": 2.0,
    r"^code2wav\..*\.conv1\.": 0.6,
    r"^code2wav\..*\.conv2\.": 0.4,
    r"^code2wav\.decoder\.[1-9]\d*\.conv\.weight": 0.05,  # the last one: it keeps the sound below full scale, where all sounds are equal
    r"lm_head\.|\.codec_head\.|\.mlp\.gate\.": 3.0,
    r"\.self_attn\.(q|k)_norm\.": 2.1,
}
"""Large gains in attention make it sharp, so that an answer does not repeat one token and frames differ. Ids of the heads that are no token
or no code are as likely as any other, as in published checkpoints: a server must ban them."""
STEPS = {r"\.block\.1\.": 2, r"\.upsample\..*\.0\.conv\.": 1}
DECODERS = {
    "thinker.model.": ("thinker_config", "text_config"),
    "talker.model.": ("talker_config", "text_config"),
    "talker.code_predictor.": ("talker_config", "code_predictor_config"),
}
"""The beginnings of the names of the decoders' weights, and the place of their sizes in the config."""


def make(name: str, directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder. name: of the checkpoint; one of a Thinker alone thinks before it answers. Raises FetchError if the
    vocabulary of Qwen cannot be fetched."""
    thinks = name == "qwen3-omni-thinking"
    ids = write_ordered(directory, order, replace(DESIGN, template=THINKING_TEMPLATE) if thinks else DESIGN, progress)
    values = config(SIZES[order.size], ids, order.dtype or "float32")
    if thinks:
        del values["talker_config"], values["code2wav_config"]
    fill(directory, {**values, "enable_audio_output": not thinks}, order.seed, progress)


def fill(directory: Path, values: Values, seed: int, progress: ShowProgress) -> None:
    """Write all files except the tokenizer's. values: the contents of config.json."""
    write_settings(directory, values, PREPROCESSOR)
    state = published_weights(Qwen3OmniMoeForConditionalGeneration, values)
    write_weights(directory, state, seed, distribution(values), {"": getattr(torch, values["dtype"])}, progress)


def distribution(config: Values) -> WeightDistribution:
    """The distribution of the weights of a checkpoint with this config.json, which may lack sections."""
    return WeightDistribution(CONSTANTS, {**GAINS, **decoder_gains(config, DECODERS)}, STEPS)


def part_weights(config: Values, state: State | None = None) -> dict[str, torch.Tensor]:
    """Weights of the Talker or of Code2Wav by their published names. config: a config.json with this section only. state: by the names of
    Transformers' whole model; None: those of the section, without memory."""
    base_config = {"talker_config": talker_config(TALKER, SIZES["tiny"]["text"]["hidden_size"], 1, {})}
    weights = published_weights(Qwen3OmniMoeForConditionalGeneration, base_config | dict(config), state)
    return {name: value for name, value in weights.items() if f"{name.partition('.')[0]}_config" in config}
