"""Makes checkpoints of the drawing pipelines with random weights, in the published files: for tests, and for trials that need no beauty. A
weight depends only on the seed and its own name, and is made by exact operations, so that every machine makes the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from omnistage.models.diffusers.folder import quiet
from omnistage.models.reports import ShowProgress
from omnistage.models.text.answer import CLOSES, OPENS
from omnistage.models.tiny.makers import CheckpointOrder, MakeError, write_json
from omnistage.models.tiny.tokenizer import ORDINARY, TRAINING, VISION_SPECIAL, ByteVocabulary, TokenizerDesign, train, write_files
from omnistage.models.tiny.weights import noise

PROCESSOR = "Qwen2VLProcessor"


def make(name: str, directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder with the checkpoint of one of DESIGNS. Raises MakeError for the real vocabulary, which is too large."""
    check_tokenizer(name, order)
    design = DESIGNS[name]
    dtype = getattr(torch, order.dtype or "float32")
    progress("writing the tokenizer", 0.0)
    vocabulary = build_vocabulary()
    template = VISION_TEMPLATE if design.sees else TEMPLATE
    ids = write_tokenizer(directory / "tokenizer", vocabulary, template)
    if design.processor:
        write_tokenizer(directory / design.processor, vocabulary, template, PROCESSOR)
        write_json(directory / design.processor / "preprocessor_config.json", PREPROCESSOR)
        write_json(directory / design.processor / "video_preprocessor_config.json", VIDEO_PREPROCESSOR)
    progress("writing the tokenizer", 1.0)
    with quiet():
        parts = _models(design, order.size, ids)
        for index, (part, model) in enumerate(parts.items()):
            fill(model, part, order.seed, dtype)
            model.save_pretrained(directory / part)
            progress("writing the weights", (index + 1) / len(parts))
        scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler
        scheduler(**design.scheduler).save_pretrained(directory / "scheduler")
    write_json(directory / "model_index.json", _index(design, parts))


def check_tokenizer(name: str, order: CheckpointOrder) -> None:
    """Raises MakeError for a vocabulary other than "built". name: of the pipeline, for the error."""
    if order.tokenizer != "built":
        raise MakeError(f"tokenizer {order.tokenizer!r}: a checkpoint of {name} can have built")


qwen_image = partial(make, "qwen-image")
qwen_image_edit = partial(make, "qwen-image-edit")
qwen_image_edit_plus = partial(make, "qwen-image-edit-plus")
qwen_image_layered = partial(make, "qwen-image-layered")
z_image = partial(make, "z-image")
longcat_image = partial(make, "longcat-image")
longcat_image_edit = partial(make, "longcat-image-edit")


def _models(design: Design, size: str, ids: WordIds) -> dict[str, Any]:
    """The parts that have weights, by name, as models without memory. size: key of `design.transformers`."""
    transformer = getattr(diffusers, design.transformer)
    vae = getattr(diffusers, design.vae)
    with torch.device("meta"):
        return {
            "text_encoder": _text_encoder(design, ids),
            "transformer": transformer(**design.transformers[size], **design.special),
            "vae": vae(**design.vae_values),
        }


