"""The files that the makers of both Omni families write in the same way: tokenizer, template of chats, settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

from omnistage.models.encoders.prompt import RENAMED
from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.files import write_json
from omnistage.models.tiny.makers import CheckpointOrder
from omnistage.models.tiny.qwen_vocabulary import fetch_vocabulary
from omnistage.models.tiny.tokenizer import TRAINING, ByteVocabulary, train

BUILT_VOCABULARY = 512
QWEN_ROWS = 152064

PREPROCESSOR = {
    "chunk_length": 300,
    "dither": 0.0,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "image_processor_type": "Qwen2VLImageProcessor",
    "max_pixels": 12845056,
    "min_pixels": 3136,
    "n_fft": 400,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 16000,
}
"""The contents of preprocessor_config.json in both families, without the sizes of the picture encoder."""

_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- 'IMAGE' -}}
{%- elif part['type'] == 'audio' or 'audio' in part or 'audio_url' in part -%}
{{- 'AUDIO' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- 'VIDEO' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

Ids = TypeVar("Ids")


def template_of(image: str, audio: str, video: str) -> str:
    """The template of chats. image, audio, video: the text that stands for a medium."""
    return _TEMPLATE.replace("IMAGE", image).replace("AUDIO", audio).replace("VIDEO", video)


def build_vocabulary() -> ByteVocabulary:
    """Train a small vocabulary."""
    return train(TRAINING.splitlines(), BUILT_VOCABULARY)


def with_tokenizer(directory: Path, order: CheckpointOrder, progress: ShowProgress, write: Callable[[Path, ByteVocabulary], Ids]) -> Ids:
    """Write a tokenizer with the ordered vocabulary; returns the result of `write`. Raises FetchError for Qwen's."""
    vocabulary = fetch_vocabulary(progress=progress) if order.tokenizer == "qwen" else build_vocabulary()
    progress("writing the tokenizer", 0.0)
    ids = write(directory, vocabulary)
    progress("writing the tokenizer", 1.0)
    return ids


def write_settings(directory: Path, values: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
    """Write config.json and the settings. values: its contents. preprocessor: entries of preprocessor_config.json besides PREPROCESSOR."""
    vision = values["thinker_config"]["vision_config"]
    patches = {"merge_size": vision["spatial_merge_size"], **{name: vision[name] for name in ("patch_size", "temporal_patch_size")}}
    write_json(directory / "config.json", values)
    write_json(directory / "generation_config.json", {"_from_model_config": True, "transformers_version": values["transformers_version"]})
    write_json(directory / "preprocessor_config.json", dict(sorted({**PREPROCESSOR, **preprocessor, **patches}.items())))


def added_gains(config: Mapping[str, Any], decoders: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """For each decoder the gain of the matrices whose results a layer adds to its rows: 2 / layers, because otherwise attention would make
    all rows alike. decoders: by the beginning of the weights' names, the path in the config to the sizes. The config may lack some."""
    return {prefix: 2 / reduce(getitem, path, config)["num_hidden_layers"] for prefix, path in decoders.items() if path[0] in config}


def published_name(name: str) -> str:
    """The name that a weight of Transformers has in the published files."""
    begin = next((begin for begin in RENAMED if name.startswith(begin)), "")
    return RENAMED.get(begin, "") + name.removeprefix(begin)
