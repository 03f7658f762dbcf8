"""Text of a Qwen2.5-Omni checkpoint: its tokenizer, its chat template, and which tokens end an answer or are in none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnistage.models.common.checkpoint import BadCheckpoint, json_object
from omnistage.models.common.tokenizer import TextTokenizer, read_tokenizer
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.prompt import ChatTemplate

END = "<|im_end|>"
TEMPLATES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")
"""Where a chat template may be, the first first, as Transformers looks for that of a processor. The last one is the tokenizer's."""


class OmniTokenizer(TextTokenizer):
    """template: writes conversations."""

    def __init__(self, directory: Path, config: ThinkerConfig) -> None:
        """Raises BadCheckpoint."""
        vocabulary = config.text.vocab_size
        super().__init__(read_tokenizer(directory), vocabulary)
        if END not in self.special:
            raise BadCheckpoint(f"{directory / 'tokenizer.json'} has no special token {END}")
        # An end that the head does not have is never drawn.
        self.ends = frozenset({self.special[END], *(token_id for token_id in _ends(directory) if token_id < vocabulary)})
        self.template = ChatTemplate(_template(directory), self.special, self.encode, config.ids)


def _template(directory: Path) -> str:
    """The chat template; of several with names, the default one."""
    for path in (directory / name for name in TEMPLATES):
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            try:
                return path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadCheckpoint(f"{path} cannot be read: {error}") from None
        found = json_object(path).get("chat_template")
        if isinstance(found, list):
            found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        if isinstance(found, dict):
            found = found.get("default")
        if isinstance(found, str):
            return found
    raise BadCheckpoint(f"{directory} has no chat template: neither chat_template.jinja nor chat_template.json")


def _ends(directory: Path) -> Sequence[int]:
    path = directory / "generation_config.json"
    found = json_object(path).get("eos_token_id") if path.is_file() else None
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ends):
        raise BadCheckpoint(f"{path}: 'eos_token_id' is {str(found)[:80]}: it must be an id, or a list of ids")
    return ends
