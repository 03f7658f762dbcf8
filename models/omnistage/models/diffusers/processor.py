"""Preparation of text and pictures for Qwen2.5-VL. Transformers' own processor needs Torchvision, for films that are not used here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE_TOKEN = "<|image_pad|>"

SAFE: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments for everything that is loaded from a folder: nothing is fetched, and no code in the folder is run."""


class PictureProcessor(transformers.ProcessorMixin):
    """Qwen2VLProcessor without films: the same tokens, pixels and grids. A picture's token is repeated for each merged patch."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.image_token = IMAGE_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)  # type: ignore[no-untyped-call]

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        """The text that stands for the picture of that index. image_inputs: image_grid_thw has frames, height and width in patches."""
        return IMAGE_TOKEN * int(image_inputs["image_grid_thw"][image_idx].prod() // self.image_processor.merge_size**2)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "mm_token_type_ids"]


def load_processor(folder: Path) -> transformers.ProcessorMixin:
    """The processor of a published folder with preprocessor_config.json and a tokenizer. Raises what Transformers raises."""
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(folder, **SAFE)
    return PictureProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder, **SAFE), tokenizer, chat_template=tokenizer.chat_template)
