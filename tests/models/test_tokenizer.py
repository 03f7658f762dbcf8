"""Tokenizers as people send them: ids without a token, tokens that were added, and what was left in the file by whoever saved it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.constraint import Constraints
from omnistage.models.common.tokenizer import TextTokenizer
from omnistage.models.conversation import Constraint, Turn
from omnistage.models.interface import TextRequest

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
    (token_id,) = tokenizer.encode(text)
    said = Detokenizer(tokenizer.piece, stop=["!"])
    assert said.push(token_id) + said.finish() == text
    stopped = Detokenizer(tokenizer.piece, stop=[text[-1]])
    assert stopped.push(token_id) == text[: text.index(text[-1])] and stopped.stopped


def test_text_of_a_constraint_may_be_of_tokens_behind_a_hole(tokenizer: TextTokenizer) -> None:
    constraints = Constraints(
        tokenizer.piece,
        tokenizer.encode,
        special=tokenizer.special.values(),
        end_ids=sorted(tokenizer.ends),
        vocabulary=VOCABULARY,
    )
    asked = TextRequest((Turn("user", ("x",)),), seed=0, constraint=Constraint("choice", choices=("two words", " the", "你好")))
    grammar = asyncio.run(constraints.of(asked))
    asyncio.run(constraints.close())
    assert grammar is not None
    walk = grammar.begin()
    words = walk.allowed().tolist()
    allowed = {token_id for token_id in range(VOCABULARY) if words[token_id // 32] >> token_id % 32 & 1}
    assert allowed.isdisjoint(tokenizer.unsayable)
    assert {300, *tokenizer.encode("two words"), *tokenizer.encode("你好")} <= allowed


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
