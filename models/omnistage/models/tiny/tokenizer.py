"""Byte-level tokenizers like Qwen's: a vocabulary that is trained in place, and the files of a tokenizer in the published layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from omnistage.models.tiny.makers import write_json

VISION_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""The special tokens of Qwen2.5-VL, and of later models."""

ORDINARY = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Tokens that are added to the vocabulary as text: a decoder that drops special tokens keeps them."""

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern by which Qwen2 splits text before it merges."""

TRAINING = """\
system
You are a helpful assistant.
user
What is in this picture? What do you hear in this sound? What happens in this video?
assistant
The picture shows a cat that sits on a wall in the sun. The sound is a voice that says good morning. In the video two children play ball.
user
Tell me a story about the sea. How are you today? Please answer in one word. What comes after this?
assistant
There was a ship that sailed for seven days and seven nights. The wind was strong, the stars were bright, and nobody was afraid.
system
You are a helpful assistant that answers in short sentences.
user
Write a function that adds two numbers. Count from one to ten. What is the time? Which of these colours is the warmest, red, green or blue?
assistant
def add(first, second):
    return first + second
for number in range(10):
    print(number)
user
Describe the image, then the audio. Where is the house? Who is speaking, and when, and why? Thank you very much!
assistant
The house stands on a hill between the trees. The speaker is a man; he asks for the way to the station. It is 10:45 in the morning.
你好，世界。请问这是什么？这是一只猫。
¿Qué es esto? C'est une maison. Das ist ein Haus. 😀🎉
"""


@dataclass(frozen=True, slots=True)
class ByteVocabulary:
    """A byte-level vocabulary. entries: the id of each, from 0 on without gaps. merges: pairs of entries that join, in order of rank."""

    entries: Mapping[str, int]
    merges: Sequence[tuple[str, str]]


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


def train(lines: Iterable[str], size: int) -> ByteVocabulary:
    """Train a vocabulary on lines of text; it has all bytes, and is the same each time. size: number of entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return ByteVocabulary(model["vocab"], [(first, second) for first, second in model["merges"]])


def write_files(directory: Path, vocabulary: ByteVocabulary, design: TokenizerDesign) -> dict[str, int]:
    """Write the files of a tokenizer, except its chat template. Returns the ids of the tokens that were added to the vocabulary."""
    entries = dict(vocabulary.entries)
    added = {token: len(entries) + index for index, token in enumerate((*design.special, *design.ordinary, *design.later))}
    directory.mkdir(exist_ok=True)
    (directory / "merges.txt").write_text(merges_text(vocabulary.merges), encoding="utf-8")
    write_json(directory / "vocab.json", entries, indent=None)
    padding, *others = every = (*design.special, *design.later)
    names = {"additional_special_tokens": others, **design.roles}
    if design.repeats:
        _whole(vocabulary, design).save(str(directory / "tokenizer.json"))
        write_json(directory / "added_tokens.json", added)
        write_json(directory / "special_tokens_map.json", {**names, "eos_token": _token("<|im_end|>"), "pad_token": _token(padding)})
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): _token(token) | {"special": token in every} for token, number in added.items()},
        **names,
        "bos_token": None,
        **({"chat_template": design.template} if design.template else {}),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": design.roles,
        "model_max_length": design.max_tokens,
        "pad_token": padding,
        **({"processor_class": design.processor} if design.processor else {}),
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(directory / "tokenizer_config.json", settings)
    return added


def merges_text(merges: Iterable[tuple[str, str]]) -> str:
    """The contents of merges.txt."""
    return "#version: 0.2\n" + "".join(f"{first} {second}\n" for first, second in merges)


def _whole(vocabulary: ByteVocabulary, design: TokenizerDesign) -> Tokenizer:
    """The whole tokenizer, for tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary.entries), merges=list(vocabulary.merges), byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in design.special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in design.ordinary])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in design.later])
    return tokenizer


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _token(text: str) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
