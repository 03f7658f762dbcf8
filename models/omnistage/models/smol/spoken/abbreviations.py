"""Letters that stand for other words: abbreviations, titles, and Roman numerals. A numeral is read only where the letters form one and the
words around it need a number."""

from __future__ import annotations

import re
from itertools import pairwise

from omnistage.models.smol.spoken.numbers import amount, cardinal, ordinal, year
from omnistage.models.smol.spoken.rules import COUNT_FOLLOWS, Say, after, alternatives, before, read_lists, read_short_forms

_FORMS = read_short_forms()
TITLES, DOTTED_TITLES = _FORMS["title"], _FORMS["dotted title"]
"""Titles before a name: with a full stop or without, and with one only."""
DOTTED, NUMBERED = _FORMS["dotted"], _FORMS["numbered"]
"""Abbreviations with a full stop: anywhere, and before a number only."""
WORDS_TOO = frozenset(read_lists()["may end a sentence"])
"""Abbreviations that may end a sentence, because they are words too."""
_LETTERED = frozenset(read_lists()["lettered"])
"""Abbreviations after which I may be a number, if a mark or the end follows it."""
SAYS = frozenset(read_lists()["saying"])
_ANSWERS = re.compile(
    rf"(?:, ?|\b(?:{alternatives(SAYS)}|told (?:him|her|them|us|me|you)|(?:answer|vote) (?:is|was)|[a-z]+ly|firm|clear|flat|big|oh) )$",
    re.IGNORECASE,
)
"""Words before the answer "no"."""
_ONE_BEFORE = re.compile(r"\b(?:an?|one|my|his|her|our|their|modern|fine|this|that|the) $", re.IGNORECASE)
"""Words before a fig or an app that is no abbreviation."""
_SENTENCE_BEFORE = re.compile(r"(?:^|[.!?…][\"'”’)]* )[\"'“‘(]*$")
_COUNT_ENDS = re.compile(r"#?\d[\w.,/–-]*(?<![.,])(?:$|[^\w\s]| (?:and|or|to|&) \d)")


def _numbered_abbreviation(match: re.Match[str]) -> str | None:
    """The word of an abbreviation before a number, "No. 3". None if a sentence ends there: "He said no. 3 of us left.", "No. I do not." """
    short, text = match["short"], match.string
    numeral_match = re.compile(r"[IVXivx]*\b").match(text, match.end())
    numeral = numeral_match.group() if numeral_match else ""
    is_number = True
    if numeral == "I":
        is_number = short in _LETTERED and not re.compile(r" \w").match(text, match.end() + len(numeral))
    elif numeral:
        may_be_answer = short in ("No", "no") and (len(numeral) == 1 or _SENTENCE_BEFORE.search(before(match, 4)))
        is_number = "II" in numeral or not may_be_answer
    elif short in WORDS_TOO and short.islower() and not _COUNT_ENDS.match(text, match.end()):
        number = re.compile(r"#?(?!1\b)\d[\w.,/–-]*").match(text, match.end())
        count_match = number is not None and COUNT_FOLLOWS.match(text, number.end())
        counts_things = count_match and not count_match.group().startswith(" of the")
        is_word = (_ANSWERS if short == "no" else _ONE_BEFORE).search(before(match, 16))
        is_number = not counts_things and not is_word
    return NUMBERED[short] if is_number else None


def _function(match: re.Match[str]) -> str:
    """A function of variables: f(x) as "f of x", f'(x) as "f prime of x"."""
    primes = {"": "", "'": " prime", "''": " double prime"}[match["primes"]]
    variables = (amount(one) if one.isdecimal() else one for one in re.split(", ?", match["of"]))
    return f"{match['name']}{primes} of {' and '.join(variables)}"


SHORTS = frozenset((*TITLES, *DOTTED_TITLES, *DOTTED, *NUMBERED, *_FORMS["plain"], "WWI", "WWII", "WWIII", *_FORMS["function"]))


# Roman numerals ----------------------------------------------------------------------------------------------------------------------


VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_VALID = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")

