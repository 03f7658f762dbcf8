"""Reads the tokenizer of a checkpoint, and turns text into tokens with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

from omnistage.engine.detokenizer import BytePieces
from omnistage.models.common.checkpoint import BadCheckpoint, check_files, json_object
from omnistage.models.common.thought import Marks

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Text is tokenized on one thread; by default the library uses a thread for each core."""

KINDS = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Classes of tokenizers that vocab.json and merges.txt describe completely."""


class TextTokenizer:
    """Turns text into tokens, and a token into its bytes.

    vocabulary: number of ids of the decoder's head, often more than there are tokens. added: text -> id of the tokens that were added to
    the vocabulary, such as marks. special: text -> id of the added tokens that no answer has. tokenless: ids of the head without a token.
    piece: returns the bytes of an id; b"" for a special or a tokenless id. ends: ids that end an answer and are no part of it; a family
    sets them. unsayable: special and tokenless ids, which are drawn only to end an answer. thinks: the tokens around the thought before an
    answer; None: the model does not think."""

    ends: frozenset[int]
    thinks: Marks | None = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        """Raises BadCheckpoint for a token whose id the head does not have."""
        # Switched off, because the file may still have the padding and truncation that its last user chose.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self.vocabulary = tokenizer, vocabulary
        ids, base_ids = set(tokenizer.get_vocab().values()), set(tokenizer.get_vocab(with_added_tokens=False).values())
        if (last := max(ids, default=-1)) >= vocabulary:
            raise BadCheckpoint(f"the tokenizer has a token {last}, the ids of the model end at {vocabulary - 1}: one is not the other's")
        added = tokenizer.get_added_tokens_decoder()
        self.added: Mapping[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special: Mapping[str, int] = {token.content: token_id for token_id, token in added.items() if token.special}
        # Text of a request never becomes a mark: users can neither end their own turn nor begin a thought. The library leaves out only
        # special tokens, and files do not call all marks special.
        tokenizer.add_special_tokens([*added.values()])
        tokenizer.encode_special_tokens = True
        self.tokenless = frozenset(range(vocabulary)) - ids
        self.unsayable = self.tokenless.union(self.special.values())
        # An added token is stored as plain text, a token of the vocabulary with one character for each byte.
        spelled = {token_id: token.content.encode() for token_id, token in added.items() if token_id not in base_ids}
        self.piece = BytePieces(tokenizer.id_to_token, spelled | dict.fromkeys(self.unsayable, b""))

    def ids_of(self, *texts: str) -> tuple[int, ...] | None:
        """Ids of these texts, each of which is one token; None: a text is not one token."""
        ids = [token_id for text in texts if (token_id := self._tokenizer.token_to_id(text)) is not None]
        return tuple(ids) if len(ids) == len(texts) else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text. Added tokens in it are encoded as plain text."""
        # Unlike `encode`, a batch lets other threads of Python run meanwhile.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return tuple(encoded.ids)


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the folder, from its tokenizer.json, else made by Transformers from vocab.json and merges.txt. Raises
    BadCheckpoint."""
    path = directory / "tokenizer.json"
    check_files(directory, "", (path.name,))
    if not path.is_file():
        return _of_vocabulary(directory)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library has no narrower class.
        raise BadCheckpoint(f"{path} is damaged: {error}") from error


def _of_vocabulary(directory: Path) -> Tokenizer:
    """A tokenizer of Qwen2's class, from vocab.json and merges.txt, which do not say how text is cut. Raises BadCheckpoint for another
    class."""
    json_object(directory / "vocab.json")
    path = directory / "tokenizer_config.json"
    kind = json_object(path).get("tokenizer_class", KINDS[0]) if path.is_file() else KINDS[0]
    if kind not in KINDS:
        raise BadCheckpoint(f"{path}: 'tokenizer_class' is {str(kind)[:80]!r}: without tokenizer.json only {' and '.join(KINDS)} are known")
    try:
        tokenizer: Tokenizer = Qwen2Tokenizer.from_pretrained(directory, local_files_only=True).backend_tokenizer
        return tokenizer
    except Exception as error:  # Damaged files, as above.
        raise BadCheckpoint(f"{directory}: vocab.json, merges.txt or tokenizer_config.json is damaged: {error!r}") from error
