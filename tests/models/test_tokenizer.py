"""Tokenizers as people send them: ids without a token, tokens that were added, and what was left in the file by whoever saved it; and the
positions that config.json sets are those that Transformers reads in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig, Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeTextConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.checkpoint.decoder import RopeConfig, rope_of, rope_theta_of
from omnistage.models.checkpoint.files import BadCheckpoint, Config
from omnistage.models.conversation import TextConstraint, Turn
from omnistage.models.interface import TextRequest
from omnistage.models.text.chat import TextTokenizer, read_tokenizer
from omnistage.models.text.constraint import Constraints
from omnistage.models.tiny.qwen3_omni import DESIGN
from omnistage.models.tiny.tokenizer import train, write_files

BYTES = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
HOLES = {"Ġthe": 300, "▁odd": 310, "Ã©": 320}
"""Entries of the vocabulary behind its bytes, with nothing between them. One has a character that stands for no byte."""
ADDED = ("two words", "你好", "café", "<tool_call>", "\n\n")
END = "<|im_end|>"
VOCABULARY = 400


def made(added: Sequence[str] = ADDED) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={**BYTES, **HOLES}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.add_special_tokens([END])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    read = TextTokenizer(made(), VOCABULARY)
    read.ends = frozenset({read.special[END]})
    return read


def test_every_id_of_the_head_has_bytes_or_none(tokenizer: TextTokenizer) -> None:
    ids = set(made().get_vocab().values())
    assert tokenizer.tokenless == set(range(VOCABULARY)) - ids and 305 in tokenizer.tokenless
    pieces = {token_id: tokenizer.piece(token_id) for token_id in range(VOCABULARY)}
    assert {token_id for token_id, piece in pieces.items() if not piece} == tokenizer.unsayable
    assert tokenizer.unsayable == tokenizer.tokenless | {tokenizer.special[END]}
    assert (pieces[300], pieces[310], pieces[320]) == (b" the", "▁odd".encode(), "é".encode())
    with pytest.raises(ValueError, match="not in the vocabulary"):
        tokenizer.piece(VOCABULARY)


@pytest.mark.parametrize("text", ADDED)
def test_an_added_token_says_its_text(tokenizer: TextTokenizer, text: str) -> None:
    (token_id,) = tokenizer.ids_of(text) or ()
    said = Detokenizer(tokenizer.piece, stop=["!"])
    assert said.push(token_id) + said.finish() == text
    stopped = Detokenizer(tokenizer.piece, stop=[text[-1]])
    assert stopped.push(token_id) == text[: text.index(text[-1])] and stopped.stopped


def test_text_of_a_constraint_may_be_of_tokens_behind_a_hole(tokenizer: TextTokenizer) -> None:
    constraints = Constraints(
        tokenizer.piece, tokenizer.encode, special=tokenizer.special.values(), end_ids=sorted(tokenizer.ends), vocabulary=VOCABULARY
    )
    asked = TextRequest((Turn("user", ("x",)),), seed=0, constraint=TextConstraint("choice", choices=("two words", " the", "你好")))
    grammar = asyncio.run(constraints.of(asked))
    asyncio.run(constraints.close())
    assert grammar is not None
    walk = grammar.begin()
    words = walk.allowed().tolist()
    allowed = {token_id for token_id in range(VOCABULARY) if words[token_id // 32] >> token_id % 32 & 1}
    assert allowed.isdisjoint(tokenizer.unsayable)
    assert {300, *(tokenizer.ids_of("two words", "你好") or ())} <= allowed


@pytest.mark.parametrize("text", [*ADDED, END])
def test_what_people_wrote_is_text_whatever_was_added(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(f"Say {text}.")
    assert set(ids).isdisjoint(tokenizer.added.values())
    assert b"".join(map(tokenizer.piece, ids)).decode() == f"Say {text}."


def test_a_file_that_fills_up_or_cuts_texts_does_so_with_none_of_ours() -> None:
    file = made()
    file.enable_padding(length=50)
    file.enable_truncation(3)
    saved = Tokenizer.from_str(file.to_str())
    assert TextTokenizer(saved, VOCABULARY).encode("one two three") == tuple(made().encode("one two three").ids)


@pytest.mark.parametrize("vocabulary", [100, 320])
def test_a_token_that_the_head_does_not_have_is_told(vocabulary: int) -> None:
    """Also where there are fewer tokens than rows, because the tokenizer has holes."""
    with pytest.raises(BadCheckpoint, match=f"ids of the model end at {vocabulary - 1}"):
        TextTokenizer(made(), vocabulary)


# A vocabulary and merges ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder as it is published, without tokenizer.json."""
    write_files(tmp_path / "bare", train(), DESIGN)
    return tmp_path / "bare"