_LISTS = {name: frozenset(words) for name, words in read_lists().items()}
RULERS, RULER_TITLES = _LISTS["rulers"], _LISTS["ruler titles"]
"""Names that "the second" may follow, and titles before them. After other pairs of names the number is read as a number: Gladiator II."""
PARTS = _LISTS["parts"]
"""Words that no single letter follows, so that V and X after them are numbers."""
KINDS = _LISTS["kinds"]
"""Words that may also stand before a letter (Type C, Group X): of single letters only I is a number after them."""
SMALL_AFTER = _LISTS["numbered pages"]
LEADERS = RULERS | RULER_TITLES | PARTS | KINDS
_COUNTED_AFTER = re.compile(r" (?:century|centuries|dynasty|Dynasty|Olympiad|Olympics|Airborne|Corps|Legion|Army|Congress|Summit)\b")
_ALIKE = _LISTS["alike kinds"]
"""Words before which I names the kind of thing that follows: a Type I error. Elsewhere I is a number only where no pronoun can stand."""
_NAMES_TOO = frozenset(("Mark", "Rocky"))
_I_IS_SAID = re.compile(
    r"'(?:m|d|ll|ve)\b| (?:am|think|know|have|want|love|like|believe|can|could|will|would|should|do|don't|need|never|always|had|was"
    r"|[a-z]+ed|took|saw|got|went|made|teach|taught|take|attend|hate|chose|found|left|missed)\b(?<! listed)(?<! controlled)"
)
"""Text after an I that follows a word of _ALIKE, if this I is the pronoun."""
_I_ENDS = re.compile(r"$|'s?(?!\w)|[^\w\s']|\.$| (?:\(|of\b(?! course)|[-–—&=]|\d|[A-Z])")
_I_RULES = re.compile(
    r" (?:was|is|has|died|dies|reign(?:ed|s)|rule[ds]|became|becomes|abdicated|succeed(?:ed|s)|ascended|who|whose|which|from|until|in \d|by"
    r"|begins|began|starts|started|ends|ended|contains|covers|deals|describes|shows|says|states|and (?:[A-Z]\w+ )?[IVX]+)\b"
)
_HIS = re.compile(r" [a-z]+(?: [a-z]+)? (?:his|her)\b")
_ARTICLE = _LISTS["articles"]
_AFTER_STOP = re.compile(r"\.[\"'”’)]* [\"'“‘(]*(?P<word>\w+)")
_BEGINS_SENTENCE = _LISTS["sentence beginnings"]
"""Words after a number that ends its sentence; before another word the letter is an initial: John V. Lindsay."""
_WORDS_BEFORE = re.compile(r"(?:[A-Za-zÀ-ÖØ-öø-ÿ]+\.? ){1,3}$")
_CERTAIN = re.compile(r"II|III|VII|VIII|IX|XI{2,3}|XIV|XVI{0,3}|XIX|XXI{1,3}|XXI?V|XXIX")
"""Two or more letters that are a number wherever they stand. IV, VI, IX, XI, XX and XL mean other things too."""


def roman_value(numeral: str) -> int | None:
    """The value of a numeral; None for letters that form none."""
    if not numeral or not _VALID.fullmatch(numeral):
        return None
    values = [VALUES[letter] for letter in numeral]
    # A letter before a larger one is subtracted: IV.
    return sum(-value if value < following else value for value, following in zip(values, [*values[1:], 0], strict=True))


def _numeral(match: re.Match[str]) -> str | None:
    """A numeral as a number, an ordinal or a year, by the words around it. None if the letters are no number there."""
    text, numeral = match.string, match.group()
    number, has_large_letter = roman_value(numeral), not set(numeral).isdisjoint("CDM")
    if number is None:
        return None
    if _COUNTED_AFTER.match(text, match.end()) and not has_large_letter and (len(numeral) > 1 or numeral in "VX"):
        return ordinal(number)
    if number >= 1000 and len(numeral) >= 4:
        return year(number)
    words = _words_before(match)
    if has_large_letter or number > 89 or (len(numeral) == 1 and words and _is_letter(match, words)):
        return None
    if words[-1:] == ["the"] and words[-2:-1] and words[-2] in RULERS - RULER_TITLES and len(numeral) > 1:
        return ordinal(number)
    if words and _is_ordinal(words, numeral):
        return f"the {ordinal(number)}"
    return cardinal(number) if _CERTAIN.fullmatch(numeral) or (words and _is_counted(words, numeral)) else None


def _words_before(match: re.Match[str]) -> list[str]:
    """The last words before the match, at most three, without full stops: CHAPTER and Ch. are both "Chapter"."""
    words_match = _WORDS_BEFORE.search(before(match, 60))
    is_one_letter = len(match.group()) == 1
    words = []
    for word in words_match.group().split() if words_match else ():
        stem = word.removesuffix(".")
        is_abbreviation = stem != word and not (is_one_letter and stem in WORDS_TOO)
        words.append(NUMBERED.get(stem, stem).capitalize() if is_abbreviation else stem)
    return [word.capitalize() if word.isupper() and len(word) > 1 else word for word in words]


def _is_letter(match: re.Match[str], words: list[str]) -> bool:
    """Whether a single letter is no number but an initial (John V. Lindsay) or the pronoun (Dear Mary I miss you). words: before it."""
    text, last = match.string, words[-1]
    stop = _AFTER_STOP.match(text, match.end())
    if stop and last not in (PARTS | KINDS) - _NAMES_TOO and not any(word in RULER_TITLES for word in words):
        return stop["word"].capitalize() not in _BEGINS_SENTENCE
    if match.group() != "I" or stop:
        return False
    if any(word in RULER_TITLES for word in words[:-1]) and _HIS.match(text, match.end()):
        return False  # King Charles I lost his head.
    has_article = any(word.lower() in _ARTICLE for word in words[-2:-1])
    if last in _ALIKE:
        return words[-2:] != ["World", "War"] and _I_IS_SAID.match(text, match.end()) is not None
    if last == "Mark" and has_article:
        return False  # A Mark I is a thing.
    return not (_I_ENDS.match(text, match.end()) or (not has_article and _I_RULES.match(text, match.end())))


