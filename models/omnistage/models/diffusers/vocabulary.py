"""The vocabulary of a checkpoint that knows few words: what it draws, the words, and whether sizes can change. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnistage.models.checkpoint.files import BadCheckpoint, json_object
from omnistage.models.diffusers.options import DEFAULTS_FILE

MAX_WHAT_CHARACTERS = 100
MOST_WORDS = 12
"""The limit of words of one kind that a note names."""
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words of a checkpoint. what: the things that it draws, as text; empty if it does not say. words: the words that it knows, by
    their subject, first the things that can be drawn, as in {"shape": ["circle", ...], "colour": ["red", ...]}. lower_case: it learned
    small letters only, and gets prompts in them. one_size: it draws well only in its own size."""

    what: str = ""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lower_case: bool = False
    one_size: bool = False

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        """Read the vocabulary from the folder of a checkpoint. Raises BadCheckpoint for a file of another form."""
        path = folder / DEFAULTS_FILE
        entry = json_object(path).get("draws") if path.is_file() else None
        if entry is None:
            return cls()
        if not _is_well_formed(entry):
            example = '{"what": "shapes", "words": {"shape": ["circle"]}, "lower_case": true, "one_size": true}'
            raise BadCheckpoint(f"{path}: draws must be as in {example}")
        words = {name: tuple(map(str.casefold, words)) for name, words in entry["words"].items()}
        return cls(entry["what"], words, entry.get("lower_case", False), entry.get("one_size", False))

    def cased(self, prompt: str) -> str:
        """A prompt in the letters that the model was taught."""
        return prompt.lower() if self.lower_case else prompt

    def notes(self, prompt: str, size: tuple[int, int], usual_size: tuple[int, int]) -> Iterator[str]:
        """Yields notes for the client: its prompt names none of the words, or its size is not the usual. size: width and height to draw."""
        missing = [name for name, words in self.words.items() if not _names_one(prompt, words)]
        if missing:
            unnamed = "none of them" if missing[0] == next(iter(self.words)) else _none_of(self.words[missing[0]])
            yield f"this model draws {self.what}; this prompt names {unnamed}"
        if self.one_size and size != usual_size:
            yield f"this model was made for {usual_size[0]}x{usual_size[1]} pixels: at other sizes much is misplaced, or missing"


def _none_of(words: Sequence[str]) -> str:
    """The part of a note that lists words. It says "none of", which also fits a prompt with a word that the checkpoint does not list."""
    return f"none of: {', '.join(words[:MOST_WORDS])}{', ...' if len(words) > MOST_WORDS else ''}"


def _names_one(prompt: str, words: Collection[str]) -> bool:
    """Whether a prompt has one of these words, or a plural of one."""
    prompt_words = map(str.casefold, _WORD.findall(prompt))
    return any(not {word, word.removesuffix("s"), word.removesuffix("es")}.isdisjoint(words) for word in prompt_words)


def _is_well_formed(entry: Any) -> bool:
    """Whether the entry of the file has the form of a vocabulary."""
    if not isinstance(entry, dict) or not isinstance(entry.get("words"), dict) or not isinstance(entry.get("what"), str):
        return False
    words = [word for words in entry["words"].values() if isinstance(words, list) for word in words]
    flags = (entry.get(name, False) for name in ("lower_case", "one_size"))
    return (
        0 < len(entry["what"]) <= MAX_WHAT_CHARACTERS
        and all(isinstance(words, list) and words for words in entry["words"].values())
        and all(isinstance(word, str) for word in words)
        and all(isinstance(flag, bool) for flag in flags)
    )
