"""Roman numerals: only where the letters make one and what stands before or behind asks for a number."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import Form, before, behind, form, table
from omnistage.models.smol.spoken.numbers import cardinal, ordinal, year

VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_VALID = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")

_RULERS = """
Albert Alexander Alexandra Alfonso Amenhotep Andrew Anne Artaxerxes Baldwin Baudouin Beatrix Benedict Boniface Callixtus Carl Carlos Carol
Catherine Celestine Charles Christian Clement Constantine Constantius Cosimo Darius David Edmund Edward Elizabeth Eric Eugene Farouk
Felipe
Ferdinand Francis Frederick Frederik Friedrich George Gregory Gustav Haakon Hadrian Harald Harold Henri Henry Honorius Hussein Innocent
Isabella Ivan James Joan John Joseph Juan Julius Justinian Karl Leo Leopold Louis Ludwig Magnus Mahmud Malcolm Manuel Margaret Margrethe
Mary Maximilian Mehmed Mehmet Michael Murad Napoleon Nicholas Olaf Olav Oscar Otto Paul Pedro Peter Philip Philippe Pius Ptolemy Rama
Ramesses Ramses Rene Richard Robert Rudolf Selim Seti Sigismund Sixtus Stephen Suleiman Sylvester Theodore Theodosius Thutmose Umberto
Urban Valentinian Victor Emmanuel Vittorio Wilhelm Wilhelmina Willem William Xerxes Martin King Thurston Sammy Davis Prince Princess
"""
RULERS = frozenset(_RULERS.split())
"""Names that are followed by "the second". Of other pairs of names the number is read as a number: Gladiator II."""
TITLES = frozenset(table("King Queen Pope Emperor Empress Tsar Czar Kaiser Sultan Pharaoh Shah Prince Princess Duke Archbishop Patriarch"))
_SMALL_TOO = "Chapter Part Act Scene Section Volume Book Article Episode"
_PARTS = "Vol Title Canto War Mark Mk Appendix Bowl Apollo Fantasy Rocky Rambo Wars Scrolls Saturn Auto Vatican Quest Psalm"
PARTS = frozenset(f"{_PARTS} {_SMALL_TOO} {_SMALL_TOO.lower()}".split())
"""Before these stands a letter never, so that V and X are numbers."""
_KINDS = """
Gemini Round Category Division Group Tier Factor Step Lesson Unit Schedule Table Figure Symphony Olympiad Annex Form Theft Titan
Pentium Band
Region Zone Tome Rule
"""
_SMALL_KINDS = "Phase Type Level Stage Class Grade"
KINDS = frozenset(f"{_KINDS} {_SMALL_KINDS} {_SMALL_KINDS.lower()}".split())
"""Before these may stand a letter too (Type C, Group X): of single letters I alone is a number."""
LEADERS = RULERS | TITLES | PARTS | KINDS
_COUNTED_BEHIND = re.compile(r" (?:century|centuries|dynasty|Dynasty|Olympiad|Olympics|Airborne|Corps|Legion|Army|Congress|Summit)\b")
_I_GOES_ON = re.compile(
    r"'(?:m|d|ll|ve)\b| (?:am|think|know|have|want|love|like|believe|can|could|will|would|should|do|don't|need|hope|guess|mean|see|saw|told"
    r"|said|met|wish|went|go|got|read|wrote|never|always|also|just|had|feel|felt|find|found|remember|heard|shall|may|might|must|use|used"
    r"|own|owned|like|liked|hate|hated|loved|bought|enjoyed|thought|watched|recommend|recommended|borrowed|lent|studied|chose|picked|prefer"
    r"|preferred|wanted|needed|knew|adore|keep|call|finished|did|really|usually|often|still|only)\b"
)
_WORDS_BEFORE = re.compile(r"(?:[A-Za-zÀ-ÖØ-öø-ÿ]+\.? ){1,3}$")
_CERTAIN = re.compile(r"II|III|VII|VIII|IX|XI{2,3}|XIV|XVI{0,3}|XIX|XXI{1,3}|XXI?V|XXIX")
"""Two letters or more that are a number wherever they stand. IV, VI, IX, XI, XX and XL are other things too."""


def value(numeral: str) -> int | None:
    """None for letters that make no number."""
    if not numeral or not _VALID.fullmatch(numeral):
        return None
    values = [VALUES[letter] for letter in numeral]
    return sum(-one if any(one < other for other in values[place + 1 : place + 2]) else one for place, one in enumerate(values))


def _numeral(match: re.Match[str]) -> str | None:
    text, numeral = match.string, match.group()
    number = value(numeral)
    if number is None:
        return None
    if _COUNTED_BEHIND.match(text, match.end()) and not set(numeral) & set("CDM") and (len(numeral) > 1 or numeral in "VX"):
        return ordinal(number)
    if number >= 1000 and len(numeral) >= 4:
        return year(number)
    found = _WORDS_BEFORE.search(before(match, 60))
    words = found.group().replace(".", "").split() if found else []
    if set(numeral) & set("CDM") or number > 89 or (numeral == "I" and _I_GOES_ON.match(text, match.end())):
        return None
    if words and _is_ordinal(words, numeral):
        return f"the {ordinal(number)}"
    return cardinal(number) if _CERTAIN.fullmatch(numeral) or (words and _is_counted(words, numeral)) else None


def _is_ordinal(words: list[str], numeral: str) -> bool:
    named = words[-1] in RULERS and words[-1] not in TITLES
    if words[-1] == "King":
        named = len(words) > 1 and words[-2] in RULERS  # Martin Luther King III, which is no king.
    titled = any(word in TITLES for word in words[:-1]) and words[-1][0].isupper()
    related = len(numeral) > 1 and words[-1][0].isupper() and any(word in RULERS and word not in TITLES for word in words[-3:-1])
    if words[-1] in PARTS | KINDS or "L" in numeral:
        return False
    if len(numeral) == 1:
        return (named or titled) and numeral in "IVX" and words[-1] != "Malcolm"
    return named or titled or related or (words[-1] == "King" and len(words) > 2)


def _is_counted(words: list[str], numeral: str) -> bool:
    last = words[-1]
    if len(numeral) == 1:
        if last[0].islower():
            return last in PARTS and numeral in "VX"
        return (last in PARTS and numeral in "IVX") or (last in KINDS and numeral == "I")
    return last in PARTS | KINDS and (numeral != "XL" or last in ("Bowl", "Chapter", "Psalm"))


def _range(match: re.Match[str]) -> str | None:
    """Chapters I-III, pages xii-xv."""
    first, last = (value(numeral.upper()) for numeral in (match["first"], match["last"]))
    words = re.findall("[A-Za-z]+", before(match, 24))
    counted = words and (words[-1].rstrip("s") in PARTS | KINDS or words[-1].lower() in SMALL_AFTER)
    return f"{cardinal(first)} to {cardinal(last)}" if counted and first and last else None


def _small(match: re.Match[str]) -> str | None:
    number = value(match.group().upper())
    words = before(match, 12).split()
    if before(match, 1) == "(" and behind(match, 1) == ")":
        return cardinal(number) if number else None
    return cardinal(number) if number and words and words[-1].lower().strip("(\"'“.") in SMALL_AFTER else None


SMALL_AFTER = frozenset(table("page pages pp p chapter section part act scene volume paragraph clause footnote note"))


def _own_character(match: re.Match[str]) -> str:
    return cardinal(_OWN[match.group()])


_OWN = {chr(0x2160 + case + place): place + 1 for case in (0, 16) for place in range(12)}

ROMAN: tuple[Form, ...] = (
    form(r"(?<![\w.'-])(?P<first>[IVXL]{1,8})[-–](?P<last>[IVXL]{1,8})(?![\w'-])", _range),
    form(r"(?<![\w.'-])(?P<first>[ivxl]{1,8})[-–](?P<last>[ivxl]{1,8})(?![\w'-])", _range),
    form(r"(?<![\w.'&/-])[IVXLCDM]{1,15}(?![\w&/]|\.\w|-[A-Za-z])", _numeral),
    form(r"(?<![\w.'-])[ivx]{2,6}(?![\w'-])", _small),
)
ROMAN_SIGNS: tuple[Form, ...] = (form(r"[Ⅰ-Ⅻⅰ-ⅻ]", _own_character),)
