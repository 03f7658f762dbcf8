"""The text side of a checkpoint with a chat template: its tokenizer, its template, the tokens that end an answer, and the tokens that no
answer has.

The checkpoint's own chat template writes the conversation. Words of a user always stay text: they never become special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from omnistage.models.common.checkpoint import BadCheckpoint, json_object
from omnistage.models.common.thought import CLOSES, OPENS, Marks
from omnistage.models.common.tokenizer import TextTokenizer, read_tokenizer
from omnistage.models.conversation import Part, Turn
from omnistage.models.interface import BadRequest

TEMPLATES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")
"""Files that may hold a chat template, in the order in which Transformers looks for it. The last file belongs to the tokenizer."""

_MARK = re.compile("\ue000([0-9]+)\ue001")
"""While the template writes a conversation, such a mark with a number stands for the text of this number. Its first and last character
belong to Unicode's private use area."""


class ChatTokenizer(TextTokenizer):
    """The tokenizer of a checkpoint, with its chat template, which writes conversations. ends: ids that end an answer."""

    def __init__(self, directory: Path, vocabulary: int, end: str, media: Mapping[int, str]) -> None:
        """directory: the checkpoint's folder. vocabulary: number of ids that the model has. end: the special token that ends a turn. media:
        see ChatTemplate. Raises BadCheckpoint."""
        super().__init__(read_tokenizer(directory), vocabulary)
        if end not in self.special:
            raise BadCheckpoint(f"{directory}: the tokenizer has no special token {end}")
        # An end token outside the head's vocabulary is left out, because it is never drawn.
        self.ends = frozenset({self.special[end], *(token_id for token_id in _read_ends(directory) if token_id < vocabulary)})
        template = _template(directory)
        self.template = ChatTemplate(template, self.added, self.encode, media)
        # The template shows whether the model thinks; many tokenizers have the marks of a thought although the model does not think.
        if (OPENS in template or CLOSES in template) and (marks := self.ids_of(OPENS, CLOSES)):
            opens, closes = marks
            template_marks = [token_id for token_id in self.template.token_ids([Turn("user", ("",))], []) if token_id in marks]
            self.thinks = Marks(opens, closes, is_open=template_marks[-1:] == [opens])
            self.unsayable -= {opens, closes}


class ChatTemplate:
    """The chat template of a checkpoint: turns a conversation into token ids. template: its Jinja text. added: text of each added token ->
    its id. encode: turns text without added tokens into ids. media: id of the token for a medium -> "image", "audio" or "video"."""

    def __init__(self, template: str, added: Mapping[str, int], encode: Callable[[str], Sequence[int]], media: Mapping[int, str]) -> None:
        self._template, self._added, self._encode, self._media = template, added, encode, media
        self._split = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)) or "(?!)")

    def token_ids(self, turns: Sequence[Turn], media: Sequence[str]) -> list[int]:
        """Token ids of a conversation, up to the beginning of the assistant's answer, with one id for each medium. media: "image", "audio"
        or "video" for each part that is not text, in order. Raises BadRequest if the template refuses the conversation."""
        texts, kinds = list[str](), iter(media)
        conversation = [{"role": turn.role, "content": _mark_texts(self._drop_thought(turn), texts, kinds)} for turn in turns]
        try:
            rendered = render_jinja_template([conversation], chat_template=self._template, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise BadRequest("thinker.messages", f"the checkpoint's chat template refuses this conversation: {error}") from None
        ids = list(self._ids(rendered[0][0], texts))
        placed = [self._media[token_id] for token_id in ids if token_id in self._media]
        if placed != list(media):
            raise BadRequest("thinker.messages", f"the checkpoint's chat template has no place for all of: {', '.join(media)}")
        return ids

    def _drop_thought(self, turn: Turn) -> Turn:
        """The turn without a thought at the beginning of the assistant's text. Templates that know thoughts leave them out, but here they
        cannot, because they see marks in place of the texts."""
        if turn.role != "assistant" or CLOSES not in self._template:
            return turn
        _, closes, answer = turn.text.rpartition(CLOSES)
        thought = len(turn.text) - len(answer.lstrip("\n")) if closes else 0
        parts = list[Part]()
        for part in turn.parts:
            if isinstance(part, str):
                part, thought = part[thought:], max(thought - len(part), 0)
            parts.append(part)
        return Turn(turn.role, tuple(parts))

    def _ids(self, rendered: str, texts: Sequence[str]) -> Iterator[int]:
        """Yields the ids of the conversation. rendered: the conversation, as the template wrote it, with marks in place of the texts.
        texts: the users' texts. Added tokens that the template wrote become tokens; in `texts` they stay text."""
        plain = ""
        for index, part in enumerate(_MARK.split(rendered)):
            if index % 2:
                plain += texts[int(part)]
                continue
            end = 0
            for match in self._split.finditer(part):
                yield from self._encode(plain + part[end : match.start()])
                yield self._added[match.group()]
                plain, end = "", match.end()
            plain += part[end:]
        yield from self._encode(plain)


def _mark_texts(turn: Turn, texts: list[str], kinds: Iterator[str]) -> str | list[dict[str, str]]:
    """The parts of a turn in the form that templates expect, with a mark in place of each text. texts: the texts are appended to it. kinds:
    the kind of the next medium."""
    content = []
    for part in turn.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": f"\ue000{len(texts)}\ue001"})
            texts.append(part)
        else:
            kind = next(kinds)
            content.append({"type": kind, kind: ""})
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _template(directory: Path) -> str:
    """The text of the chat template; if a file has several templates, the template named default. Raises BadCheckpoint if there is none."""
    for path in (directory / name for name in TEMPLATES):
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            try:
                return path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadCheckpoint(f"{path} cannot be read: {error}") from None
        template = json_object(path).get("chat_template")
        if isinstance(template, list):
            template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        if isinstance(template, dict):
            template = template.get("default")
        if isinstance(template, str):
            return template
    raise BadCheckpoint(f"{directory} has no chat template: neither chat_template.jinja nor chat_template.json")


def _read_ends(directory: Path) -> Sequence[int]:
    """The ids that end an answer, from generation_config.json; empty if it names none. Raises BadCheckpoint."""
    path = directory / "generation_config.json"
    value = json_object(path).get("eos_token_id") if path.is_file() else None
    ends = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ends):
        raise BadCheckpoint(f"{path}: 'eos_token_id' is {str(value)[:80]}: it must be an id, or a list of ids")
    return ends
