"""Makes checkpoints of the pipelines of pictures, films and sounds with random weights, in the published files: for tests, and for trials
that need no beauty. A weight depends only on the seed and its own name, and is made by exact operations, so that every machine makes the
same bytes."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from transformers.models.t5 import T5EncoderModel, T5Tokenizer
from transformers.models.umt5 import UMT5EncoderModel

from omnistage.models.diffusers.folder import mute_libraries
from omnistage.models.reports import ShowProgress
from omnistage.models.text.answer import CLOSES, OPENS
from omnistage.models.tiny.makers import CheckpointOrder, MakeError, write_json
from omnistage.models.tiny.omni import COLOURS, Values
from omnistage.models.tiny.tokenizer import ORDINARY, SYSTEM, VISION_SPECIAL, TokenizerDesign, template_of, text_of, train, write_files
from omnistage.models.tiny.weights import WeightDistribution

Part = Callable[..., Any]
"""A class with its arguments."""

HIDDEN = 32
"""Width of the text encoders of the pipelines that draw pictures: the numbers that a transformer gets for a token."""

DISTRIBUTION = WeightDistribution(
    {
        r"\.bias$": (0.0, 0.1),
        r"time_proj\.weight$|\.weights$": (0.0, 1.0),  # frequencies
        r"\.weight_g$": (0.6, 0.06),  # a length; if it were larger, each layer of a VAE of sound would be louder than the last
        r"\.gamma$": (1.0, 0.1),  # a norm
        r"(embed_tokens|shared|addition_t_embedding)\.weight$|_pad_token$": (0.0, 1.0),
    }
)


@dataclass(frozen=True, slots=True)
class Design:
    """A pipeline in one size. kind: its class. encoder: a T5 for films and sounds; None: Qwen2.5-VL for a pipeline that sees pictures, else
    Qwen3. parts: others that have weights. processor: the part that prepares pictures; "" for none. index: other entries of
    model_index.json."""

    kind: str
    transformer: Part
    vae: Part
    scheduler: partial[Any]
    encoder: Part | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    processor: str = ""
    index: Values = field(default_factory=dict)


def make(name: str, directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder with the checkpoint of one of DESIGNS. Raises MakeError for the real vocabulary, which is too large."""
    if order.tokenizer != "built":
        raise MakeError(f"tokenizer {order.tokenizer!r}: a checkpoint of {name} can have built")
    design, dtype = DESIGNS[name](order.size), getattr(torch, order.dtype or "float32")
    progress("writing the tokenizer", 0.0)
    encoder, tokenizer = _write_t5(directory, design.encoder, name) if design.encoder else _write_qwen(directory, design)
    progress("writing the tokenizer", 1.0)
    components = {"tokenizer": ["transformers", tokenizer], **design.index}
    if design.processor:
        components[design.processor] = ["transformers", PROCESSOR]
    with mute_libraries():
        design.scheduler().save_pretrained(directory / "scheduler")
        components["scheduler"] = ["diffusers", design.scheduler.func.__name__]
        parts = {"text_encoder": encoder, "transformer": design.transformer, "vae": design.vae, **design.parts}
        for index, (part, build) in enumerate(parts.items()):
            with torch.device("meta"):
                model = build()
            fill(model, part, order.seed, dtype)
            model.save_pretrained(directory / part)
            library, kind, *modules = type(model).__module__.split(".")
            components[part] = [modules[0] if kind == "pipelines" else library, type(model).__name__]
            progress("writing the weights", (index + 1) / len(parts))
    names = {"_class_name": design.kind, "_diffusers_version": diffusers.__version__}
    write_json(directory / "model_index.json", {**names, **dict(sorted(components.items()))})


def fill(model: Any, part: str, seed: int, dtype: torch.dtype) -> None:
    """Give all weights of a part their random values, in `dtype`. part: its name, which the numbers depend on."""
    shapes = ((name, tuple(value.shape)) for name, value in model.state_dict().items())
    weights = {name: DISTRIBUTION.draw(f"{part} {name}", shape, seed).to(dtype) for name, shape in shapes}
    model.load_state_dict(weights, assign=True)
    if "shared.weight" in weights:
        model.tie_weights()  # The embedding of a T5 has two names, which are filled one after the other.


# The parts and their sizes -----------------------------------------------------------------------------------------------------------
# They keep the features that the published code relies on and by which the published parts differ: 8 x 8 pixels a latent, patches of 14 x
# 14 x 2 of the text encoder that sees, the noise schedule, how many times a sound is refined. "odd" changes everything that may change.


