"""Makes checkpoints of the drawing pipelines with random weights, in the published files: for tests, and for trials that need no beauty. A
weight depends only on the seed and its own name, and is made by exact operations, so that every machine makes the same bytes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from omnistage.models.diffusers.folder import quiet
from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.diffusers.sizes import (
    DESIGNS,
    PREPROCESSOR,
    QWEN3,
    QWEN_VL_TEXT,
    QWEN_VL_VISION,
    VIDEO_PREPROCESSOR,
    Design,
)
from omnistage.models.tiny.diffusers.tokenizer import TEMPLATE, VISION_TEMPLATE, WordIds, build_vocabulary, write_tokenizer
from omnistage.models.tiny.files import write_json
from omnistage.models.tiny.makers import CheckpointOrder, MakeError
from omnistage.models.tiny.random_weights import noise

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
