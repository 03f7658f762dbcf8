"""The text side of a checkpoint: its tokenizer, its chat template, the tokens that end an answer, and the tokens that no answer has.

The checkpoint's own chat template writes the conversation. Words of a user always stay text: they never become special tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from omnistage.engine.detokenizer import BytePieces
from omnistage.models.checkpoint.files import BadCheckpoint, check_files, json_object
from omnistage.models.conversation import Part, Turn
from omnistage.models.interface import BadRequest
from omnistage.models.text.answer import CLOSES, OPENS, Marks

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
        thought_size = len(turn.text) - len(answer.lstrip("\n")) if closes else 0  # characters to leave out
        parts = list[Part]()
        for part in turn.parts:
            if isinstance(part, str):
                part, thought_size = part[thought_size:], max(thought_size - len(part), 0)
            parts.append(part)
        return Turn(turn.role, tuple(parts))

    def _ids(self, rendered: str, texts: Sequence[str]) -> Iterator[int]:
        """Yields the ids of the conversation. rendered: the conversation, as the template wrote it, with marks in place of the texts.
        texts: the users' texts. Added tokens that the template wrote become tokens; in `texts` they stay text."""
        plain = ""
        for index, part in enumerate(_MARK.split(rendered)):
            if index % 2:  # The number of a mark: `split` returns it between the parts around the mark.
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
    if value is None:
        return []
    ends = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ends):
        raise BadCheckpoint(f"{path}: 'eos_token_id' is {str(value)[:80]}: it must be an id, or a list of ids")
    return ends
