"""The files that the makers of both Omni families write in the same way: tokenizer, config, settings, weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers.models import BPE
from transformers import WhisperFeatureExtractor

from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.makers import CheckpointOrder, write_json
from omnistage.models.tiny.tokenizer import TokenizerDesign, fetch_vocabulary, train, write_files

Values = Mapping[str, Any]
"""Entries of a config or arguments of a class, by name."""

COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
"""Means and deviations of red, green and blue with which CLIP and Qwen2.5-VL prepare pictures."""

_EXTRACTOR: Any = WhisperFeatureExtractor
_SOUND = _EXTRACTOR(feature_size=128, chunk_length=300, return_attention_mask=True).to_dict()
PREPROCESSOR: Values = {**_SOUND, "image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 12845056, "min_pixels": 3136}
"""The contents of preprocessor_config.json in both families, without the sizes of the picture encoder."""


def write_ordered(directory: Path, order: CheckpointOrder, design: TokenizerDesign, progress: ShowProgress) -> dict[str, int]:
    """Write a tokenizer with the ordered vocabulary. Returns the id of each token. Raises FetchError for Qwen's."""
    vocabulary = fetch_vocabulary(progress=progress) if order.tokenizer == "qwen" else train()
    progress("writing the tokenizer", 0.0)
    ids = write_tokenizer(directory, vocabulary, design)
    progress("writing the tokenizer", 1.0)
    return ids


def write_tokenizer(directory: Path, vocabulary: BPE, design: TokenizerDesign) -> dict[str, int]:
    """Write the tokenizer's files in the published layout. Returns the id of each token."""
    write_json(directory / "chat_template.json", {"chat_template": design.template})
    return write_files(directory, vocabulary, design)


def media_ids(ids: Mapping[str, int], tokens: Iterable[str], end: str) -> dict[str, int]:
    """The entries of configs for the tokens of media. ids: of tokens. tokens: in the order of ROLES. end: the last part of the names for
    media themselves."""
    media = (f"{kind}_token_{end}" for kind in ("image", "audio", "video"))
    frames = (f"{kind}_{place}_token_id" for kind in ("vision", "audio") for place in ("start", "end"))
    return {name: ids[token] for name, token in zip((*media, *frames), tokens, strict=True)}


def config_of(kind: Any, values: Values) -> dict[str, Any]:
    """The contents of config.json, or of a section of it: `values`, and the values that a class of Transformers' configs has by default.
    kind: the class. A default that is None is left out. Entries and sections that the class does not know stay as they are."""
    defaults = {name: getattr(kind, name, None) for name in kind.__annotations__ if name not in kind.sub_configs}
    present = {name: value for name, value in {"model_type": kind.model_type, **defaults}.items() if value not in (None, "")}
    sections = {name: config_of(section, values[name]) for name, section in kind.sub_configs.items() if name in values}
    return dict(sorted({**present, **values, **sections}.items()))


def write_settings(directory: Path, config: Values, preprocessor: Values) -> None:
    """Write config.json and the settings. config: its contents. preprocessor: entries of preprocessor_config.json besides PREPROCESSOR."""
    vision = config["thinker_config"]["vision_config"]
    patches = {"merge_size": vision["spatial_merge_size"], **{name: vision[name] for name in ("patch_size", "temporal_patch_size")}}
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"_from_model_config": True, "transformers_version": config["transformers_version"]})
    write_json(directory / "preprocessor_config.json", dict(sorted({**PREPROCESSOR, **preprocessor, **patches}.items())))


def decoder_gains(config: Values, decoders: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """The gain of the matrices whose results a layer adds to its rows, by a pattern for each decoder: 2 / layers. Otherwise attention would
    make all rows alike. decoders: by the beginning of the weights' names, the path in the config to the sizes. The config may lack some."""
    gains = {}
    for prefix, (part, *path) in decoders.items():
        if section := config.get(part):
            for name in path:
                section = section[name]
            gains[rf"^{prefix}.*\.(o_proj|down_proj)\."] = 2 / section["num_hidden_layers"]
    return gains
