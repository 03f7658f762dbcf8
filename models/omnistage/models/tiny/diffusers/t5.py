"""The tokenizer of the films and sounds with random weights: T5's, with tokens for the words that it knows and for single letters."""

from __future__ import annotations

import string
from pathlib import Path

from transformers.models.t5 import T5Tokenizer

from omnistage.models.tiny.diffusers.tokenizer import PROMPTS
from omnistage.models.tiny.tokenizer import TRAINING

SPACE = "\u2581"
SENTINELS = 100
"""How many tokens stand for left-out words, as published; no prompt here has any."""
WORD_COST, LETTER_COST = 8.0, 16.0
"""Cost of a word and of a letter: the logarithm of how rare it is. All words are alike, and so are all letters, so a known word is cheaper
than its letters."""


def write_t5(directory: Path, max_tokens: int) -> int:
    """Write the files of a tokenizer. max_tokens: the default length that it cuts a text to. Returns how many tokens it has."""
    words = {SPACE + word.strip(string.punctuation).lower() for word in f"{TRAINING} {PROMPTS}".split()}
    letters = sorted({SPACE, *string.printable.strip(), *TRAINING, *PROMPTS} - {" ", "\n"})
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    pieces |= {word: -WORD_COST for word in sorted(words) if word != SPACE}
    pieces |= dict.fromkeys(letters, -LETTER_COST)
    pieces |= {f"<extra_id_{number}>": 0.0 for number in range(SENTINELS - 1, -1, -1)}
    tokenizer = T5Tokenizer(vocab=list(pieces.items()), extra_ids=SENTINELS, model_max_length=max_tokens)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)
