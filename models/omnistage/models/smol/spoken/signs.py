"""The words for signs: between two operands, before a number, or by themselves."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.characters import CURRENCY_SIGNS, GREEK, LOST, SIGN_WORDS, SUPERSCRIPTS
from omnistage.models.smol.spoken.currencies import CURRENCIES
from omnistage.models.smol.spoken.form import Form, after, alternatives, before, form, in_equation, table
from omnistage.models.smol.spoken.marks import CHARGES, DECREMENTS, PER_UNITS, PIPES, STARS, SUMS, delimits, is_charge
from omnistage.models.smol.spoken.numbers import amount, ordinal
from omnistage.models.smol.spoken.quantities import is_modulo
from omnistage.models.smol.spoken.roman import ROMAN_SIGNS
from omnistage.models.smol.spoken.times import NAMED, WEEKDAYS

_GREEK = "".join(GREEK)
_POWERS = "".join(SUPERSCRIPTS)
_MONEY = re.escape(CURRENCY_SIGNS)
_NUMBER_FOLLOWS = re.compile(rf"[-−+±~]?(?:US|[CA])?[{_MONEY}]? ?[.']?\d|[½¼¾⅓⅔⅛⅜⅝⅞]")
_SIGNED_THING = re.compile(rf"(?:US)?[{_MONEY}]?\.?\d|[√∞(]|[{_GREEK}]")
_OPERAND_FOLLOWS = re.compile(rf"(?:[-−+±]?(?:[{_MONEY}]?\.?\d|[√∞∛(]|[{_GREEK}]|[A-Za-z](?![A-Za-z'.])))")
_OPERAND_BEFORE = re.compile(rf"(?:[\d)%°∞½¼¾!{_POWERS}{_GREEK}]|(?<![A-Za-z'.])[A-Za-z]|[A-Za-z]\^?\d)$")
_NUMBER_BEFORE = re.compile(rf"\d(?:[%°½¼¾²³)]| ?[{_MONEY}]| ?°?[CFK]| ?[A-Za-z]{{1,4}}|[/A-Za-z]{{1,5}}[²³]?| [ap]\.m\.)?$")
_FREE = re.compile(r"(?:^|[\s(|=<>≤≥≠≈×÷·*/^+,:;\"“'…−–—-])$")
_NAMED_RANGE = re.compile(rf"(?:\b(?:{NAMED})|\b(?:[Nn]oon|[Mm]idnight))\.?$")
_NAMED_FOLLOWS = re.compile(rf"(?:{NAMED}|[Nn]oon|[Mm]idnight)(?![A-Za-z])")
_DAY_BEFORE = re.compile(
    rf"(?:\b(?:{NAMED})\.? \d{{1,2}}(?:st|nd|rd|th)?(?:, \d{{4}})?|[ap]\.?m\.?|\b[Nn]oon|\b[Mm]idnight)$", re.IGNORECASE
)
_HOUR_BEFORE = re.compile(rf"\b(?:{alternatives(WEEKDAYS)})s?\.?,? \d{{1,2}}(?::\d\d)?$")
_NAME_BEFORE = re.compile(r"(?<![\w.$£€'])(?!(?:pp?|no|nos|vols?|chs?|figs?)\.?-?\d)[A-Za-z]+(?:-|(?=\d))[\w.-]*$")
"""The first parts of a name with numbers: Llama-3.1-8B, ISO-8859-1."""
_GOOD_BUDDY = re.compile(r"4(?:[,.!]? (?:good|buddy)\b|[,.!]?[\"”])")
_ANSWER_ENDS = re.compile(r"4[.!]?$")
_NAME_FOLLOWS = re.compile(r"[\d.]+(?:-\d+)*-[A-Z]")
_BOOKS = """
Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth Samuel Kings Chronicles Ezra Nehemiah Esther Job Psalm Psalms
Proverbs Ecclesiastes Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk Zephaniah
Haggai Zechariah Malachi Matthew Mark Luke John Acts Romans Corinthians Galatians Ephesians Philippians Colossians Thessalonians
Timothy Titus Philemon Hebrews James Peter Jude Revelation Surah Quran
"""
BOOKS = frozenset(_BOOKS.split())
SHORT_BOOKS = {"Gen": "Genesis", "Exod": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deut": "Deuteronomy", "Josh": "Joshua"}
SHORT_BOOKS |= {"Sam": "Samuel", "Chron": "Chronicles", "Ps": "Psalm", "Prov": "Proverbs", "Isa": "Isaiah", "Jer": "Jeremiah"}
SHORT_BOOKS |= {"Ezek": "Ezekiel", "Dan": "Daniel", "Matt": "Matthew", "Rom": "Romans", "Cor": "Corinthians", "Gal": "Galatians"}
SHORT_BOOKS |= {"Eph": "Ephesians", "Phil": "Philippians", "Col": "Colossians", "Thess": "Thessalonians", "Tim": "Timothy"}
SHORT_BOOKS |= {"Heb": "Hebrews", "Jas": "James", "Pet": "Peter", "Rev": "Revelation"}
_NUMBERED_BOOKS = r"(?:Samuel|Kings|Chronicles|Corinthians|Thessalonians|Timothy|Peter|John|(?:Sam|Chron|Cor|Thess|Tim|Pet)\.?) \d{1,3}:\d"
BOOK_FORMS: tuple[Form, ...] = (
    form(rf"(?<![\w.])(?P<book>{'|'.join(SHORT_BOOKS)})\.? (?=\d{{1,3}}:\d)", lambda match: SHORT_BOOKS[match["book"]]),
)
BOOK_NUMBERS: tuple[Form, ...] = (
    form(rf"(?<![\w.,:])(?P<number>[123])(?= {_NUMBERED_BOOKS})", lambda match: ordinal(int(match["number"]))),
)
_VERSE = re.compile(rf"\b(?:{'|'.join(sorted(BOOKS))}|(?:{'|'.join(SHORT_BOOKS)})\.?) \d{{1,3}}$")
"""Words before the verse of a chapter: Isaiah 40:31."""
_LAST_LETTERS = re.compile(r"[A-Za-z]+$")
_AMOUNT = re.compile(r"(\d[\d,.]*)[^\d]{0,6}$")
_NEXT_AMOUNT = re.compile(r" ?[^\d ]{0,4}(\d[\d,.]*)")
_RESULT_FOLLOWS = re.compile(r"[-−]? ?[^ ]+ (?:is|equals|gives|makes|leaves)\b|[-−]? ?[^ ]+[ ]?[=+*/×÷<>≤≥≠≈-]")


_LABEL_WORDS = """
day room exercise chapter step week month level lesson part unit section page version episode season volume book act scene question problem
task item option number figure table type model block floor suite top rank place lane line bus train tram route gate flight apartment apt
team group class grade phase stage round game match year set module slide rule point note tip stop track seat row table house
terminal pier class size zone hall booth stand door deck cabin ward unit pack card player stage plan
"""
_LABEL = re.compile(
    rf"\b(?:(?i:{'|'.join(_LABEL_WORDS.split())})|(?<=[a-z,] )[A-Z][A-Za-z]+|[a-z]+[A-Z]\w*|Windows|Android|Ubuntu|Python|Java|Group)"
    r" (?:\d+(?:\.\d+)?|[A-Z])$|\b(?:[Ii]n|[Ss]ince|[Bb]y|[Uu]ntil) (?:1[5-9]|20)\d\d$"
)
"""Words after which a number is only a name."""
LABELS = frozenset(_LABEL_WORDS.split()) | set(table("finished ended score won lost compute add open closed hours shift daily work works"))
"""Words that decide whether a hyphen after the next number is a rest, or "to"."""
_AMOUNT_OF_THING = re.compile(
    r"\d+(?:[.,]\d+)*(?:-?[A-Za-z]{2,}| (?!(?:in|on|at|of|to|and|or|is|are|for|by|with|from|as|but|the)\b)[A-Za-z]{2,}|,? [A-Z])"
)
_ENDED = re.compile(
    r"\b(?:finished|finishes|ended|ends|won|wins|win|lost|loses|beat|beats|drew|draws?|led|leads?|leading|tied|ahead|score|result|final|scored)\b"
    r"[^.;!?]{0,20}$"
)
_DIFFERENCE_ENDS = re.compile(
    r"(?:[-−+±]?(?:\d[\d.,]*\d|\d)%?(?!\w)|[-−+]?\d*[A-Za-z](?![A-Za-z'.])\S*|[√∞∛(]\S*|[^\sA-Za-z\d]\S*)"
    r"(?=$|[.,;:!?)\]\"'”]| ?[-−+*/×÷^<>|]| (?:is|are|was|equals?|gives?|makes?|leaves?|and|or|to|in|for|mod|when|where|if|then|but|as|on"
    r"|at|with|over|times|plus|minus|by|from|of|the|we|you|it|so|because|that|which|can|has|yields?|becomes?|means?|divided)\b)"
)
_VARIABLE_BEFORE, _VARIABLE = re.compile(r"(?<![A-Za-z'.])[a-z]$"), re.compile(r"[a-z](?![A-Za-z'])")
_WORD_BEFORE = re.compile(r"(?P<word>[A-Za-z]{2,})'?s? (?:[^ A-Za-z]+)$|(?P<more>(?!))")
_ASKING = frozenset(
    table(
        "is are was be of compute calculate evaluate do does what to that than as and or the with find simplify solve subtract expression"
        " see saw say says said write writes wrote get got by then have has from if when where so but at in on for not term difference"
        " yields gives means becomes like example equal equals exactly take let since because because how much mean result sum answer"
    )
)


def _dash(match: re.Match[str]) -> str | None:
    """The word for a dash, here and in all functions of dashes below: "minus", "to", or empty within a name. None: it is a rest."""
    sign, left, right = match.group(), before(match, 24), after(match, 40)
    spaced_before, spaced_after = left.endswith(" ") or not left, right.startswith(" ") or not right
    if is_charge(left, right):
        return "minus"
    if not spaced_after and _FREE.search(left[-1:]):
        return _at_front(match, sign, right)
    if spaced_before and spaced_after:
        return _between(match, sign, left.rstrip(), right.lstrip())
    if not spaced_before and not spaced_after:
        return _dash_word(match, sign, left, right)
    return "minus" if sign == "−" else None


def _at_front(match: re.Match[str], sign: str, right: str) -> str | None:
    """The word for a dash before a thing and after none: -5, -x. right: the text after it."""
    if sign == "−" or _SIGNED_THING.match(right):
        return "minus" if sign != "—" else None
    if re.match(r"[A-Za-z](?![A-Za-z])", right) and (in_equation(match) or _is_formula(match, right)):
        return "minus"
    return "dash" if sign == "-" and re.match(r"[A-Za-z]{1,2}(?![\w'])", right) else None


def _is_formula(match: re.Match[str], right: str) -> bool:
    """Whether a dash before a letter belongs to a formula, -x + -y, and not to an option of a command."""
    return re.match(r"[a-z] [+*/^] ", right) is not None or re.search(r"(?:^|[^\w-])[-−]?[a-z\d] [-+*/^−] $", before(match, 8)) is not None


def _between(match: re.Match[str], sign: str, left: str, right: str) -> str | None:
    """The word for a dash between two spaces: 5 - 3, 9 AM – 5 PM. left, right: the text around the spaces."""
    if sign == "−":
        return "minus"
    if sign != "—" and _NAMED_FOLLOWS.match(right) and (_NAMED_RANGE.search(left) or _DAY_BEFORE.search(left)):
        return "to"
    if sign != "—" and (
        (_HOUR_BEFORE.search(left) and right[:1].isdecimal())
        or (_DAY_BEFORE.search(left) and re.match(r"\d[\d:]*(?:st|nd|rd|th)?(?: ?[ap]\.?m|,? \d{4}|(?! ?\w))", right, re.IGNORECASE))
    ):
        return "to"
    if re.match(r"[aAI] [A-Za-z]{2}", right) and not in_equation(match):
        return None
    if sign == "—" or not (_OPERAND_FOLLOWS.match(right) and (_OPERAND_BEFORE.search(left) or _NUMBER_BEFORE.search(left))):
        return None
    if in_equation(match):
        return "minus"
    if _OPENS.search(left) and re.match(r"\d{1,2}(?![\w:.]\w|\w)", right):
        return "to"
    if is_score(left, right):
        return "to"
    label = _LABEL.search(left)
    if label and (_AMOUNT_OF_THING.match(right) or left[-1].isupper()):
        return None  # Room 5 - 3 beds, Team A - 3.
    if _is_range(sign, left, right):
        return "to"
    return _minus_or_rest(left, right, before(match, 60))


_OPENS = re.compile(r"\b(?:[Oo]pen|[Cc]losed|[Hh]ours|[Ww]orks?|[Ss]hift|[Dd]aily|[Ff]rom):? \d{1,2}$")


def _minus_or_rest(left: str, right: str, front: str) -> str | None:
    """The word for a dash between operands: "minus" after a word that asks for it, else a range or a rest. front: a longer `left`."""
    if not _OPERAND_BEFORE.search(left) or not (_DIFFERENCE_ENDS.match(right) or re.match(r"\d+[a-z]{2,3}(?:[)²³ ,.;:”]|$)", right)):
        return None
    if re.search(rf"[a-z][{_POWERS}]$|[a-z]\^\d$", left) or (_VARIABLE_BEFORE.search(left) and _VARIABLE.match(right)):
        return "minus"
    last_word = _WORD_BEFORE.search(left)
    if last_word is None or last_word.group("word").lower() in _ASKING:
        first, last = re.search(r"\(([\d.]+)$", left), re.match(r"([\d.]+)\)", right)
        inside = first and last and re.search(r"[A-Za-z]{2} \([\d.]+ ?$", front)
        return "to" if inside and _is_smaller(first.group(1), last.group(1)) else "minus"  # type: ignore[union-attr]
    first, last = re.search(r"[ (]([\d.]+)$", left), re.match(r"(\d+(?:\.\d+)?)(?![\w.]\w)", right)
    return "to" if first and last and _is_smaller(first.group(1), last.group(1)) else None


def _is_smaller(one: str, other: str) -> bool:
    return float(one.strip(".").replace(".", "_", 1).replace(".", "").replace("_", ".") or 0) < float(other)


def is_score(left: str, right: str) -> bool:
    """Whether two numbers are the score of a game: between two sides, or after words about how it ended."""
    points = re.match(
        r"\d{1,3}(?!\d|[.:]\d|%)(?= ?(?P<end>[A-Z][a-z]|[.,;!?)\"”'’]|$|(?:in|at|to|on|after|for|against|over|and|with)\b))", right
    )
    if not points or not re.search(r"(?:^|[ (])\d{1,3}$", left):
        return False
    side = re.search(r"(?:^|[ (\"'“])[A-Z][A-Za-z.]+ \d{1,3}$|^\d{1,3}$", left)
    if side and points["end"][:1].isupper():
        return True
    return bool(_ENDED.search(left))


def _is_range(sign: str, left: str, right: str) -> bool:
    """Whether the numbers around a dash are a range: times, any around –, or ascending years, money, percent or numbers before a word."""
    first, last = _AMOUNT.search(left), _NEXT_AMOUNT.match(right)
    if not first or not last or re.match(r"[A-Za-z]\b", right):
        return False
    clock = ":" in left[-6:] or re.search(r"[ap]\.?m\.?$", left, re.IGNORECASE) is not None
    if clock or sign == "–":
        return True
    numbers = [
        float(re.sub(r"[,.](?!\d)|,", "", one.group(1)).replace(".", "_", 1).replace(".", "").replace("_", ".") or 0)
        for one in (first, last)
    ]
    if numbers[0] >= numbers[1] or _RESULT_FOLLOWS.match(right):
        return False
    return (
        bool(re.match(r"[^ ]+ [A-Za-z%°€£$]|[^ ]*[%°€£]", right))
        or right[0] in CURRENCY_SIGNS
        or all(1000 <= one < 2100 for one in numbers)
    )


def _dash_word(match: re.Match[str], sign: str, left: str, right: str) -> str | None:
    """The word for a dash without spaces: 5-6, A–Z, x-y. left, right: the text around it."""
    if sign == "—":
        return "to" if _ascends(left, right) else None
    if _NUMBER_FOLLOWS.match(right):
        return _before_number(match, sign, left, right)
    if sign == "−":
        return "minus"
    if left[-1].isdecimal() and re.match(r"[vV]\d", right):
        return "to"
    if left[-1].isalpha() and right[0].isalpha():
        named = _NAMED_RANGE.search(left) and _NAMED_FOLLOWS.match(right)
        letters = sign == "–" and re.search(r"(?<!\w)[A-Z]$", left) and re.match(r"[A-Z](?!\w)", right)
        if named or letters:
            return "to"
        variables = re.search(r"(?<![A-Za-z])[a-z]$", left) and re.match(r"[a-z](?![A-Za-z])", right)
        return (
            "minus"
            if variables and (in_equation(match) or right[1:3] in (")!", ")(", ")^", ")²", ")³") or re.search(r"\)\([a-z]$", left))
            else None
        )
    if re.match(r"[xyz](?![A-Za-z])|[√∞(]", right) or (in_equation(match) and _OPERAND_FOLLOWS.match(right)):
        return "minus" if _OPERAND_BEFORE.search(left) else None
    return "" if left[-1].isdecimal() and sign == "-" else None


def _ascends(left: str, right: str) -> bool:
    """Whether these texts end and begin with bare numbers, the second of which is greater: 5—6."""
    first, last = re.search(r"(?<![\w.,])\d+$", left), re.match(r"\d+(?![\w]|[.,]\d)", right)
    return first is not None and last is not None and int(first.group()) < int(last.group())


def _before_number(match: re.Match[str], sign: str, left: str, right: str) -> str | None:
    """The word for a dash without spaces that a number follows: 5-6, i7-9700K, UTC-5."""
    if sign == "−" or in_equation(match) or left[-1] == ")":
        return "minus" if _OPERAND_BEFORE.search(left) or sign == "−" else ""
    if re.search(r"\b(?:noon|midnight)$", left, re.IGNORECASE):
        return "to"
    if sign == "-" and (re.search(r"[A-Za-z]\d+$", left) or _NAME_BEFORE.search(left) or _NAME_FOLLOWS.match(right)):
        return ""  # Part of a name, as in i7-9700K and 1-800-FLOWERS.
    if left.endswith("10") and (_GOOD_BUDDY.match(right) or (left.strip("\"'“‘") == "10" and _ANSWER_ENDS.match(right))):
        return ""  # The answer "10-4".
    if left[-1].isdecimal() or left[-1] in "%°½¼¾":
        same = re.search(r"(?<![\w.,])\d{2}$", left)
        return "" if same and re.match(rf"{same.group()}(?![\w.,]\w|\w)", right) and not _ENDED.search(left[:-2]) else "to"
    letters = _LAST_LETTERS.search(left)
    if not letters:
        return "to" if _NUMBER_BEFORE.search(left) else "minus" if _OPERAND_BEFORE.search(left) else ""
    if letters.group() in ("UTC", "GMT"):
        return "minus"
    if letters.group().lower() in ("noon", "midnight"):
        return "to"
    front = left[: letters.start()][-1:]
    if not front.isdecimal() and front not in ("°", "/"):
        return "minus" if letters.group() in ("x", "y", "z", "n") else ""
    same = re.match(rf"[^A-Za-z]*{letters.group()}(?![A-Za-z])", right)
    return "minus" if letters.group() in ("x", "y", "z") and not same else "to"


def _cross(match: re.Match[str]) -> str:
    """The word for ×: "times", or "by" between the sides of a thing: 3 × 4 m."""
    computed = (
        in_equation(match) or re.search(r"[-−+*/=] ?[\d.]+ ?$", before(match, 12)) or re.match(rf" ?10[\^{_POWERS}]", after(match, 4))
    )
    if computed or not re.search(r"\d[a-z]{0,2} ?$", before(match, 4)) or not re.match(r" ?\d", after(match, 2)):
        return "times"
    spaced = before(match, 1) == " "
    return "times" if spaced and not re.match(r" [\d.,]+ ?(?:[a-zμ]{1,2}[²³]?\b|inch|feet|meter|pixel|×)", after(match, 16)) else "by"


def _star(match: re.Match[str]) -> str | None:
    """The word for * or **: an operator between two operands, else its name."""
    left, right = before(match, 12).rstrip(), after(match, 3).lstrip()
    if not (_OPERAND_BEFORE.search(left) and _OPERAND_FOLLOWS.match(right)):
        return "star" if len(match.group()) == 1 else "star star"
    return "times" if match.group() == "*" else "to the power of"


def _dot(match: re.Match[str]) -> str:
    """The word for ·: "times" in x · y; elsewhere it is empty, because the dot only separates words."""
    left, right = before(match, 12).rstrip(), after(match, 3).lstrip()
    return "times" if _OPERAND_BEFORE.search(left) and _OPERAND_FOLLOWS.match(right) else ""


def _caret(match: re.Match[str]) -> str:
    return _power(match["power"])


def _power(power: str) -> str:
    """A power in words: "2" as "squared", "-1" as "to the power of minus one", "2+" as the charge of an ion."""
    if power in ("2", "3"):
        return "squared" if power == "2" else "cubed"
    if power[-1] in "-+":  # The charge of an ion.
        return f"{amount(power[:-1]) if power[:-1].isdecimal() else ''} {'plus' if power[-1] == '+' else 'minus'}".strip()
    sign = "minus " if power[0] in "-−" else ""
    digits = power.lstrip("-−+")
    return f"to the power of {sign}{amount(digits) if digits.isdecimal() else digits}".rstrip()


_FUNCTIONS = ("sin", "cos", "tan", "log", "exp", "sec", "cot")


def _superscript(match: re.Match[str]) -> str:
    """Superscripts in words: a power after an operand, the number of a note after a word."""
    power = "".join(SUPERSCRIPTS[one] for one in match.group())
    if (
        re.search(r"[A-Za-z]{3}$|[^\w)]$|^$", before(match, 3))
        and power.isdecimal()
        and not (in_equation(match) or before(match, 3) in _FUNCTIONS)
    ):
        return amount(power)
    return _power(power)


TIME_NAMES = {"hr": "hour", "wk": "week", "mo": "month", "yr": "year", "min": "minute", "sec": "second"}
_PER = r"/(?P<per>hour|day|week|month|year|minute|second|night|person|user|hr|wk|mo|yr|min|sec)\b"


def _rate(match: re.Match[str]) -> str | None:
    """The word for a slash before a unit of time: 100 mg/day, 3/week. None if no number stands before it."""
    return f"per {TIME_NAMES.get(match['per'], match['per'])}" if re.search(r"\d[^ ]*(?: [A-Za-zμ/]+)?$", before(match, 16)) else None


def _slash(match: re.Match[str]) -> str:
    """The word for a slash; empty where it only separates: TCP/IP, and/or."""
    left, right = before(match, 16), after(match, 16)
    if re.search(r"(?<!\w)[A-Z]{1,4}$", left) and re.match(r"[A-Z]{1,4}(?!\w)", right):
        return ""
    if re.search(r"\bd[a-z]$", left) and re.match(r"d[a-z]\b", right):
        return "over"
    if re.search(r"\band$", left) and re.match(r"or\b", right):
        return ""
    if re.search(r"\bs?he$", left, re.IGNORECASE) and re.match(r"s?he\b", right):
        return "or"
    chained = re.search(r"/\w{1,4}$", left) or re.match(r"\w{1,4}/", right)
    if not chained and _OPERAND_BEFORE.search(left.rstrip()) and _OPERAND_FOLLOWS.match(right.lstrip()):
        computed = in_equation(match) or left.endswith((" ", "!"))
        return "divided by" if computed else "over" if re.match(r"[a-z]\b", right) else "slash"
    return "slash"


def _colon(match: re.Match[str]) -> str | None:
    """The word for a colon between digits: "to", or empty before a verse, Isaiah 40:31. None elsewhere."""
    if not (re.search(r"\d$", before(match, 1)) and re.match(r"\d", after(match, 1))):
        return None
    return "" if _VERSE.search(before(match, 24)) else "to"


def _plus(match: re.Match[str]) -> str:
    return "plus"


def _about(match: re.Match[str]) -> str:
    return "about" if re.match(r" ?[$£€]?\.?\d", after(match, 3)) else "" if before(match, 1).isalnum() else "tilde"


def _nearly(match: re.Match[str]) -> str:
    return SIGN_WORDS["≈"] if _OPERAND_BEFORE.search(before(match, 8).rstrip()) else "approximately"


def _sign_name(match: re.Match[str]) -> str:
    return SIGN_WORDS[match.group()]


def _greek(match: re.Match[str]) -> str:
    return GREEK[match.group()]


def _currency(match: re.Match[str]) -> str:
    """The name of a currency sign without a number; empty for the dollar signs around a formula."""
    if match.group() == "$" and delimits(match):
        return ""
    return CURRENCIES[match.group()][0]


def _underscore(match: re.Match[str]) -> str:
    return ""


_OPERATOR_FOLLOWS = re.compile(
    r"! ?(?:=|[-−+*/×·÷<>≤≥≠≈^)(]+ ?(?=[\d(√]|[A-Za-z](?![A-Za-z'])|$)|(?:is|equals|grows|mod)\b)|!\)[-−+*/^!=)]?"
)
_SAID_FOR = re.compile(r"\b(?:compute|find|of|evaluate|equals|times|by) [knmrx]$")
_SAID_OF = re.compile(r"(?<![A-Za-z'])[b-hj-z]$")


def _factorial(match: re.Match[str]) -> str | None:
    """The word for ! in a formula: n! = 120, 5!/3!, (n-1)!. None in "I am 5!": after a number the formula must go on."""
    front, rest = before(match, 40), match.group() + after(match, 8)
    if front[-1] == ")":
        inside = front[front.rfind("(") + 1 : -1]
        return "factorial" if re.fullmatch(r"[a-z\d]+(?: ?[-−+*/] ?[a-z\d]+)+|\d+|[a-z]", inside) else None
    if _SAID_OF.search(front):
        alone = not front[:-1].strip() and not rest[1:].strip(".")
        return "factorial" if alone or in_equation(match) or _OPERATOR_FOLLOWS.match(rest) or _SAID_FOR.search(front) else None
    if re.fullmatch(r"\d{1,3}", front) and not rest[1:]:
        return "factorial"
    if not re.search(r"(?<![\w.,])\d{1,3}$", front):
        return None
    if re.search(r"! ?[-−+*/×·÷(]? ?\(?\d{1,3}$", front) and not re.match(r"! [A-Za-z]{2}", rest):
        return "factorial"
    bracketed = rest.startswith("!)") and not (
        "(" in front and re.fullmatch(r"(?:[a-z]|\d+)?(?:[-−+*/×·÷^!=( ]|[a-z](?![a-z])|\d)*", front[front.rfind("(") + 1 :])
    )
    return "factorial" if _OPERATOR_FOLLOWS.match(rest) and not bracketed else None


_ABSOLUTE = re.compile(r"\|(?! )(?![^|]{0,30}[A-Za-z]{2})[-−+*/^²³ ().\dA-Za-z]{1,30}(?<! )\|(?![\w|])")


def _bar(match: re.Match[str]) -> str:
    """The words for |: the first of |x| opens an absolute value, the second is empty; elsewhere it separates cells, as a comma."""
    if before(match, 1) not in ("|",) and not before(match, 1).isalpha() and _ABSOLUTE.match(match.string, match.start()):
        return "the absolute value of"
    opened = match.string.rfind("|", max(match.start() - 30, 0), match.start())
    found = _ABSOLUTE.match(match.string, opened) if opened >= 0 else None
    return "" if found and found.end() == match.end() else ","


def _root(match: re.Match[str]) -> str:
    """The words for a root with its number: ³√."""
    power = "".join(SUPERSCRIPTS[one] for one in match["root"])
    names = {"2": "square", "3": "cube", "n": "n-th"}
    return f"the {names.get(power) or (ordinal(int(power)) if power.isdecimal() else power)} root of"


_DASH = form(r"[-−–—]", _dash)
SIGNS: dict[str, tuple[Form, ...]] = {
    **{sign: (form(re.escape(sign), _sign_name),) for sign in SIGN_WORDS},
    **{sign: (form(sign, _greek),) for sign in GREEK},
    **{
        sign: (form(rf"(?<![\w)])(?P<root>[{_POWERS}]{{1,3}})√", _root), form(rf"[{_POWERS}]{{1,12}}", _superscript))
        for sign in SUPERSCRIPTS
    },
    **{sign: (form(re.escape(sign), _currency),) for sign in CURRENCY_SIGNS},
    "°": (
        form(r"°(?=[CF]\b)(?P<scale>[CF])", lambda match: "degrees " + ("Celsius" if match["scale"] == "C" else "Fahrenheit")),
        form("°", "degrees"),
    ),
    **dict.fromkeys((chr(0x2160 + place) for place in range(32)), ROMAN_SIGNS),
    "-": (form(r"->", "to"), *DECREMENTS, form(r"(?<![^\s(\"'“])--(?=[A-Za-z])", "dash dash"), _DASH),
    "−": (_DASH,),
    "–": (_DASH,),
    "—": (_DASH,),
    "×": (form("×", _cross),),
    "·": (form(rf"(?<=[\w)]) ?· ?(?=[\w({_GREEK}√])", "times"), form("·", _dot)),
    "*": (form(r"(?<=[\w)] )\*=(?= )", "times equals"), form(r"\*\*?", _star)),
    "^": (
        *CHARGES,
        form(r"\^(?P<open>\()?(?P<power>[-−+]?(?:\d{1,40}|[A-Za-z]{1,12}))(?(open)\))", _caret),
        form(r"\^", "to the power of"),
    ),
    "/": (form(r"(?<=\bf)/(?=\d)", ""), *PER_UNITS, form(_PER, _rate), form("/", _slash)),
    ":": (form(":=", "is"), form(r"(?<=\w)::(?=\w)", "colon colon"), form(":", _colon)),
    "+": (form(r"\+/[-−]", "plus or minus"), form(r"\+", _plus)),
    "=": (form(r"=>", "arrow"), form(r"={1,2}", "equals")),
    "!": (form(r"!=", "is not equal to"), form(r"(?<=[\w)])!", _factorial)),
    "<": (form(r"<=", "less than or equal to"), form(r"<-(?!\d)", "from"), form(r"<>", "is not equal to"), form(r"<", "less than")),
    ">": (form(r">=", "greater than or equal to"), form(r">", "greater than")),
    "~": (form(r"~=", "is approximately equal to"), form(r"(?<=\d)~(?=\d)", "to"), form("~", _about)),
    "≈": (form("≈", _nearly),),
    "%": (form("%", lambda match: "modulo" if _OPERAND_BEFORE.search(before(match, 12).rstrip()) and is_modulo(match) else "percent"),),
    "&": (form(r"&{1,2}", "and"),),
    "@": (form("@", "at"),),
    "#": (form(r"#(?= ?\d|[A-Z]{1,3}-\d)", "number"), form("#", "hashtag")),
    "§": (form("§§", "sections"), form("§", "section")),
    "\\": (form(r"\\", "backslash"),),
    "|": (form(r"\|\|", "or"), *PIPES, form(r"\|", _bar)),
    "_": (form("_", _underscore),),
    "¿": (form("[¿¡]", ""),),
    "¡": (form("[¿¡]", ""),),
    ".": (form(r"\.NET\b", "dot net"),),
    **{sign: (*STARS, form(re.escape(sign), _sign_name)) for sign in "★☆"},
    **{sign: (*SUMS, form(sign, _sign_name)) for sign in "∑∏∫"},
    **{sign: (*SUMS, form(sign, _greek)) for sign in "ΣΠ"},
    "‖": (form(r"(?<![\w)])(?<!norm )‖(?=[\w(])", "the norm of"), form("‖", "")),
    **{sign: (form(sign, ""),) for sign in "⌋⌉"},
    LOST: (form(LOST, ""),),
}
