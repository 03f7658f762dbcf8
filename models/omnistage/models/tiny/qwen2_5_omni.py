"""Makes a checkpoint of Qwen2.5-Omni with random weights, in the published files: for tests, and for trials that need no sense. Its
tokenizer has any vocabulary, with the special tokens and the chat form of Qwen2.5-Omni.

The weights are drawn so that the model's answers are worth comparing: finite, different for different media, and not one token for ever. A
weight depends only on the seed and its own name, and is made by exact operations, so that every machine makes the same bytes.

All values that are not in a size are as published for Qwen/Qwen2.5-Omni-7B. Most of these are the defaults of Transformers' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.makers import CheckpointOrder
from omnistage.models.tiny.omni import COLOURS, Values, config_of, decoder_gains, media_ids, write_ordered, write_settings
from omnistage.models.tiny.tokenizer import QWEN_ROWS, ROLES, SYSTEM, TokenizerDesign, has_qwen, template_of
from omnistage.models.tiny.weights import WeightDistribution, noise, published_weights, write_weights

PREPROCESSOR: Values = {**COLOURS, "processor_class": "Qwen2_5OmniProcessor"}
"""Entries of preprocessor_config.json that are added to the entries for both families."""

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|box_end|>", "<|quad_start|>"),
    *("<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>"),
)
TOKENS = ("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>")
"""The tokens of ROLES."""

TEMPLATE = SYSTEM + template_of(
    "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|audio_bos|><|AUDIO|><|audio_eos|>", "<|vision_bos|><|VIDEO|><|vision_eos|>"
)
DESIGN = TokenizerDesign(SPECIAL, 32768, roles=dict(zip(ROLES, TOKENS, strict=True)), template=TEMPLATE, processor="Qwen2_5OmniProcessor")

SPEAKERS = ("Chelsie", "Ethan")
QWEN_TTS = 151859
QWEN_SPEAKERS = 151872
"""Ids of the Talker that are no tokens, as published: the first of three that frame a text, and the first speaker."""

# The sizes ---------------------------------------------------------------------------------------------------------------------------


SIZES: Mapping[str, Values] = {
    "tiny": {
        # All heads together are so wide that attention runs as it does in a model of any size.
        "thinker": {"layers": 3, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2},
        "talker": {"layers": 2, "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
        "vision": {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "fullatt_block_indexes": [1]},
        "audio": {"encoder_layers": 2, "d_model": 64, "encoder_ffn_dim": 128, "encoder_attention_heads": 4},
        "dit": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "emb_dim": 32, "enc_emb_dim": 24},
        "encoder": {"enc_dim": 16, "enc_channels": [32, 32, 32, 32, 96], "enc_attention_channels": 16, "enc_se_channels": 16},
        "sound": {"vocoder": 128, "voice_frames": 60},
        "dtype": "float32",
    },
    "small": {
        "thinker": {"layers": 6, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2},
        "talker": {"layers": 4, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
        "vision": {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "fullatt_block_indexes": [1, 3]},
        "audio": {"encoder_layers": 3, "d_model": 128, "encoder_ffn_dim": 512, "encoder_attention_heads": 4},
        "dit": {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "emb_dim": 64, "enc_emb_dim": 64},
        "encoder": {"enc_dim": 32, "enc_channels": [64, 64, 64, 64, 192], "enc_attention_channels": 32, "enc_se_channels": 32},
        "sound": {"vocoder": 256, "voice_frames": 120},
        "dtype": "float32",
    },
    "100m": {
        "thinker": {"layers": 16, "hidden_size": 1024, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 4},
        "talker": {"layers": 8, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 12, "num_key_value_heads": 4},
        "vision": {"depth": 8, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "fullatt_block_indexes": [3, 7]},
        "audio": {"encoder_layers": 6, "d_model": 384, "encoder_ffn_dim": 1536, "encoder_attention_heads": 6},
        "dit": {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "emb_dim": 128, "enc_emb_dim": 192},
        "encoder": {"enc_dim": 128, "enc_channels": [256, 256, 256, 256, 768], "enc_attention_channels": 64, "enc_se_channels": 64},
        "sound": {"vocoder": 512, "voice_frames": 400},
        "dtype": "bfloat16",
    },
}
"""Names as in the sections of config.json. layers: of a decoder. dit: the 22 layers that
make mel frames of codes. encoder: their part for examples of voices. vocoder: channels before six upsamplings, each of which halves them.
voice_frames: mel frames of a voice's example."""