def _text_encoder(design: Design, ids: WordIds) -> Any:
    """Qwen2.5-VL for a pipeline that sees pictures, else Qwen3, in the tiny size."""
    tokens: dict[str, Any] = {"vocab_size": ids.rows, "bos_token_id": ids.pad, "eos_token_id": ids.im_end, "pad_token_id": ids.pad}
    if not design.sees:
        return transformers.Qwen3Model(transformers.Qwen3Config(**QWEN3, **tokens))
    config = transformers.Qwen2_5_VLConfig(
        text_config={**QWEN_VL_TEXT, **tokens},
        vision_config=dict(QWEN_VL_VISION),
        image_token_id=ids.image,
        video_token_id=ids.video,
        vision_start_token_id=ids.vision_start,
        vision_end_token_id=ids.vision_end,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def fill(model: torch.nn.Module, part: str, seed: int, dtype: torch.dtype) -> None:
    """Give all weights of a part their random values, in `dtype`. part: its name, which the numbers depend on."""
    weights = {}
    for name, value in model.state_dict().items():
        mean, deviation = _distribution(name, tuple(value.shape))
        weights[name] = noise(f"{part} {name}", tuple(value.shape), seed, deviation, mean).to(dtype)
    model.load_state_dict(weights, assign=True)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of the numbers of a weight, by its name and shape."""
    if name.endswith(".bias"):
        return 0.0, 0.1
    if name.endswith(("time_proj.weight", ".weights")):  # frequencies
        return 0.0, 1.0
    if name.endswith(".weight_g"):  # a length; if it were larger, each layer of a VAE of sound would be louder than the last
        return 0.6, 0.06
    if name.endswith(".gamma") or len(shape) == 1:  # a norm
        return 1.0, 0.1
    if name.endswith(("embed_tokens.weight", "shared.weight", "addition_t_embedding.weight", "_pad_token")):
        return 0.0, 1.0
    return 0.0, 1 / math.sqrt(math.prod(shape[1:]))


def _index(design: Design, parts: dict[str, Any]) -> dict[str, Any]:
    """The contents of model_index.json: for each part the library that has its class, and the class."""
    components = {part: [type(model).__module__.partition(".")[0], type(model).__name__] for part, model in parts.items()}
    components |= {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "tokenizer": ["transformers", "Qwen2Tokenizer"]}
    if design.processor:
        components[design.processor] = ["transformers", PROCESSOR]
    return {"_class_name": design.pipeline, "_diffusers_version": diffusers.__version__} | dict(sorted(components.items()))


# The parts and their sizes -----------------------------------------------------------------------------------------------------------
# They keep the features that the published code relies on: 16 latent channels, 8 x 8 pixels a latent, patches of 14 x 14 x 2 of the text
# encoder that sees, the noise schedule, and the arguments by which the pipelines differ.


Values = Mapping[str, Any]
"""Arguments of a class, by name."""

HIDDEN = 32
"""Width of the text encoders: the numbers that a transformer gets for a token."""


@dataclass(frozen=True, slots=True)
class Design:
    """A pipeline: its parts' classes and arguments. transformers: by size. processor: the part that prepares pictures; "" for none."""

    pipeline: str
    transformer: str  # The class.
    transformers: Mapping[str, Values]  # The arguments.
    vae: str  # The class.
    vae_values: Values  # The arguments.
    scheduler: Values  # The arguments.
    processor: str = ""
    special: Values = field(default_factory=dict)
    """Arguments of the transformer that its pipeline needs, at any size."""

    @property
    def sees(self) -> bool:
        """Whether the text encoder is Qwen2.5-VL; else it is Qwen3."""
        return self.transformer != "ZImageTransformer2DModel"


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

QWEN_VAE: Values = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
KL_VAE: Values = {
    "block_out_channels": [8, 8, 16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 16,
    "layers_per_block": 1,
    "norm_num_groups": 1,  # groups of one channel each would take flat colour away
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}

QWEN_SCHEDULE: Values = {"max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02, "use_dynamic_shifting": True}
Z_SCHEDULE: Values = {"shift": 3.0}
LONGCAT_SCHEDULE: Values = {"max_image_seq_len": 4096, "max_shift": 1.15, "shift": 3.0, "use_dynamic_shifting": True}


def _qwen(pipeline: str, processor: str = "", vae: Values | None = None, special: Values | None = None) -> Design:
    """A pipeline of Qwen-Image. vae, special: arguments of VAE and transformer in addition to the usual ones."""
    return Design(
        pipeline=pipeline,
        transformer="QwenImageTransformer2DModel",
        transformers=QWEN_TRANSFORMERS,
        vae="AutoencoderKLQwenImage",
        vae_values={**QWEN_VAE, **(vae or {})},
        scheduler=QWEN_SCHEDULE,
        processor=processor,
        special={"in_channels": 64, "out_channels": 16, "joint_attention_dim": HIDDEN, **(special or {})},
    )


def _longcat(pipeline: str) -> Design:
    return Design(
        pipeline=pipeline,
        transformer="LongCatImageTransformer2DModel",
        transformers=LONGCAT_TRANSFORMERS,
        vae="AutoencoderKL",
        vae_values=KL_VAE,
        scheduler=LONGCAT_SCHEDULE,
        processor="text_processor",
        special={"in_channels": 64, "joint_attention_dim": HIDDEN, "pooled_projection_dim": HIDDEN},
    )


DESIGNS: Mapping[str, Design] = {
    "qwen-image": _qwen("QwenImagePipeline"),
    "qwen-image-edit": _qwen("QwenImageEditPipeline", "processor"),
    "qwen-image-edit-plus": _qwen("QwenImageEditPlusPipeline", "processor", special={"zero_cond_t": True}),
    "qwen-image-layered": _qwen(
        "QwenImageLayeredPipeline",
        "processor",
        vae={"input_channels": 4},
        special={"use_additional_t_cond": True, "use_layer3d_rope": True},
    ),
    "z-image": Design(
        pipeline="ZImagePipeline",
        transformer="ZImageTransformer2DModel",
        transformers=Z_TRANSFORMERS,
        vae="AutoencoderKL",
        vae_values=KL_VAE,
        scheduler=Z_SCHEDULE,
        special={"in_channels": 16, "cap_feat_dim": HIDDEN},
    ),
    "longcat-image": _longcat("LongCatImagePipeline"),
    "longcat-image-edit": _longcat("LongCatImageEditPipeline"),
}

QWEN3: Values = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 3,  # the pipeline takes the output of the last layer but one
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
QWEN_VL_TEXT: Values = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
}
QWEN_VL_VISION: Values = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
PREPROCESSOR: Values = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": 14,
    "processor_class": "Qwen2VLProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "temporal_patch_size": 2,
}
VIDEO_PREPROCESSOR: Values = {
    **{key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"},
    "video_processor_type": "Qwen2VLVideoProcessor",
}


# The tokenizer -----------------------------------------------------------------------------------------------------------------------


MAX_TOKENS = 131072
VOCABULARY = 800
REPEATS = 20
"""How often the training reads the instructions: so often that each of their words becomes one token before other merges."""

INSTRUCTIONS = """\
system
user
assistant
Describe the key features of an input image by detailing its shape, size, texture, quantity, color, objects and background:
The text. Generate a new image that meets the user's requirements while maintaining consistency with the original input where appropriate.
Describe (color, spatial relationships of text, background), then explain how the instruction should alter or modify it.
"""

PROMPTS = """\
A red circle on a blue background. A small green triangle above a large yellow square. A photo of a cat that sleeps on a wooden chair.
Make the sky darker. Remove the house from the picture. Put the letters "OPEN" on the door. A watercolour of a lighthouse at night.
Picture 1: a white dog. Picture 2: an orange fish in a glass bowl. Low quality, blurred, distorted.
"""

TEMPLATE = """\
{%- if messages and messages[0]['role'] != 'system' and system_prompt -%}
{{- '<|im_start|>system\\n' + system_prompt + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- 'OPENS\\n\\nCLOSES\\n\\n' -}}
{%- endif -%}
{%- endif -%}
""".replace("OPENS", OPENS).replace("CLOSES", CLOSES)
VISION_TEMPLATE = "{%- set system_prompt = 'You are a helpful assistant.' -%}\n" + TEMPLATE
"""Qwen2.5-VL has a default system prompt; Qwen3 has none."""


@dataclass(frozen=True, slots=True)
class WordIds:
    """Token ids that configs must name. rows: number of rows of the embedding; some belong to no token."""

    pad: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image: int
    video: int
    rows: int


def build_vocabulary() -> ByteVocabulary:
    """A small vocabulary in which each word of the instructions is one token, as in Qwen's own: the pipelines cut as many tokens off an
    encoded prompt as their instruction has there."""
    return train([*INSTRUCTIONS.splitlines() * REPEATS, *PROMPTS.splitlines(), *TRAINING.splitlines()], VOCABULARY)


def write_tokenizer(directory: Path, vocabulary: ByteVocabulary, template: str, processor: str = "") -> WordIds:
    """Write the files of a tokenizer in the published layout. processor: the class of the processor it belongs to, if any."""
    added = write_files(directory, vocabulary, TokenizerDesign(VISION_SPECIAL, MAX_TOKENS, (*ORDINARY, OPENS, CLOSES), processor=processor))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return WordIds(
        pad=added["<|endoftext|>"],
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        vision_start=added["<|vision_start|>"],
        vision_end=added["<|vision_end|>"],
        image=added["<|image_pad|>"],
        video=added["<|video_pad|>"],
        rows=-(-(max(added.values()) + 1) // 64) * 64,
    )