def test_a_vocabulary_and_merges_have_the_ids_of_transformers(bare: Path, tmp_path: Path, seed: int) -> None:
    """And those of the tokenizer.json that says the same."""
    write_files(tmp_path / "whole", train(), replace(DESIGN, repeats=True))
    ours, whole, theirs = read_tokenizer(bare), read_tokenizer(tmp_path / "whole"), AutoTokenizer.from_pretrained(bare)
    assert sorted(path.name for path in bare.iterdir()) == ["merges.txt", "tokenizer_config.json", "vocab.json"]
    assert ours.get_vocab() == whole.get_vocab() == theirs.get_vocab()
    assert ours.get_added_tokens_decoder() == whole.get_added_tokens_decoder() == theirs.added_tokens_decoder
    source = random.Random(seed)
    characters = [*map(chr, range(0xD800)), *map(chr, range(0xE000, 0x110000))]
    marks = ("\r\n \n", "'s", "'LL", "e\u0301", "\u1112\u1161\u11ab", "ﬁ", "१२", "123", "the")
    words = (*DESIGN.special, *DESIGN.ordinary, *" \t\n\u00a0\u3000", *marks)
    texts = ["".join(source.choice(words if source.random() < 0.6 else characters) for _ in range(25)) for _ in range(300)]
    for text in texts:
        assert ours.encode(text).ids == whole.encode(text).ids == theirs(text)["input_ids"]
    one, other = (TextTokenizer(tokenizer, 640) for tokenizer in (ours, whole))
    assert one.special == other.special and [one.piece(token) for token in range(640)] == [other.piece(token) for token in range(640)]
    assert [one.encode(text) for text in texts] == [other.encode(text) for text in texts]


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("vocab.json", None, r"/tokenizer\.json is missing: .*; vocab\.json would do as well$"),
        ("merges.txt", None, r"/tokenizer\.json is missing: .*; merges\.txt would do as well$"),
        ("vocab.json", '{"a": 0', r"/vocab\.json is not JSON"),
        ("vocab.json", '{"a": 0}', r"merges\.txt.* is damaged: .*out of vocabulary"),
        ("vocab.json", '{"a": -1}', r"vocab\.json.* is damaged"),
        ("merges.txt", "#version: 0.2\nt h\nth", r"merges\.txt.* is damaged: .*invalid at line 2"),
        ("tokenizer_config.json", "[]", r"/tokenizer_config\.json is not a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"512": 5}}', r"tokenizer_config\.json is damaged"),
        ("tokenizer_config.json", '{"tokenizer_class": "GPT2Tokenizer"}', "'tokenizer_class' is 'GPT2Tokenizer': .*only Qwen2Tokenizer"),
    ],
)
def test_a_vocabulary_or_merges_that_are_missing_or_damaged_are_told(bare: Path, file: str, text: str | None, told: str) -> None:
    (bare / file).unlink()
    if text is not None:
        (bare / file).write_text(text)
    with pytest.raises(BadCheckpoint, match=told):
        read_tokenizer(bare)


# Positions of a config ------------------------------------------------------------------------------------------------------------------


SPELT: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": None, "rope_parameters": None},
    {"rope_parameters": {"rope_theta": 700.0}},
    {"rope_parameters": {"rope_theta": 700.0}, "rope_theta": 500.0},
    {"rope_parameters": {"mrope_section": [1, 2, 3]}, "rope_theta": 500.0},
    {"rope_parameters": {}, "rope_theta": 500.0},
    {"rope_scaling": {"mrope_section": [1, 2, 3]}, "rope_theta": 500.0},
    {"rope_scaling": {"mrope_section": [1, 2, 3], "rope_theta": 900.0}, "rope_theta": 500.0},
    {"rope_scaling": {"mrope_section": [1, 2, 3]}, "rope_parameters": {"rope_theta": 700.0, "mrope_section": [2, 2, 2]}, "rope_theta": 5e2},
    {"rope_scaling": {}, "rope_parameters": {"rope_theta": 700.0}},
]


@pytest.mark.parametrize("said", SPELT, ids=str)
def test_positions_of_a_decoder_are_read_as_transformers_reads_them(said: dict[str, Any]) -> None:
    read = Qwen3OmniMoeTextConfig(**copied(said)).rope_parameters
    assert rope_of(Config(said, "config"), axes=3, default_sections=(24, 20, 20)) == RopeConfig(
        read["rope_theta"], tuple(read.get("mrope_section", (24, 20, 20)))
    )


@pytest.mark.parametrize("said", [*SPELT, {}], ids=str)
@pytest.mark.parametrize(
    ("kind", "known"),
    [
        *(("axial", Qwen3OmniMoeVisionEncoderConfig), ("axial", Qwen2_5OmniVisionEncoderConfig)),
        *(("default", Qwen3OmniMoeCode2WavConfig), ("default", Qwen2_5OmniDiTConfig)),
    ],
)
def test_so_are_those_of_encoders_and_code2wavs(said: dict[str, Any], kind: str, known: Any) -> None:
    assert rope_theta_of(Config(said, "config"), kind) == known(**copied(said)).rope_parameters["rope_theta"]


def copied(said: dict[str, Any]) -> dict[str, Any]:
    """Transformers writes into what it is given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in said.items()}
