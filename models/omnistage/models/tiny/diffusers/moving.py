"""Makes checkpoints of the pipelines of films and sounds with random weights, in the published files."""

from __future__ import annotations

import importlib
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from transformers.models.t5 import T5Tokenizer

from omnistage.models.diffusers.folder import quiet
from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.diffusers.pictures import PROMPTS, check_tokenizer, fill
from omnistage.models.tiny.makers import CheckpointOrder, write_json
from omnistage.models.tiny.tokenizer import TRAINING

MULTIPLE = 64
"""The number of rows of an embedding is a multiple of this, so some rows belong to no token."""


def make(name: str, directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder with the checkpoint of one of MOVING_DESIGNS. Raises MakeError."""
    check_tokenizer(name, order)
    design, dtype = MOVING_DESIGNS[name], getattr(torch, order.dtype or "float32")
    progress("writing the tokenizer", 0.0)
    rows = -(-write_t5(directory / "tokenizer", design.tokens) // MULTIPLE) * MULTIPLE
    progress("writing the tokenizer", 1.0)
    with quiet():
        for index, (part, model) in enumerate(models := _models(design, order.size, rows)):
            fill(model, part, order.seed, dtype)
            if part == "text_encoder":
                model.tie_weights()  # Its embedding has two names, which are filled one after the other.
            model.save_pretrained(directory / part)
            progress("writing the weights", (index + 1) / len(models))
    scheduler_config = {"_class_name": design.scheduler, "_diffusers_version": diffusers.__version__, **design.schedule}
    (directory / "scheduler").mkdir()
    write_json(directory / "scheduler" / "scheduler_config.json", dict(sorted(scheduler_config.items())))
    write_json(directory / "model_index.json", _index(design))


wan_t2v = partial(make, "wan2.2-t2v")
wan_ti2v = partial(make, "wan2.2-ti2v")
wan_i2v = partial(make, "wan2.2-i2v")
stable_audio = partial(make, "stable-audio")


def _models(design: MovingDesign, size: str, rows: int) -> list[tuple[str, Any]]:
    """The parts that have weights, with their names, as models without memory. rows: how many the embedding of tokens has."""
    encoder: Any = getattr(transformers, design.encoder)
    with torch.device("meta"):
        return [
            ("text_encoder", encoder(encoder.config_class(**design.encoders[size], vocab_size=rows))),
            *((name, _kind(part)(**part.sizes[size], **part.values)) for name, part in design.parts.items()),
        ]


def _kind(part: PipelinePart) -> Any:
    library = part.library if part.library == "diffusers" else f"diffusers.pipelines.{part.library}"
    return getattr(importlib.import_module(library), part.kind)


def _index(design: MovingDesign) -> dict[str, Any]:
    """The contents of model_index.json: for each part the library that has its class, and the class."""
    components: dict[str, Any] = {part: [model.library, model.kind] for part, model in design.parts.items()}
    components |= {
        "scheduler": ["diffusers", design.scheduler],
        "text_encoder": ["transformers", design.encoder],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        **{part: [None, None] for part in design.nothing},
        **design.values,
    }
    return {"_class_name": design.pipeline, "_diffusers_version": diffusers.__version__} | dict(sorted(components.items()))


# The parts and their sizes -----------------------------------------------------------------------------------------------------------
# They keep the features by which the published ones differ, and in "tiny" and "small" the published proportions: how many pixels and frames
# a latent covers, how many times the sound is refined. "odd" changes everything that may change.


Values = Mapping[str, Any]
"""Arguments of a class, by name."""

SIZES = ("tiny", "small", "odd")


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """A model of a pipeline. kind: its class. library: the library that has the class: Transformers, Diffusers or a pipeline of Diffusers.
    values: arguments for all sizes. sizes: further arguments, by size."""

    kind: str
    sizes: Mapping[str, Values]
    values: Values = field(default_factory=dict)
    library: str = "diffusers"


@dataclass(frozen=True, slots=True)
class MovingDesign:
    """A pipeline. encoder, encoders: class of its text encoder, and its arguments by size. tokens: length of a text. scheduler, schedule:
    its class, and the contents of its file. nothing: parts that it lacks. values: other entries of model_index.json."""

    pipeline: str
    encoder: str
    encoders: Mapping[str, Values]
    tokens: int
    parts: Mapping[str, PipelinePart]
    scheduler: str
    schedule: Values
    nothing: tuple[str, ...] = ()
    values: Values = field(default_factory=dict)


WIDTHS = {"tiny": 32, "small": 32, "odd": 20}
"""Widths of text encoders: the numbers that a transformer gets for a token."""

UMT5: Mapping[str, Values] = {
    "tiny": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    "small": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    "odd": {"d_model": 20, "d_kv": 6, "d_ff": 28, "num_layers": 3, "num_heads": 3},
}
T5: Mapping[str, Values] = {size: {**values, "feed_forward_proj": "relu"} for size, values in UMT5.items()}
"""A ReLU as in the first version of T5, whose encoder Stable Audio has."""

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
FLOW: Values = {"num_train_timesteps": 1000, "prediction_type": "flow_prediction", "solver_order": 2, "use_flow_sigmas": True}


def _latents(count: int) -> Values:
    """Arguments of a VAE: mean and deviation of each of `count` channels of latents."""
    return {
        "latents_mean": [(number * 7 % 11 - 5) / 20 for number in range(count)],
        "latents_std": [1 + number % 5 / 4 for number in range(count)],
    }


def _wan(pipeline: str, boundary: float, special: Mapping[str, Values]) -> MovingDesign:
    """A pipeline of Wan with two transformers. boundary: the noise (0..1) where the second takes over. special: channels by size."""
    sizes = {size: {**WAN[size], "text_dim": WIDTHS[size], **special[size]} for size in SIZES}
    channels = {size: special[size]["out_channels"] for size in SIZES}
    vaes = {size: {**WAN_VAE[size], "z_dim": channels[size], **_latents(channels[size])} for size in SIZES}
    return MovingDesign(
        pipeline=pipeline,
        encoder="UMT5EncoderModel",
        encoders=UMT5,
        tokens=512,
        parts={
            "transformer": PipelinePart("WanTransformer3DModel", sizes),
            "transformer_2": PipelinePart("WanTransformer3DModel", sizes),
            "vae": PipelinePart("AutoencoderKLWan", vaes),
        },
        scheduler="UniPCMultistepScheduler",
        schedule={**FLOW, "flow_shift": 3.0},
        nothing=("image_encoder", "image_processor") if pipeline == "WanImageToVideoPipeline" else (),
        values={"boundary_ratio": boundary, "expand_timesteps": False},
    )


def _expanding() -> MovingDesign:
    """The pipeline TI2V of Wan: one transformer, and a VAE whose latents cover patches of twice the width."""
    channels = {"tiny": 48, "small": 48, "odd": 14}
    vaes: dict[str, Values] = {
        size: {
            **values,
            "decoder_base_dim": values["base_dim"] * 2,
            "z_dim": channels[size],
            "scale_factor_spatial": 2 * values.get("scale_factor_spatial", 8),
            **_latents(channels[size]),
        }
        for size, values in WAN_VAE.items()
    }
    vaes["odd"] = {**vaes["odd"], "dim_mult": [1, 2, 2]}  # A residual block needs widths that divide each other.
    sizes = {size: {**WAN[size], "text_dim": WIDTHS[size], "in_channels": channels[size], "out_channels": channels[size]} for size in SIZES}
    return MovingDesign(
        pipeline="WanPipeline",
        encoder="UMT5EncoderModel",
        encoders=UMT5,
        tokens=512,
        parts={
            "transformer": PipelinePart("WanTransformer3DModel", sizes),
            "vae": PipelinePart("AutoencoderKLWan", vaes, {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}),
        },
        scheduler="UniPCMultistepScheduler",
        schedule={**FLOW, "flow_shift": 5.0},
        nothing=("transformer_2",),
        values={"boundary_ratio": None, "expand_timesteps": True},
    )


STABLE_AUDIO: Mapping[str, Values] = {
    "tiny": {"sample_size": 64, "in_channels": 8, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2},
    "small": {"sample_size": 1024, "in_channels": 64, "num_layers": 7, "attention_head_dim": 32, "num_attention_heads": 8},
    "odd": {"sample_size": 90, "in_channels": 5, "num_layers": 3, "attention_head_dim": 12, "num_attention_heads": 3},
}
"""Arguments of the transformer. The latents hold 3 s of sound, 47.6 s (as published) and 1.8 s."""
OOBLECK: Mapping[str, Values] = {
    "tiny": {"encoder_hidden_size": 2, "decoder_channels": 2, "decoder_input_channels": 8},
    "small": {"encoder_hidden_size": 8, "decoder_channels": 8, "decoder_input_channels": 64},
    "odd": {
        "encoder_hidden_size": 3,
        "decoder_channels": 3,
        "decoder_input_channels": 5,
        "audio_channels": 1,
        "channel_multiples": [1, 3, 2],
        "downsampling_ratios": [3, 5, 10],
        "sampling_rate": 7500,
    },
}
CONDITIONED = {"tiny": 32, "small": 32, "odd": 24}
"""Widths of the rows for words and seconds that the transformer of Stable Audio gets."""


def _stable_audio() -> MovingDesign:
    transformers = {
        size: {
            **values,
            "out_channels": values["in_channels"],
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": CONDITIONED[size],
            "cross_attention_input_dim": CONDITIONED[size],
            "global_states_input_dim": 2 * CONDITIONED[size],
            "time_proj_dim": 64,
        }
        for size, values in STABLE_AUDIO.items()
    }
    return MovingDesign(
        pipeline="StableAudioPipeline",
        encoder="T5EncoderModel",
        encoders=T5,
        tokens=128,
        parts={
            "projection_model": PipelinePart(
                "StableAudioProjectionModel",
                {size: {"text_encoder_dim": WIDTHS[size], "conditioning_dim": CONDITIONED[size]} for size in SIZES},
                {"min_value": 0, "max_value": 512},
                library="stable_audio",
            ),
            "transformer": PipelinePart("StableAudioDiTModel", transformers),
            "vae": PipelinePart("AutoencoderOobleck", OOBLECK),
        },
        scheduler="CosineDPMSolverMultistepScheduler",
        schedule={
            "sigma_min": 0.3,
            "sigma_max": 500,
            "sigma_data": 1.0,
            "sigma_schedule": "exponential",
            "num_train_timesteps": 1000,
            "solver_order": 2,
            "prediction_type": "v_prediction",
            "rho": 7.0,
            "solver_type": "midpoint",
            "lower_order_final": True,
            "euler_at_final": False,
            "final_sigmas_type": "zero",
        },
    )


def _channels(tiny: int, odd: int, mask_channels: int) -> Mapping[str, Values]:
    """Arguments for the channels of a film's latents, by size. mask_channels: for a film with a first picture, the channels of its mask."""
    return {
        size: {"in_channels": count * (2 if mask_channels else 1) + mask_channels, "out_channels": count}
        for size, count in (("tiny", tiny), ("small", tiny), ("odd", odd))
    }


MOVING_DESIGNS: Mapping[str, MovingDesign] = {
    "wan2.2-t2v": _wan("WanPipeline", 0.875, _channels(16, 10, 0)),
    "wan2.2-ti2v": _expanding(),
    "wan2.2-i2v": _wan("WanImageToVideoPipeline", 0.9, _channels(16, 10, 4)),
    "stable-audio": _stable_audio(),
}


# The tokenizer -----------------------------------------------------------------------------------------------------------------------


SPACE = "\u2581"
SENTINELS = 100
"""How many tokens stand for left-out words, as published; no prompt here has any."""
WORD_COST, LETTER_COST = 8.0, 16.0
"""Cost of a word and of a letter: the logarithm of how rare it is. All words are alike, and so are all letters, so a known word is cheaper
than its letters."""


def write_t5(directory: Path, max_tokens: int) -> int:
    """Write the files of T5's tokenizer, with tokens for the words that it knows and for single letters. max_tokens: the default length
    that it cuts a text to. Returns how many tokens it has."""
    words = {SPACE + word.strip(string.punctuation).lower() for word in f"{TRAINING} {PROMPTS}".split()}
    letters = sorted({SPACE, *string.printable.strip(), *TRAINING, *PROMPTS} - {" ", "\n"})
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    pieces |= {word: -WORD_COST for word in sorted(words) if word != SPACE}
    pieces |= dict.fromkeys(letters, -LETTER_COST)
    pieces |= {f"<extra_id_{number}>": 0.0 for number in range(SENTINELS - 1, -1, -1)}
    tokenizer = T5Tokenizer(vocab=list(pieces.items()), extra_ids=SENTINELS, model_max_length=max_tokens)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)
