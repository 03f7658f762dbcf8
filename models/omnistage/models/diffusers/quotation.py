"""The quoted parts of a prompt, which LongCat-Image reads letter by letter, because they shall be written in the picture.

This module replaces the function of the same name in Diffusers. That function puts each word with an apostrophe aside under a name that is
part of the next word's name: it turns "it's a dog that doesn't bark" into "it's a dog that it'sit's bark", in an order that differs between
processes, and 800 such words take it five seconds. For a text with at most one such word both functions agree.
"""

from __future__ import annotations

import re
from typing import Any

WITH_APOSTROPHE = re.compile(r"[a-zA-Z]+'[a-zA-Z]+")
QUOTED = re.compile("('[^']*?'|\"[^\"]*?\"|‘[^‘’]*?’|“[^“”]*?”)")
PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning, more than a prompt can have, so that one of them is free to stand for an apostrophe."""


def split_quotation(prompt: str) -> list[tuple[str, bool]]:
    """All of a prompt in pieces, each with a flag: whether it is quoted. Quotation marks are part of their piece."""
    aside = next(chr(code) for code in PRIVATE if chr(code) not in prompt)
    masked_prompt = WITH_APOSTROPHE.sub(lambda word: word[0].replace("'", aside), prompt)
    return [(part.replace(aside, "'"), bool(place % 2)) for place, part in enumerate(QUOTED.split(masked_prompt)) if part]


def mend(*modules: Any) -> None:
    """Make modules of Diffusers use `split_quotation`."""
    for module in modules:
        module.split_quotation = split_quotation
