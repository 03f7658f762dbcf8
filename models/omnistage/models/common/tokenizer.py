"""The tokenizer of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from omnistage.engine.detokenizer import BytePieces
from omnistage.models.common.checkpoint import BadCheckpoint

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Text becomes tokens on one thread, not on a pool as large as the machine."""


class TextTokenizer:
    """Text to tokens, and a token to its bytes.

    vocabulary: ids that the decoder's head has. size: those of them that are tokens. special: ids of special tokens by their text. piece:
    the bytes of a token, none for a special one. ends: ids that end an answer and are in none; a family sets them. unsayable: ids that
    are in no answer, and are drawn only to end it: special ones, and any without text.
    """

    ends: frozenset[int]

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        # Text of a request never becomes a special token: a user cannot end their own turn.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocabulary, self.size = vocabulary, int(tokenizer.get_vocab_size())
        self.special: Mapping[str, int] = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.piece = BytePieces(tokenizer.id_to_token, self.special.values())
        nothing = {token_id for token_id in range(vocabulary) if tokenizer.id_to_token(token_id) is None}
        self.unsayable = frozenset({*self.special.values(), *nothing})

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without special tokens."""
        # Unlike `encode`, a batch lets other threads of Python run meanwhile.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return tuple(encoded.ids)


def read_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json of the folder. Raises BadCheckpoint."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: give the folder of a complete checkpoint, or none for the family's own default")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library has no narrower class.
        raise BadCheckpoint(f"{path} is damaged: {error}") from error
