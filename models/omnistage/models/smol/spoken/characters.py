"""Replaces the characters of a text by those that the forms know: one for all that look alike, LOST for characters without a sound."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from omnistage.models.smol.spoken.numbers import GROUP
from omnistage.models.smol.spoken.quotes import QUOTE
from omnistage.models.smol.spoken.tables import read_rows, read_table

LOST = "\x00"
"""Stands for a character that means something and has neither a sound nor a word."""
SIGN_WORDS = read_table("signs.tsv")
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
FRACTIONS = {sign: (int(over), int(under)) for sign, over, under in read_rows("fractions.tsv")}
_ROMAN_SIGNS = "".join(chr(0x2160 + place) for place in (*range(12), *range(16, 28)))
_SPOKEN = set("′″—–…−×·¿¡‖⌋⌉") | set(SIGN_WORDS) | set(CURRENCY_SIGNS) | set(GREEK) | set(SUPERSCRIPTS) | set(FRACTIONS) | set(_ROMAN_SIGNS)
_SAME = {character: same for same, characters in read_rows("alike.tsv") for character in characters}
_LATIN = re.compile(r"LATIN (SMALL|CAPITAL) LETTER (?:DOTLESS )?([A-Z])(?: WITH .*)?")
_ALIKE = read_table("marks.tsv")
"""By the end of the name of a mark in any script: the mark that is read for it."""
_SILENT = frozenset(("Mn", "Mc", "Me", "Cf"))
"""Kinds of characters that are parts of others: they have no sound of their own."""
_OF_EMOJI = frozenset("\ufe0e\ufe0f\u20e3")
"""Marks that make an emoji of a digit."""
_JOINING = frozenset(("Mn", "Mc", "Me", "Cf", "Sk"))
_LAST_KNOWN = 0xFF
_GREEK_WORD = re.compile(r"[\u0370-\u03ff\u1f00-\u1fff]{3,}")
_REPEATED = re.compile(r"([^\w\s\x00(),★☆])\1{2,}")
_RULES = re.compile(r"([-_=*~#+<>|/\\^])\1{2,}")
_DASHES = (
    (re.compile(r"(?<![-\s])---(?![-\s])|(?<![-\S])---(?![-\S])"), "—"),
    (re.compile(r"(?<=[\w%°)$€£¥'.])--(?=[\w$€£¥(.])(?![A-Za-z](?![A-Za-z]))|(?<=\d )--(?= [$€£¥]?\d)"), "–"),
    (re.compile(r"(?<!\S)--(?!\S)"), "—"),
)
"""Hyphens that are typed for a dash. Two of them before a word that begins there are the option of a command."""
_UNDERSCORED = re.compile(r"(?<![\w.])\d{1,3}(?:_\d{3})+(?![\w])")
_FACE = re.compile(r"(?<!\S)[:;]-?[()DPp/\\|*](?![^\s,.;!?)])")
_SPAN = re.compile(r"(?<=\d)\.{2,}(?=\d)|\.{2,}(?=[-−–+~<>]?[$€£¥]?\.?\d)")
_WORD = re.compile(r"\S+")
_CLOSING_QUOTES = re.compile(rf"(?<=[\w.,:/-]){QUOTE}+(?=\w|[.,:/-]+\w)|(?<=[^\s{QUOTE}]){QUOTE}+(?=\s)")
"""Quotes that end a form: what follows does not belong to it."""
_TICKS = re.compile(r"(?<=\d)`+(?=\d)")
_GROUPING = "\u00a0\u2007\u2009\u202f"


@dataclass(frozen=True, slots=True)
class Clean:
    """A text after `clean`. text: its words, with one space or GROUP between two; some are empty. unspoken: runs that became LOST."""

    text: str
    unspoken: tuple[str, ...]


def clean(text: str) -> Clean:
    """Replace the characters of a text, in linear time. The number of words stays, so that they can be counted by spaces."""
    unspoken = list[str]()
    if "--" in text:
        for hyphens, dash in _DASHES:
            text = hyphens.sub(dash, text)
    text = _CLOSING_QUOTES.sub(LOST, text)
    if text.replace(QUOTE, "").isascii():
        text = " ".join(text.split()).replace(QUOTE, "")
    else:
        text = _known_words(text, unspoken).replace("′′", "″")
    if ":" in text or ";" in text:
        unspoken += _FACE.findall(text)
        text = _FACE.sub(LOST, text)
    if ".." in text:
        text = _SPAN.sub("…", text)
    if rules := [match.group() for match in _RULES.finditer(text)]:
        unspoken += [rule for rule in rules if rule[0] not in "-_"]
        text = _RULES.sub(LOST, text)
    if "_" in text:
        text = _UNDERSCORED.sub(lambda match: match.group().replace("_", ","), text)
    unspoken += _TICKS.findall(text)
    return Clean(_REPEATED.sub(r"\1", _TICKS.sub(LOST, text)).translate(_BRACKETS), tuple(unspoken))


def _known_words(text: str, unspoken: list[str]) -> str:
    """The words of a text in characters that the forms know. unspoken: the runs that became LOST are added."""
    parts, end = list[str](), 0
    for match in _WORD.finditer(text):
        word = match.group().replace(QUOTE, "")
        if parts:
            gap = text[end : match.start()]
            groups = gap in _GROUPING and parts[-1][-1:].isdecimal() and re.match(r"\d{3}(?!\d)", word)
            parts.append(GROUP if groups else " ")
        if not word.isascii():
            word, lost_runs = _known_word(word)
            unspoken += lost_runs
        parts.append(word)
        end = match.end()
    return "".join(parts)


_BRACKETS = str.maketrans("[]{}", "()()", "`")


def _known_word(word: str) -> tuple[str, list[str]]:
    """A word in characters that the forms know, and its runs of characters that became LOST."""
    word = unicodedata.normalize("NFC", word)
    greek = {place for match in _GREEK_WORD.finditer(word) for place in range(*match.span())}
    out, lost_runs, is_in_run = list[str](), list[str](), False
    for place, character in enumerate(word):
        plain = LOST if place in greek else _plain(character)
        follows_digit = out[-1:] != [] and out[-1][-1:].isdecimal()
        if plain == "" and follows_digit and unicodedata.category(character)[0] == "M" and character not in _OF_EMOJI:
            plain = LOST
        if character == LOST:
            is_in_run = False  # A gap that was put in before.
        elif plain == LOST:
            if not is_in_run:
                lost_runs.append("")
            lost_runs[-1] += character
            is_in_run = True
        elif is_in_run and unicodedata.category(character) in _JOINING:
            lost_runs[-1] += character
            continue
        else:
            is_in_run = False
        if plain == "" and follows_digit and word[place + 1 : place + 2].isdecimal():
            plain = LOST  # Nothing that has no sound may make one number of two.
        out.append(plain)
    return "".join(out), lost_runs


_seen: dict[str, str] = {}


def _plain(character: str) -> str:
    """As `_plain_of`, but from a cache."""
    plain = _seen.get(character)
    if plain is None:
        plain = _plain_of(character)
        if len(_seen) < 10_000:
            _seen[character] = plain
    return plain


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
    normalized = unicodedata.normalize("NFKC", character)
    if normalized != character and not any(one.isspace() for one in normalized):
        parts = [_plain_of(one) for one in normalized]
        if "".join(parts) and LOST not in "".join(parts):
            return "".join(parts)
    if unicodedata.category(character)[0] == "P":
        alike = next((mark for name, mark in _ALIKE.items() if unicodedata.name(character, "").endswith(name)), LOST)
        return alike + LOST if alike in (",", ".", ":") else alike  # Such a mark never stands within a number.
    return "" if unicodedata.category(character) in _SILENT else LOST
