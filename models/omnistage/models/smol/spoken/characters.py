"""Replaces the characters of a text by those that the forms know: one for all that look alike, LOST for characters without a sound."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from omnistage.models.smol.spoken.numbers import GROUP

LOST = "\x00"
"""Stands for a character that means something and has neither a sound nor a word."""
SIGN_WORDS = {
    "≤": "less than or equal to",
    "≥": "greater than or equal to",
    "≠": "is not equal to",
    "≈": "is approximately equal to",
    "≅": "is congruent to",
    "≡": "is identical to",
    "≪": "is much less than",
    "≫": "is much greater than",
    "∝": "is proportional to",
    "±": "plus or minus",
    "∓": "minus or plus",
    "√": "the square root of",
    "∛": "the cube root of",
    "∞": "infinity",
    "∑": "the sum of",
    "∏": "the product of",
    "∫": "the integral of",
    "∂": "partial",
    "∇": "del",
    "∈": "is in",
    "∉": "is not in",
    "⊂": "is a subset of",
    "⊆": "is a subset of or equal to",
    "∪": "union",
    "∩": "intersection",
    "∅": "the empty set",
    "∀": "for all",
    "∃": "there exists",
    "∧": "and",
    "∨": "or",
    "¬": "not",
    "⇒": "implies",
    "⇔": "if and only if",
    "∴": "therefore",
    "∵": "because",
    "∠": "angle",
    "⊥": "is perpendicular to",
    "∥": "is parallel to",
    "÷": "divided by",
    "→": "to",
    "←": "from",
    "↔": "to and from",
    "↑": "up",
    "↓": "down",
    "‰": "per thousand",
    "‱": "per ten thousand",
    "°": "degrees",
    "№": "number",
    "§": "section",
    "¶": "paragraph",
    "©": "copyright",
    "®": "registered trademark",
    "™": "trademark",
    "℠": "service mark",
    "†": "dagger",
    "‡": "double dagger",
    "♯": "sharp",
    "♭": "flat",
    "♂": "male",
    "♀": "female",
    "✓": "check",
    "✔": "check",
    "✗": "cross",
    "✘": "cross",
    "★": "star",
    "☆": "star",
    "ℏ": "h bar",
    "℮": "estimated",
    "⌀": "diameter",
    "▲": "up",
    "▼": "down",
    "⌊": "the floor of",
    "⌈": "the ceiling of",
    "\u0302": "hat",
    "\u0303": "tilde",
    "\u0304": "bar",
    "\u0305": "bar",
    "\u20d7": "vector",
}
"""The word for a sign that reads the same wherever it stands. Other signs are forms in signs.py."""
CURRENCY_SIGNS = "$£€¥₹₩₽₺₴₫₪฿₿¢₦₱"
_LETTERS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma sigma tau upsilon phi chi psi omega"
)
GREEK = {chr(0x3B1 + place): word for place, word in enumerate(_LETTERS.split())}
GREEK |= {letter.upper(): word for letter, word in GREEK.items()} | {"ϕ": "phi", "ϑ": "theta", "ϵ": "epsilon", "ς": "sigma"}
SUPERSCRIPTS = {"⁰": "0", "¹": "1", "²": "2", "³": "3", "⁻": "-", "⁺": "+", "ⁿ": "n"} | {
    chr(0x2070 + one): str(one) for one in range(4, 10)
}
FRACTIONS = {
    "½": (1, 2),
    "⅓": (1, 3),
    "⅔": (2, 3),
    "¼": (1, 4),
    "¾": (3, 4),
    "⅕": (1, 5),
    "⅖": (2, 5),
    "⅗": (3, 5),
    "⅘": (4, 5),
    "⅙": (1, 6),
    "⅚": (5, 6),
    "⅐": (1, 7),
    "⅛": (1, 8),
    "⅜": (3, 8),
    "⅝": (5, 8),
    "⅞": (7, 8),
    "⅑": (1, 9),
    "⅒": (1, 10),
}
_ROMAN_SIGNS = "".join(chr(0x2160 + place) for place in (*range(12), *range(16, 28)))
_SPOKEN = set("“”—–…−×·¿¡‖⌋⌉") | set(SIGN_WORDS) | set(CURRENCY_SIGNS) | set(GREEK) | set(SUPERSCRIPTS) | set(FRACTIONS) | set(_ROMAN_SIGNS)
_SAME = {
    **dict.fromkeys("‘’‚‛′ʼʹ＇´", "'"),
    **dict.fromkeys("″„‟«»＂", '"'),
    **dict.fromkeys("‐‑﹣－", "-"),
    **dict.fromkeys("‒", "–"),
    **dict.fromkeys("―", "—"),
    **dict.fromkeys("⁄∕", "/"),
    **dict.fromkeys("∗", "*"),
    **dict.fromkeys("∶", ":"),
    **dict.fromkeys("∼", "~"),
    **dict.fromkeys("⋅∙", "·"),
    **dict.fromkeys("、，", ","),
    **dict.fromkeys("。", "."),
    **dict.fromkeys("[{", "("),
    **dict.fromkeys("]}", ")"),
    "٫": ".",
    "٬": ",",
    "µ": "μ",
    "ß": "ss",
    "ẞ": "SS",
    "þ": "th",
    "Þ": "Th",
    "œ": "oe",
    "Œ": "OE",
    "ı": "i",
    "ŋ": "ng",
    "Ŋ": "Ng",
    "ſ": "s",
    "Ω": "Ω",
    "∆": "Δ",
    "Å": "Å",
    "→": "→",
    "⟶": "→",
    "➔": "→",
    "➜": "→",
    "➡": "→",
    "⟹": "⇒",
    "⇐": "←",
    "⟵": "←",
}
_LATIN = re.compile(r"LATIN (SMALL|CAPITAL) LETTER (?:DOTLESS )?([A-Z])(?: WITH .*)?")
_MEANING = frozenset(("Lu", "Ll", "Lt", "Lo", "Lm", "Nd", "Nl", "No", "Sm", "Sc", "So", "Sk", "Co", "Cn"))
_SIGNS_TOO = frozenset("•‣⁃⁂⁎⁑⁕⁜⁒※‾⟨⟩⟪⟫⟦⟧〈〉⦃⦄")
"""Characters that mean something, although Unicode calls them punctuation."""
_JOINING = frozenset(("Mn", "Mc", "Me", "Cf", "Sk"))
_LAST_KNOWN = 0xFF
_GREEK_WORD = re.compile(r"[\u0370-\u03ff\u1f00-\u1fff]{3,}")
_REPEATED = re.compile(r"([^\w\s\x00(),★☆])\1{2,}")
_RULES = re.compile(r"([-_=*~#+<>|/\\^])\1{2,}")
_UNDERSCORED = re.compile(r"(?<![\w.])\d{1,3}(?:_\d{3})+(?![\w])")
_SPAN = re.compile(r"(?<=\d)\.{2,}(?=\d)")
_WORD = re.compile(r"\S+")
_GROUPING = "\u00a0\u2007\u2009\u202f"


@dataclass(frozen=True, slots=True)
class Clean:
    """A text after `clean`. text: its words, with one space or GROUP between two; some are empty. unspoken: runs that became LOST."""

    text: str
    unspoken: tuple[str, ...]


def clean(text: str) -> Clean:
    """Replace the characters of a text, in linear time. The number of words stays, so that they can be counted by spaces."""
    parts, unspoken, end = list[str](), list[str](), 0
    for match in _WORD.finditer(text):
        word = match.group()
        if parts:
            gap = text[end : match.start()]
            groups = gap in _GROUPING and parts[-1][-1:].isdecimal() and re.match(r"\d{3}(?!\d)", word)
            parts.append(GROUP if groups else " ")
        if not word.isascii():
            word, lost = _known_word(word)
            unspoken += lost
        if ".." in word:
            word = _SPAN.sub("…", word)
        if rules := [match.group() for match in _RULES.finditer(word)]:
            unspoken += [rule for rule in rules if rule[0] not in "-_"]
            word = _RULES.sub(lambda match: "" if match[1] in "-_" else LOST, word)
        if "_" in word:
            word = _UNDERSCORED.sub(lambda match: match.group().replace("_", ","), word)
        parts.append(_REPEATED.sub(r"\1", word).translate(_BRACKETS))
        end = match.end()
    return Clean("".join(parts), tuple(unspoken))


_BRACKETS = str.maketrans("[]{}", "()()", "`")


def _known_word(word: str) -> tuple[str, list[str]]:
    """A word in characters that the forms know, and its runs of characters that became LOST."""
    word = unicodedata.normalize("NFC", word)
    greek = {place for match in _GREEK_WORD.finditer(word) for place in range(*match.span())}
    out, lost, joined = list[str](), list[str](), False
    for place, character in enumerate(word):
        plain = LOST if place in greek else _plain(character)
        if plain == LOST:
            if not joined:
                lost.append("")
            lost[-1] += character
            joined = True
        elif joined and unicodedata.category(character) in _JOINING:
            lost[-1] += character
            continue
        else:
            joined = False
        out.append(plain)
    return "".join(out), lost


_seen: dict[str, str] = {}


def _plain(character: str) -> str:
    """As `_plain_of`, but from a cache."""
    found = _seen.get(character)
    if found is None:
        found = _plain_of(character)
        if len(_seen) < 10_000:
            _seen[character] = found
    return found


def _plain_of(character: str) -> str:
    """The characters that replace a character: LOST if it has a meaning but no sound, empty if it has no meaning."""
    if character.isascii() or character in _SPOKEN:
        return character
    if character in _SAME:
        return _SAME[character]
    if character.isalpha() and ord(character) <= _LAST_KNOWN:
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    latin = _LATIN.fullmatch(unicodedata.name(character, ""))
    if latin:
        return latin.group(2) if latin.group(1) == "CAPITAL" else latin.group(2).lower()
    same = unicodedata.normalize("NFKC", character)
    if same != character and not any(one.isspace() for one in same):
        parts = [_plain_of(one) for one in same]
        if "".join(parts) and LOST not in "".join(parts):
            return "".join(parts)
    category = unicodedata.category(character)
    return LOST if category in _MEANING or character in _SIGNS_TOO else ""