def _is_ordinal(words: list[str], numeral: str) -> bool:
    """Whether a numeral after these words counts persons of one name: Henry VIII."""
    last, ruler_names = words[-1], RULERS - RULER_TITLES
    is_ruler = last in ruler_names
    if last == "King":
        is_ruler = len(words) > 1 and words[-2] in RULERS  # Martin Luther King III, which is no king.
    has_title = last[0].isupper() and any(word in RULER_TITLES for word in words[:-1])
    follows_ruler = last[0].isupper() and any(word in ruler_names for word in words[-3:-1])
    if last in PARTS | KINDS or "L" in numeral:
        return False
    if len(numeral) == 1:
        return (is_ruler or has_title) and numeral in "IVX" and last != "Malcolm"
    return is_ruler or has_title or follows_ruler or (last == "King" and len(words) > 2)


def _is_counted(words: list[str], numeral: str) -> bool:
    """Whether a numeral after these words counts things: Chapter IV."""
    last = words[-1]
    if len(numeral) == 1:
        if last[0].islower():
            return last in PARTS and numeral in "VX"
        return (last in PARTS and numeral in "IVX") or (last in KINDS and numeral == "I")
    return last in PARTS | KINDS and (numeral != "XL" or last in ("Bowl", "Chapter", "Psalm"))


def _list(match: re.Match[str]) -> str | None:
    """A list of numerals: I, II, III and IV. None if they do not ascend, or if nothing shows that they are numbers."""
    text = match.group()
    numerals = re.findall("[IVXL]+", text)
    values = [roman_value(numeral) or 0 for numeral in numerals]  # 0: the letters form no numeral.
    words = _words_before(match)
    if 0 in values or any(one >= other for one, other in pairwise(values)):
        return None
    if words and words[-1] in RULERS | RULER_TITLES and words[-1] not in PARTS:
        return re.sub("[IVXL]+", lambda one: f"the {ordinal(roman_value(one.group()) or 0)}", text)
    has_noun = words and words[-1].removesuffix("s") in PARTS | KINDS
    if not (has_noun or any(_CERTAIN.fullmatch(numeral) for numeral in numerals)):
        return None
    return re.sub("[IVXL]+", lambda one: cardinal(roman_value(one.group()) or 0), text)


def _range(match: re.Match[str]) -> str | None:
    """A range of numerals: Chapters I-III, pages xii-xv. None if nothing shows that they are numbers."""
    first, last = (roman_value(numeral.upper()) for numeral in (match["first"], match["last"]))
    words = re.findall("[A-Za-z]+", before(match, 24))
    has_noun = words and (words[-1].rstrip("s") in PARTS | KINDS or words[-1].lower() in SMALL_AFTER)
    is_certain = first and last and first < last and any(_CERTAIN.fullmatch(numeral) for numeral in (match["first"], match["last"]))
    return f"{cardinal(first)} to {cardinal(last)}" if first and last and (has_noun or is_certain) else None


def _small_numeral(match: re.Match[str]) -> str | None:
    """A numeral in small letters, in brackets or after a word such as page. None elsewhere."""
    number = roman_value(match.group().upper())
    words = before(match, 16).split()
    if before(match, 1) == "(" and after(match, 1) == ")":
        return cardinal(number) if number else None
    last = words[-1].strip("(\"'“") if words else ""
    has_noun = last.lower().rstrip(".") in SMALL_AFTER or (last.endswith(".") and last[:-1] in NUMBERED and last.lower() != "no.")
    return cardinal(number) if number and has_noun else None


def _with_ending(match: re.Match[str]) -> str | None:
    """A numeral with the ending of an ordinal: XIXth. None for a wrong ending."""
    number = roman_value(match["numeral"])
    return ordinal(number) if number and ordinal(number).endswith(match["ending"][-1]) else None


def _item(match: re.Match[str]) -> str | None:
    """The number (i) of a list. None for f(i), and for a letter of a list: (h), (i)."""
    front = before(match, 300)
    return None if re.search(r"[\w)]\($", front) or "(h)" in front else "one"


ROMAN_SIGNS = {chr(0x2160 + case + place): cardinal(place + 1) for case in (0, 16) for place in range(12)}
"""Characters that are numerals themselves, in words."""
FUNCTIONS: dict[str, Say] = {
    "numbered": _numbered_abbreviation,
    "function": _function,
    "numerals": _list,
    "range of numerals": _range,
    "numeral": _numeral,
    "small numeral": _small_numeral,
    "item": _item,
    "numeral with ending": _with_ending,
}
