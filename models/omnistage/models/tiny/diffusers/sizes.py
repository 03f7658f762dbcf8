"""The parts of the drawing pipelines with random weights, and their sizes: arguments of the parts' classes.

They keep the features that the published code relies on: 16 latent channels, 8 x 8 pixels a latent, patches of 14 x 14 x 2 of the text
encoder that sees, the noise schedule, and the arguments by which the pipelines differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
