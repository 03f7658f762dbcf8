"""Text of a Qwen2.5-Omni checkpoint: its tokenizer, its chat template, and which tokens end an answer or are in none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnistage.engine.detokenizer import BytePieces
from omnistage.models.common.checkpoint import BadCheckpoint, json_object
from omnistage.models.common.tokenizer import read_tokenizer
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.prompt import ChatTemplate

END = "<|im_end|>"


class OmniTokenizer:
    """size: ids that there are. special: those of special tokens. piece: the bytes of a token. ends: ids that end an answer. unsayable: ids
    that no answer has: special ones, and any without text."""

    def __init__(self, directory: Path, config: ThinkerConfig) -> None:
        """Raises BadCheckpoint."""
        self._tokenizer = tokenizer = read_tokenizer(directory)
        # Text of a request never becomes a special token: a user cannot end their own turn.
        tokenizer.encode_special_tokens = True
        known = tokenizer.get_vocab_size()
        if known > config.text.vocab_size:
            raise BadCheckpoint(f"{directory}: the tokenizer has {known} tokens, the model {config.text.vocab_size}")
        special = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        if END not in special:
            raise BadCheckpoint(f"{directory / 'tokenizer.json'} has no special token {END}")
        self.piece = BytePieces(tokenizer.id_to_token, list(special.values()))
        self.ends = frozenset({special[END], *_ends(directory)})
        nothing = {token_id for token_id in range(config.text.vocab_size) if tokenizer.id_to_token(token_id) is None}
        self.special, self.size = frozenset(special.values()), known
        self.unsayable = frozenset({*special.values(), *nothing}) - self.ends
        self.template = ChatTemplate(_template(directory), special, self.encode, config.ids)

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, without special tokens."""
        # Unlike `encode`, a batch lets other threads of Python run meanwhile.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids


def _template(directory: Path) -> str:
    """The chat template, from where checkpoints have it: a file of its own, or the tokenizer's settings."""
    plain = directory / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (directory / name).is_file() and isinstance(found := json_object(directory / name).get("chat_template"), str):
            return found
    raise BadCheckpoint(f"{directory} has no chat template: neither chat_template.jinja nor chat_template.json")


def _ends(directory: Path) -> Sequence[int]:
    path = directory / "generation_config.json"
    found = json_object(path).get("eos_token_id", []) if path.is_file() else []
    return [found] if isinstance(found, int) else found
