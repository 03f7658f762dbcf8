"""Numbers in words, and the value of a written number: which mark is its point, and which marks only group its digits."""

from __future__ import annotations

import re
from typing import NamedTuple


def table(words: str) -> tuple[str, ...]:
    """The words of a line."""
    return tuple(words.split())


MAX_DIGITS = 12
"""A longer run of digits is a name, not an amount: it is read digit by digit. With marks between its groups it may have one group more."""

GROUP = "\u00a0"
"""Stands in a clean text for a space that groups digits."""
NUMBER = (
    r"(?:\d{1,3}(?:,\d{2,3}){0,6},\d{3}(?!\d|,\d)(?:\.\d+)?"  # 1,234.5 and 12,34,567
    r"|\d{1,3}(?:\.\d{3}){1,5},\d{1,4}(?!\d)|\d{1,3}(?:\.\d{3}){2,5}(?!\d|\.\d)"  # 1.234,5 and 1.234.567
    r"|[1-9]\d{0,2}(?:(?: \d{3}){2,5}| 000)(?!\d)(?:[.,]\d+)?|[1-9]\d{0,2} \d{3},\d\d(?!\d|,\d)"  # 1 234 567 and 1 234,50
    rf"|\d{{1,3}}(?:{GROUP}\d{{3}}){{1,5}}(?!\d)(?:[.,]\d+)?|\d{{1,3}}(?:'\d{{3}}){{1,5}}(?!\d)(?:\.\d+)?"
    r"|\d+,\d+(?!\d|,\d)|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
)
ONES = table(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
TENS = table("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
LETTER_A = "\uff21"
"""The letter A, which the lexicon takes for the article if it is written A. No clean text has this character."""
SCALES = ("", "thousand", "million", "billion", "trillion")
_IRREGULAR = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}")


class WrittenNumber(NamedTuple):
    """A written number: the digits before its point, the digits after it, and whether marks group them."""

    whole_digits: str
    part: str
    grouped: bool

    @property
    def is_one(self) -> bool:
        return self.whole_digits == "1" and not self.part


def parse_number(number: str) -> WrittenNumber:
    """Parse a number. Its point is the last of two different marks; commas before three digits and points that come twice group digits."""
    plain = number.replace(GROUP, "").replace(" ", "").replace("'", "")
    grouped = plain != number
    comma_place, stop_place = plain.rfind(","), plain.rfind(".")
    if comma_place > stop_place >= 0:  # 1.234,5
        point, grouped = ",", True
    elif comma_place >= 0 and stop_place < 0:  # 1,234 or 1,5
        commas_group = _GROUPED.fullmatch(plain) is not None
        point, grouped = "." if commas_group else ",", grouped or commas_group
    else:
        point, grouped = ".", grouped or comma_place >= 0
        if plain.count(".") > 1:
            return WrittenNumber(plain.replace(".", ""), "", True)
    integer, _, part = plain.replace("." if point == "," else ",", "").partition(point)
    return WrittenNumber(integer, part, grouped)


def amount(number: str | WrittenNumber) -> str:
    """A number in words: 1,234.50 as "one thousand two hundred thirty four point five zero"; 007 digit by digit."""
    integer, part, grouped = parse_number(number) if isinstance(number, str) else number
    words = ""
    if integer:
        limit = MAX_DIGITS + 3 if grouped else MAX_DIGITS
        is_spelled = len(integer) > limit or (len(integer) > 1 and integer[0] == "0")
        words = digits(integer) if is_spelled else cardinal(int(integer))
    return f"{words} point {digits(part)}".strip() if part else words


def cardinal(number: int) -> str:
    """A number of at most MAX_DIGITS + 3 digits in words."""
    if number < 100:
        tens, one = divmod(number, 10)
        return ONES[number] if number < 20 else TENS[tens] + (f" {ONES[one]}" if one else "")
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + (f" {cardinal(number % 100)}" if number % 100 else "")
    groups = []
    for scale in SCALES:
        number, group = divmod(number, 1000)
        if group:
            groups.append(f"{cardinal(group)} {scale}".rstrip())
    return " ".join(reversed(groups))


def ordinal(number: int) -> str:
    head, space, last = cardinal(number).rpartition(" ")
    last = _IRREGULAR.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return head + space + last


def digits(text: str) -> str:
    """The digits of a text, one by one in words; other characters are left out."""
    return " ".join(ONES[int(digit)] for digit in text if digit.isdecimal())


def year(number: int) -> str:
    """A year in words: 1984 as "nineteen eighty four", 2005 as "two thousand five". Also for other numbers of four digits."""
    high, low = divmod(number, 100)
    if high == 0 or (high % 10 == 0 and low < 10):
        return cardinal(number)
    if low == 0:
        return f"{cardinal(high)} hundred"
    return f"{cardinal(high)} " + (f"oh {ONES[low]}" if low < 10 else cardinal(low))


def spoken_year(text: str) -> str:
    """A year of two or four digits in words; two digits are a year from 1931 to 2030."""
    if len(text) == 2:
        text = ("19" if int(text) > 30 else "20") + text
    return year(int(text)) if text[0] != "0" else digits(text)


def name(text: str) -> str:
    """The number in a name, such as flight 370 or A320: "three seventy", "three twenty". text: its digits."""
    if text[0] == "0" or len(text) > 4:
        return digits(text) if len(text) > 1 else ONES[0]
    if len(text) == 4:
        return year(int(text))
    if len(text) == 3 and text[1:] != "00":
        return f"{ONES[int(text[0])]} " + (f"oh {ONES[int(text[2])]}" if text[1] == "0" else cardinal(int(text[1:])))
    return cardinal(int(text))


def bare(text: str) -> str:
    """A number in words, without a hint to its meaning: four digits are read as a year."""
    if len(text) == 4 and text.isdecimal() and text[0] != "0":
        return year(int(text))
    return amount(text)


def letters(text: str) -> str:
    """Letters in a form that the lexicon spells: TXT as T.X.T."""
    upper = text.upper()
    if len(upper) != 1:
        return ".".join(upper) + "."
    return LETTER_A if upper == "A" else upper


def plural(words: str) -> str:
    """The words with the last one in the plural: twenties, fifths, sixes."""
    if words.endswith("y"):
        return f"{words[:-1]}ies"
    return f"{words}es" if words.endswith("x") else f"{words}s"


def fraction(over: int, under: int) -> str:
    """A fraction in words: 2/3 as "two thirds"."""
    if under == 2:
        return "one half" if over == 1 else f"{cardinal(over)} halves"
    part = "quarter" if under == 4 else ordinal(under)
    return f"{cardinal(over)} {part if over == 1 else plural(part)}"
