"""Replaces the characters of a text by those that the forms know: one for all that look alike, BLANK for characters without a sound.

A quote may be an apostrophe or a prime too. The text around such a mark decides which it is, once, before any form is read; so a form in
quotes is read as the same form without them."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from omnistage.models.smol.spoken.numbers import GROUP
from omnistage.models.smol.spoken.rules import read_rows, read_table

QUOTE = "”"
"""Stands for every mark of a quotation: it has no sound."""
APOSTROPHE = "'"
PRIME, DOUBLE_PRIME = "′", "″"
"""Signs of feet and inches, or of minutes and seconds."""
_ALWAYS = "«»‹›「」『』〝〞〟"
"""Marks that are never anything but a quotation's."""
_KINDS = {'"': '"', "＂": '"', "'": "'", "＇": "'", "ʼ": "'", "´": "'"} | dict.fromkeys("“„‟”", "”") | dict.fromkeys("‘‚‛’", "’")
"""For each mark that may be several things, the mark that ends its quotations."""
MARKS = frozenset((*_KINDS, *_ALWAYS))
_SINGLE = "'’"
_MARK = re.compile(f"[{''.join(_KINDS)}]")
_TRANSLATED = str.maketrans(dict.fromkeys(_ALWAYS, "\x1a"))
_OPENS_BEFORE = re.compile(rf"(?:^|[\s(\[{{<=:/+~|`*_\x1a–—-]|[{''.join(MARKS)}])$")
_CLOSES_BEHIND = re.compile(rf"$|[\s)\]}},.;:!?…>/|`*_~\x1a–—-]|[{''.join(MARKS)}]")
_GROUPS_DIGITS = re.compile(r"\d{3}(?!\d)")
_SHORT_YEAR = re.compile(r"\d0s(?!\w)|\d\d(?=$|[\s,;:!?)]|\.(?!\d)|[-–]['’])(?!['’])")
"""Text after the apostrophe of a decade or a year: '90s, '99, '68-'72."""
_ELIDED = re.compile(r"(?:tis|twas|twere|em|til|till|cause|cos|bout|round|ere|neath)(?=['’ ,;!?-]|$)|[no](?=['’])", re.IGNORECASE)
"""Words that are written with an apostrophe at their beginning."""
_YEAR_BEFORE = re.compile(r"\b(?:of|in|since|from|until|to|by|the|and|or|early|late|mid|class|summer|winter|[A-Z][a-z]{2,8})[ -]$")
_PART = "[½¼¾⅓⅔⅛⅜⅝⅞]"
_NUMBER_ENDS = re.compile(
    rf"(?<![\w.,:/+-])(?:\d{{1,3}}(?:\.\d+)?|(?:\d{{1,3}}[ -])?\d{{1,2}}/\d{{1,2}}|\d{{0,3}}{_PART}"
    rf"|\d{{1,3}}°\d{{1,2}}(?:['′]\d+(?:\.\d+)?)?|\d{{1,3}}['’′\"″]?[-x×]?\d{{1,2}}(?:\.\d+)?{_PART}?|\d+\+\d+)$"
)
"""A number that a sign of feet, inches, minutes or seconds may follow."""
_THINGS = "screen|monitor|display|pipe|board|wheel|ladder|fence|wall|tube|nail|disk|frame|tire|pizza|bolt|screw"
_SIZE = re.compile(rf"\b(?:inch|feet|foot|wide|tall|long|high|deep|thick|diameter|measures?|radius|(?:{_THINGS})s?)\b")
_SIZE_BEFORE, _SIZE_BEHIND = re.compile(r"(?:\b[x×]|×|\bby) ?(?:\d{1,3}(?!\d)[./ ]?){0,3}$"), re.compile(r" ?(?:[x×]|by\b) ?\d")
_CLAUSE = re.compile(r"[.;!?] ")
_PLAIN_NUMBER = re.compile(r"(?<![x×] )(?<!\S)[(]?\d+(?:\.\d+)?$")
_SPEECH_BEFORE = re.compile(r"(?:\bam|'m|\bare|'re|\bI was) (?:[a-z]+ ){0,2}[\d./]+$")
_SPEECH_BEHIND = re.compile(r",? (?:[A-Za-z]+ ){0,2}(?:said|says|asked|told|replied|answered|wrote|added|shouted|cried)\b")