def config(size: Values, ids: Mapping[str, int], dtype: str) -> dict[str, Any]:
    """The contents of config.json. size: of SIZES. ids: of tokens. dtype: "float32" or "bfloat16"."""
    tts, speakers = talker_ids(ids)
    # A built vocabulary has rows for all ids, to a multiple of 64.
    rows = QWEN_ROWS if has_qwen(ids) else -(-(max(speakers.values()) + 1) // 64) * 64
    media = media_ids(ids, TOKENS, "index")
    hidden = size["thinker"]["hidden_size"]
    head_size = hidden // size["thinker"]["num_attention_heads"]  # of the Talker too
    vision, dit = size["vision"], {**size["dit"], **size["encoder"]}
    thinker = {
        **media,
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "audio_config": {**size["audio"], **INIT, "num_hidden_layers": size["audio"]["encoder_layers"], "output_dim": hidden},
        **{f"{name}_token_id": ids[f"<|{token}|>"] for name, token in (("bos", "im_start"), ("eos", "im_end"), ("pad", "endoftext"))},
        "ignore_index": -100,
        "text_config": {**_decoder(size["thinker"], head_size), "tie_word_embeddings": False, "vocab_size": rows},
        "torch_dtype": dtype,
        "user_token_id": ids["user"],
        "vision_token_id": ids["<|vision_pad|>"],
        "vision_config": {**vision, **INIT, **VISION, "embed_dim": vision["hidden_size"], "out_hidden_size": hidden},
        **INIT,
    }
    talker = {
        **media,
        **_decoder(size["talker"], head_size),
        "architectures": ["Qwen2OmniTalkerForConditionalGeneration"],
        "embedding_size": hidden,
        "head_dim": head_size,
        "torch_dtype": dtype,
        **{f"tts_text_{name}_token_id": tts + index for index, name in enumerate(("pad", "start", "end"))},
    }
    values = {
        "architectures": ["Qwen2_5OmniModel"],
        "enable_talker": True,
        "talker_config": talker,
        "thinker_config": thinker,
        "token2wav_config": {
            "bigvgan_config": {**VOCODER, "upsample_initial_channel": size["sound"]["vocoder"]},
            "dit_config": {**DIT, **dit, "dim": dit["hidden_size"], "heads": dit["num_attention_heads"]},
        },
        "torch_dtype": dtype,
        "transformers_version": "4.50.0.dev0",
    }
    return config_of(Qwen2_5OmniConfig, values)


INIT: Values = {"init_std": 0.02}
VISION: Values = {"in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 25}
VOCODER: Values = {"resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "use_bias_at_final": False}
DIT: Values = {"depth": 22, "rope_theta": 10000.0, "torch_dtype": "float32"}
"""Published values that are no defaults of Transformers, by section."""


def _decoder(size: Values, head_size: int) -> dict[str, Any]:
    """The values of a decoder in the configs of Thinker and Talker. Pairs of components of a head are rotated by the position in time, in
    height, or in width; the shares of these three are the published ones."""
    values, pairs = dict(size), head_size // 2
    layers = values.pop("layers")
    sections = [pairs // 4, pairs * 3 // 8, pairs * 3 // 8]
    return {
        **values,
        **INIT,
        **dict.fromkeys(("max_window_layers", "num_hidden_layers"), layers),
        "rope_scaling": {"mrope_section": sections, "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
    }


def talker_ids(ids: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """(the first of three ids that frame the Talker's text, the ids of its speakers), which are no tokens: as published in Qwen's
    vocabulary, otherwise after the last token."""
    tts = QWEN_TTS if has_qwen(ids) else len(ids)
    first = QWEN_SPEAKERS if has_qwen(ids) else tts + 3
    return tts, {name: first + index for index, name in enumerate(SPEAKERS)}


# The weights -------------------------------------------------------------------------------------------------------------------------


CONSTANTS = {
    r"\.bias$": (0.0, 0.1),
    r"\.act\.": (0.0, 0.1),  # the snakes of the vocoder: logarithms of their frequencies and inverse heights
    r"\.(embed_tokens|audio_bos_eos_token|codec_embed)\.": (0.0, 1.0),
}
GAINS = {r"\.(lm_head|codec_head)\.": 3.0, r"\.self_attn\.(q|k)_proj\.": 2.1, r"\.resblocks\.": 0.5, r"\.conv_post\.": 0.2}
"""Large gains in attention make it sharp, so an answer does not repeat one token; small gains in the vocoder keep its sound below full
scale. Ids of the heads that are no token or no code are as likely as any other, as in published checkpoints: a server must ban them."""
STEPS = {r"\.ups\.": 2}
DECODERS = {"thinker.model.": ("thinker_config", "text_config"), "talker.model.": ("talker_config",)}
"""The beginnings of the names of the decoders' weights, and the place of their sizes in the config."""


def make(name: str, directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder. name: of the only checkpoint. Raises FetchError if the vocabulary of Qwen cannot be fetched."""
    size = SIZES[order.size]
    dtype = order.dtype or size["dtype"]
    ids = write_ordered(directory, order, DESIGN, progress)
    values = config(size, ids, dtype)
    write_settings(directory, values, PREPROCESSOR)
    torch.save(_speakers(size, ids, order.seed), directory / "spk_dict.pt")
    distribution = WeightDistribution(CONSTANTS, {**GAINS, **decoder_gains(values, DECODERS)}, STEPS)
    state = published_weights(Qwen2_5OmniForConditionalGeneration, values)
    types = {"^token2wav": torch.float32, "": getattr(torch, dtype)}  # Code2Wav is always float32, as published.
    write_weights(directory, state, order.seed, distribution, types, progress)


def _speakers(size: Values, ids: Mapping[str, int], seed: int) -> dict[str, dict[str, Any]]:
    """The contents of spk_dict.pt: for each voice its token, vector [1, speaker], and an example's mel frames [1, frames, 80], float32."""
    return {
        name: {
            "bos_token": number,
            "cond": noise(f"{name} cond", (1, size["dit"]["enc_emb_dim"]), seed),
            "ref_mel": noise(f"{name} ref_mel", (1, size["sound"]["voice_frames"], 80), seed, 2.0) - 5.0,
        }
        for name, number in talker_ids(ids)[1].items()
    }