QWEN_TRANSFORMERS: Mapping[str, Values] = {
    "tiny": {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)},
    "small": {"num_layers": 6, "attention_head_dim": 32, "num_attention_heads": 6, "axes_dims_rope": (8, 12, 12)},
}
Z_TRANSFORMERS: Mapping[str, Values] = {
    "tiny": {"dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [8, 12, 12]},
    "small": {"dim": 256, "n_layers": 6, "n_refiner_layers": 1, "n_heads": 8, "n_kv_heads": 8, "axes_dims": [8, 12, 12]},
}
LONGCAT_TRANSFORMERS: Mapping[str, Values] = {
    "tiny": {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": [4, 6, 6]},
    "small": {"num_layers": 2, "num_single_layers": 10, "attention_head_dim": 32, "num_attention_heads": 6, "axes_dims_rope": [8, 12, 12]},
}
QWEN_VAE: Values = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
_BLOCKS = {"block_out_channels": [8, 8, 16, 16], "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
_SCALE = {"sample_size": 1024, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_post_quant_conv": False, "use_quant_conv": False}
KL_VAE: Values = {**_BLOCKS, **_SCALE, "latent_channels": 16, "norm_num_groups": 1}
"""A group has all channels: groups of one channel each would take flat colour away."""


def _qwen(kind: str, size: str, vae: Values | None = None, **special: bool) -> Design:
    """A pipeline of Qwen-Image. vae, special: arguments of VAE and transformer in addition to the usual ones."""
    transformer = {**QWEN_TRANSFORMERS[size], "joint_attention_dim": HIDDEN, **special}
    schedule = {"max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02, "use_dynamic_shifting": True}
    return Design(
        kind,
        partial(diffusers.QwenImageTransformer2DModel, **transformer),
        partial(diffusers.AutoencoderKLQwenImage, **QWEN_VAE, **(vae or {})),
        partial(diffusers.FlowMatchEulerDiscreteScheduler, **schedule),
        processor="" if kind == "QwenImagePipeline" else "processor",
    )


def _z_image(size: str) -> Design:
    return Design(
        "ZImagePipeline",
        partial(diffusers.ZImageTransformer2DModel, **Z_TRANSFORMERS[size], cap_feat_dim=HIDDEN),
        partial(diffusers.AutoencoderKL, **KL_VAE),
        partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=3.0),
    )


def _longcat(kind: str, size: str) -> Design:
    transformer = {**LONGCAT_TRANSFORMERS[size], "joint_attention_dim": HIDDEN, "pooled_projection_dim": HIDDEN}
    return Design(
        kind,
        partial(diffusers.LongCatImageTransformer2DModel, **transformer),
        partial(diffusers.AutoencoderKL, **KL_VAE),
        partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=3.0, use_dynamic_shifting=True),
        processor="text_processor",
    )


def _encoder(kind: Any, **values: Any) -> Any:
    """A text encoder. kind: its class. values: of its config."""
    return kind(kind.config_class(**values))


T5: Mapping[str, Values] = {
    **{size: {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2} for size in ("tiny", "small")},
    "odd": {"d_model": 20, "d_kv": 6, "d_ff": 28, "num_layers": 3, "num_heads": 3},
}
WAN: Mapping[str, Values] = {
    "tiny": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 48, "freq_dim": 32},
    "small": {"num_layers": 6, "num_attention_heads": 8, "attention_head_dim": 32, "ffn_dim": 1408, "freq_dim": 256},
    "odd": {"num_layers": 3, "num_attention_heads": 3, "attention_head_dim": 20, "ffn_dim": 40, "freq_dim": 48},
}
WAN_VAE: Mapping[str, Values] = {
    "tiny": {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
    "small": {"base_dim": 8, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
    "odd": {"base_dim": 6, "dim_mult": [1, 3, 2], "num_res_blocks": 1, "temperal_downsample": [True, True], "scale_factor_spatial": 4},
}


def _wan(kind: str, size: str, boundary: float | None, mask_channels: int = 0) -> Design:
    """A pipeline of Wan. boundary: the noise (0..1) where the second transformer takes over; None: it has one transformer, and a VAE whose
    latents cover patches of twice the width. mask_channels: for a film with a first picture, the channels of its mask."""
    odd_channels, usual_channels = (10, 16) if boundary else (14, 48)
    channels = odd_channels if size == "odd" else usual_channels
    vae = {
        **WAN_VAE[size],
        "z_dim": channels,
        "latents_mean": [(number * 7 % 11 - 5) / 20 for number in range(channels)],
        "latents_std": [1 + number % 5 / 4 for number in range(channels)],
    }
    if not boundary:
        vae |= {"decoder_base_dim": vae["base_dim"] * 2, "scale_factor_spatial": 2 * vae.get("scale_factor_spatial", 8)}
        vae |= {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
        vae |= {"dim_mult": [1, 2, 2]} if size == "odd" else {}  # A residual block needs widths that divide each other.
    inputs = channels * 2 + mask_channels if mask_channels else channels
    transformer = {**WAN[size], "text_dim": T5[size]["d_model"], "in_channels": inputs, "out_channels": channels}
    model = partial(diffusers.WanTransformer3DModel, **transformer)
    schedule = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0 if boundary else 5.0}
    empty_parts = (() if boundary else ("transformer_2",)) + (("image_encoder", "image_processor") if mask_channels else ())
    return Design(
        kind,
        model,
        partial(diffusers.AutoencoderKLWan, **vae),
        partial(diffusers.UniPCMultistepScheduler, **schedule),
        partial(_encoder, UMT5EncoderModel, **T5[size]),
        {"transformer_2": model} if boundary else {},
        index={**{part: [None, None] for part in empty_parts}, "boundary_ratio": boundary, "expand_timesteps": not boundary},
    )


STABLE_AUDIO: Mapping[str, Values] = {
    "tiny": {"sample_size": 64, "in_channels": 8, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2},
    "small": {"sample_size": 1024, "in_channels": 64, "num_layers": 7, "attention_head_dim": 32, "num_attention_heads": 8},
    "odd": {"sample_size": 90, "in_channels": 5, "num_layers": 3, "attention_head_dim": 12, "num_attention_heads": 3},
}
"""Arguments of the transformer. The latents hold 3 s of sound, 47.6 s (as published) and 1.8 s."""
_MONO = {"audio_channels": 1, "channel_multiples": [1, 3, 2], "downsampling_ratios": [3, 5, 10], "sampling_rate": 7500}
OOBLECK: Mapping[str, Values] = {
    "tiny": {"encoder_hidden_size": 2, "decoder_channels": 2, "decoder_input_channels": 8},
    "small": {"encoder_hidden_size": 8, "decoder_channels": 8, "decoder_input_channels": 64},
    "odd": {"encoder_hidden_size": 3, "decoder_channels": 3, "decoder_input_channels": 5, **_MONO},
}


def _stable_audio(size: str) -> Design:
    width = 24 if size == "odd" else 32  # of the rows for words and seconds that the transformer gets
    transformer = {
        **STABLE_AUDIO[size],
        "out_channels": STABLE_AUDIO[size]["in_channels"],
        **dict.fromkeys(("cross_attention_dim", "cross_attention_input_dim"), width),
        "global_states_input_dim": 2 * width,
        "num_key_value_attention_heads": 1,
        "time_proj_dim": 64,
    }
    projection = {"text_encoder_dim": T5[size]["d_model"], "conditioning_dim": width, "min_value": 0, "max_value": 512}
    return Design(
        "StableAudioPipeline",
        partial(diffusers.StableAudioDiTModel, **transformer),
        partial(diffusers.AutoencoderOobleck, **OOBLECK[size]),
        partial(diffusers.CosineDPMSolverMultistepScheduler),
        partial(_encoder, T5EncoderModel, **T5[size]),
        {"projection_model": partial(StableAudioProjectionModel, **projection)},
    )


DESIGNS: Mapping[str, Callable[[str], Design]] = {
    "qwen-image": partial(_qwen, "QwenImagePipeline"),
    "qwen-image-edit": partial(_qwen, "QwenImageEditPipeline"),
    "qwen-image-edit-plus": partial(_qwen, "QwenImageEditPlusPipeline", zero_cond_t=True),
    "qwen-image-layered": partial(
        _qwen, "QwenImageLayeredPipeline", vae={"input_channels": 4}, use_additional_t_cond=True, use_layer3d_rope=True
    ),
    "z-image": _z_image,
    "longcat-image": partial(_longcat, "LongCatImagePipeline"),
    "longcat-image-edit": partial(_longcat, "LongCatImageEditPipeline"),
    "wan2.2-t2v": partial(_wan, "WanPipeline", boundary=0.875),
    "wan2.2-ti2v": partial(_wan, "WanPipeline", boundary=None),
    "wan2.2-i2v": partial(_wan, "WanImageToVideoPipeline", boundary=0.9, mask_channels=4),
    "stable-audio": _stable_audio,
}
"""The design of each checkpoint, by its size."""

_ENCODER: Values = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
QWEN3: Values = {**_ENCODER, "num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 40960, "rope_parameters": _ROPE}
"""The pipeline takes the output of the last layer but one."""
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
QWEN_VL_TEXT: Values = {**_ENCODER, "num_hidden_layers": 2, "max_position_embeddings": 128000, "rope_parameters": _MROPE}
_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [1]}
QWEN_VL_VISION: Values = {**_VISION, "out_hidden_size": HIDDEN}

PROCESSOR = "Qwen2VLProcessor"
_PIXELS = {"max_pixels": 12845056, "min_pixels": 3136, "merge_size": 2, "resample": 3, "rescale_factor": 1 / 255}
_STEPS = dict.fromkeys(("do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True)
PREPROCESSOR: Values = {**_STEPS, **COLOURS, **_PIXELS, "patch_size": 14, "temporal_patch_size": 2, "processor_class": PROCESSOR}


# The tokenizers ----------------------------------------------------------------------------------------------------------------------


VOCABULARY = 800
TEXTS = text_of("prompts.txt") + text_of("training.txt")
REPEATS = 20
"""How often the training reads the instructions: so often that each of their words becomes one token before other merges, as in Qwen's own
vocabulary. The pipelines cut as many tokens off an encoded prompt as their instruction has there."""

_ANSWER = "{{- '<|im_start|>assistant\\n' -}}"
_THOUGHT = f"{{%- if enable_thinking is defined and not enable_thinking -%}}{{{{- '{OPENS}\\n\\n{CLOSES}\\n\\n' -}}}}{{%- endif -%}}"
TEMPLATE = template_of("<|vision_start|><|image_pad|><|vision_end|>").replace(_ANSWER, _ANSWER + _THOUGHT)
VISION_TEMPLATE = SYSTEM + TEMPLATE
"""Qwen2.5-VL has a default system prompt; Qwen3 has none."""


def _write_qwen(directory: Path, design: Design) -> tuple[Part, str]:
    """Write the tokenizer, and the settings of the processor that has one too. Returns (the text encoder, the class of the tokenizer)."""
    sees = design.kind != "ZImagePipeline"
    vocabulary = train(text_of("instructions.txt") * REPEATS + TEXTS, VOCABULARY)
    ids: Mapping[str, int] = {}
    processors = {"tokenizer": ""} | ({design.processor: PROCESSOR} if design.processor else {})
    for part, processor in processors.items():
        tokens = TokenizerDesign(VISION_SPECIAL, 131072, (*ORDINARY, OPENS, CLOSES), processor=processor)
        ids = write_files(directory / part, vocabulary, tokens)
        (directory / part / "chat_template.jinja").write_text(VISION_TEMPLATE if sees else TEMPLATE, encoding="utf-8")
    for name, kind in (("", "image"), ("video_", "video")) if design.processor else ():
        settings = {**PREPROCESSOR, f"{kind}_processor_type": f"Qwen2VL{kind.title()}Processor"}
        write_json(directory / design.processor / f"{name}preprocessor_config.json", dict(sorted(settings.items())))
    rows = -(-len(ids) // 64) * 64  # Some belong to no token.
    padding, end = ids["<|endoftext|>"], ids["<|im_end|>"]
    text = {"vocab_size": rows, "bos_token_id": padding, "eos_token_id": end, "pad_token_id": padding}
    if not sees:
        return partial(_encoder, transformers.Qwen3Model, **QWEN3, **text), "Qwen2Tokenizer"
    media = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    values: dict[str, Any] = {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in media.items()}
    values |= {"text_config": {**QWEN_VL_TEXT, **text}, "vision_config": dict(QWEN_VL_VISION)}
    return partial(_encoder, transformers.Qwen2_5_VLForConditionalGeneration, **values), "Qwen2Tokenizer"


SPACE = "\u2581"
SENTINELS = 100
"""How many tokens stand for left-out words, as published; no prompt here has any."""
WORD_COST, LETTER_COST = 8.0, 16.0
"""Cost of a word and of a letter: the logarithm of how rare it is. All words are alike, and so are all letters, so a known word is cheaper
than its letters."""


def _write_t5(directory: Path, encoder: Part, name: str) -> tuple[Part, str]:
    """Write the files of T5's tokenizer, with tokens for the words that it knows and for single letters. Returns (the text encoder, the
    class of the tokenizer)."""
    words = {SPACE + word.strip(string.punctuation).lower() for word in TEXTS.split()}
    letters = sorted({SPACE, *string.printable.strip(), *TEXTS} - {" ", "\n"})
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    pieces |= {word: -WORD_COST for word in sorted(words) if word != SPACE}
    pieces |= dict.fromkeys(letters, -LETTER_COST)
    pieces |= {f"<extra_id_{number}>": 0.0 for number in range(SENTINELS - 1, -1, -1)}
    tokenizer = T5Tokenizer(vocab=list(pieces.items()), extra_ids=SENTINELS, model_max_length=128 if name == "stable-audio" else 512)
    tokenizer.save_pretrained(directory / "tokenizer")
    return partial(encoder, vocab_size=-(-len(tokenizer) // 64) * 64), "T5TokenizerFast"