class Quotation:
    """Tells the marks of one text apart, phrase by phrase: a quotation may span several phrases."""

    def __init__(self) -> None:
        self._depths = dict.fromkeys(_KINDS.values(), 0)  # For each kind of mark, how many of its quotations are open.

    def read(self, phrase: str) -> str:
        """Return the next phrase, of the same length, with QUOTE, APOSTROPHE, PRIME or DOUBLE_PRIME in the place of each mark."""
        phrase = phrase.translate(_TRANSLATED)
        marks = [_Mark(phrase, match.start()) for match in _MARK.finditer(phrase)]
        out = list(phrase.replace("\x1a", QUOTE))
        for kind in ('"', "'", "”", "’"):
            of_kind = [mark for mark in marks if mark.kind == kind and not mark.is_within_word]
            for number, mark in enumerate(of_kind):
                out[mark.place] = self._meaning(mark, of_kind[number + 1 : number + 9])
        for mark in marks:
            if mark.is_within_word:
                out[mark.place] = mark.within_word()
        return "".join(out)

    def end(self) -> None:
        """A paragraph ends, and with it the quotations that are open in it."""
        self._depths = dict.fromkeys(self._depths, 0)

    def _meaning(self, mark: _Mark, later: list[_Mark]) -> str:
        """Decide what a mark is. later: the next marks of its kind."""
        depth, is_single = self._depths[mark.kind], mark.kind in _SINGLE
        is_open, closer_count = depth > 0, sum(one.may_close for one in later)
        # Within a quotation, ' opens another one only if more marks may close than quotations are open.
        lacks_closer = is_open and mark.sign == "'" and closer_count <= depth
        if mark.may_open and not lacks_closer:
            if is_single and (mark.is_elision or (closer_count == 0 and not mark.begins_speech)):
                return APOSTROPHE
            self._depths[mark.kind] = depth + 1
            return QUOTE
        if not mark.may_close:
            return APOSTROPHE if is_single else QUOTE
        ends_later = bool(later) and not later[0].may_open and closer_count >= depth
        if is_single and is_open and ends_later and mark.follows_s:
            return APOSTROPHE
        if mark.follows_digit and mark.is_prime(is_open, ends_later):
            return PRIME if is_single else DOUBLE_PRIME
        self._depths[mark.kind] = max(depth - 1, 0)
        return QUOTE if is_open or not is_single or mark.follows_digit else APOSTROPHE


class _Mark:
    """A mark in a phrase, and what stands around it."""

    def __init__(self, phrase: str, place: int) -> None:
        self._phrase, self.place, self.sign = phrase, place, phrase[place]
        self.kind = _KINDS[self.sign]
        self._front, self._rest = phrase[max(place - 60, 0) : place], phrase[place + 1 : place + 41]
        previous, following = self._front[-1:], self._rest[:1]  # Empty at the ends of the phrase.
        self.follows_digit = _NUMBER_ENDS.search(self._front) is not None
        self.may_open = self.sign not in "’”" and _OPENS_BEFORE.search(previous) is not None and following.strip() != ""
        self.may_close = self.sign not in "‚‛„‟" and previous.strip() != "" and _CLOSES_BEHIND.match(self._rest) is not None
        self.follows_s = previous == "s"
        self.is_within_word = previous.isalnum() and following.isalnum()

    def within_word(self) -> str:
        """Decide what a mark between two letters or digits is."""
        is_in_size = re.search(r"(?<![A-Za-z])\d{1,3}$", self._front) and re.match(r"\d|[x×] ?\d", self._rest)
        if self.kind not in _SINGLE:
            return DOUBLE_PRIME if is_in_size else QUOTE
        groups_digits = _GROUPS_DIGITS.match(self._rest) and re.search(r"(?<!\d)\d{1,3}$", self._front)
        return PRIME if is_in_size and not groups_digits else APOSTROPHE

    def is_prime(self, is_open: bool, ends_later: bool) -> bool:
        """Whether a mark after a number is a sign of feet or inches. is_open: a quotation of its kind is open. ends_later: the next mark of
        its kind may end it."""
        if self.is_speech:
            return False
        if self.sign in "”’":  # Written by programs that take every mark for that of a quotation.
            return self.is_size and (ends_later or not is_open)
        return not is_open or ends_later or (self.is_size and self.goes_on)

    @property
    def is_elision(self) -> bool:
        """Whether the mark stands for the beginning of a word or a year: 'tis, '99."""
        year = _SHORT_YEAR.match(self._rest) is not None and _YEAR_BEFORE.search(self._front) is not None
        return year or _ELIDED.match(self._rest) is not None

    @property
    def begins_speech(self) -> bool:
        return self._rest[:1].isalpha()

    @property
    def goes_on(self) -> bool:
        """Whether a space and a small letter follow the mark."""
        return re.match(" [a-z]", self._rest) is not None

    @property
    def is_size(self) -> bool:
        """Whether the text around says that the number before the mark is a size."""
        clause = _CLAUSE.split(self._front)[-1] + "\x00" + _CLAUSE.split(self._rest)[0]
        return bool(_SIZE_BEFORE.search(self._front) or _SIZE_BEHIND.match(self._rest) or _SIZE.search(clause))

    @property
    def is_speech(self) -> bool:
        """Whether a mark after a number ends a speech whose beginning was not seen."""
        begins = re.fullmatch(r"[('\" ]*\d+(?:\.\d+)?", self._front) and re.match(" (?![a-z]{2})", self._rest)
        return (
            not self.is_size
            and _PLAIN_NUMBER.search(self._front) is not None
            and bool(begins or _SPEECH_BEFORE.search(self._front) or _SPEECH_BEHIND.match(self._rest))
        )


# Characters --------------------------------------------------------------------------------------------------------------------------


BLANK = "\x00"
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
_SIGNS = set("′″—–…−×·¿¡‖⌋⌉") | set(SIGN_WORDS) | set(CURRENCY_SIGNS) | set(GREEK) | set(SUPERSCRIPTS) | set(FRACTIONS) | set(_ROMAN_SIGNS)
_LOOKALIKES = {character: plain for plain, characters in read_rows("alike.tsv") for character in characters}
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
    """A text after `clean`. text: its words, with one space or GROUP between two; some are empty. unspoken: runs that became BLANK."""

    text: str
    unspoken: tuple[str, ...]


def clean(text: str) -> Clean:
    """Replace the characters of a text, in linear time. The number of words stays, so that they can be counted by spaces."""
    unspoken = list[str]()
    if "--" in text:
        for hyphens, dash in _DASHES:
            text = hyphens.sub(dash, text)
    text = _CLOSING_QUOTES.sub(BLANK, text)
    if text.replace(QUOTE, "").isascii():
        text = " ".join(text.split()).replace(QUOTE, "")
    else:
        text = _known_words(text, unspoken).replace("′′", "″")
    if ":" in text or ";" in text:
        unspoken += _FACE.findall(text)
        text = _FACE.sub(BLANK, text)
    if ".." in text:
        text = _SPAN.sub("…", text)
    if rules := [match.group() for match in _RULES.finditer(text)]:
        unspoken += [rule for rule in rules if rule[0] not in "-_"]
        text = _RULES.sub(BLANK, text)
    if "_" in text:
        text = _UNDERSCORED.sub(lambda match: match.group().replace("_", ","), text)
    unspoken += _TICKS.findall(text)
    return Clean(_REPEATED.sub(r"\1", _TICKS.sub(BLANK, text)).translate(_BRACKETS), tuple(unspoken))


def _known_words(text: str, unspoken: list[str]) -> str:
    """The words of a text in characters that the forms know. unspoken: the runs that became BLANK are added."""
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
    """A word in characters that the forms know, and its runs of characters that became BLANK."""
    word = unicodedata.normalize("NFC", word)
    greek = {place for match in _GREEK_WORD.finditer(word) for place in range(*match.span())}
    out, lost_runs, is_in_run = list[str](), list[str](), False
    for place, character in enumerate(word):
        plain = BLANK if place in greek else _plain(character)
        follows_digit = bool(out) and out[-1][-1:].isdecimal()
        if plain == "" and follows_digit and unicodedata.category(character)[0] == "M" and character not in _OF_EMOJI:
            plain = BLANK
        if character == BLANK:
            is_in_run = False  # A gap that was put in before.
        elif plain == BLANK:
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
            plain = BLANK  # Nothing that has no sound may make one number of two.
        out.append(plain)
    return "".join(out), lost_runs


_plain_characters: dict[str, str] = {}


def _plain(character: str) -> str:
    """As `_plain_of`, but from a cache."""
    plain = _plain_characters.get(character)
    if plain is None:
        plain = _plain_of(character)
        if len(_plain_characters) < 10_000:
            _plain_characters[character] = plain
    return plain


def _plain_of(character: str) -> str:
    """The characters that replace a character: BLANK if it has a meaning but no sound, empty if it has no meaning."""
    if character.isascii() or character in _SIGNS:
        return character
    if character in _LOOKALIKES:
        return _LOOKALIKES[character]
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
        if "".join(parts) and BLANK not in "".join(parts):
            return "".join(parts)
    if unicodedata.category(character)[0] == "P":
        ascii_mark = next((mark for name, mark in _ALIKE.items() if unicodedata.name(character, "").endswith(name)), BLANK)
        # Within a number "," "." ":" would be read as parts of it, which this mark never is: BLANK parts them from digits.
        return ascii_mark + BLANK if ascii_mark in (",", ".", ":") else ascii_mark
    return "" if unicodedata.category(character) in _SILENT else BLANK
