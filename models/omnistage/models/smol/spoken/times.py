"""Days, times of day, years and decades."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.numbers import ONES, amount, cardinal, digits, ordinal, plural, spoken_year, year
from omnistage.models.smol.spoken.rules import COUNT_FOLLOWS, Say, Spell, alternatives, before, in_equation, read_lists, read_short_forms

MONTHS = read_lists()["months"]
SHORT_MONTHS, SHORT_DAYS = read_short_forms()["short month"], read_short_forms()["short day"]
WEEKDAYS = (*SHORT_DAYS, *read_lists()["weekdays"])
DATE_NAMES = alternatives((*MONTHS, *SHORT_MONTHS, *WEEKDAYS))
"""Days and months, with which a range may begin and end."""
_DECADE_BEFORE = re.compile(
    r"^$|(?:\d0'?s ?[-–]|\b(?:the|his|her|their|my|your|our|its|mid|early|late|in|and|to|of|or|roaring|swinging)[ -]|')$", re.IGNORECASE
)
_NO_COUNT_BEFORE = re.compile(r"\b(?:the|a|an|this|that|on|every|each|dated?|due|our|my|his|her|their|your|its) $", re.IGNORECASE)
_IN = ("In ", "in ")
_SMALL_WORD = re.compile(r" (?!(?:and|or|to|at|was|is|the|a|an|this|when|as)\b)[a-z]{2,}")
_RATIO = re.compile(r"\b(?:ratios?|odds|scale|mixture|dilution)(?: (?:of|is|was|are|at|to))?:? $", re.IGNORECASE)


def _month(number: str) -> str:
    return MONTHS[int(number) - 1]


def _day_name(name: str) -> str:
    """The name of a day or a month that may be short."""
    stem = name.rstrip(".")
    return SHORT_MONTHS.get(stem) or SHORT_DAYS.get(stem) or stem


def _month_day(match: re.Match[str]) -> str | None:
    """One or two days after a month: May 5-7. In "In May 20 people came" the number counts. None for a day that cannot be."""
    days = [int(day) for day in (match["day"], match["last"]) if day]
    if not all(1 <= day <= 31 for day in days):
        return None
    front, text = before(match, 12), match.string
    is_day = match["place"] or _NO_COUNT_BEFORE.search(front)
    counts = COUNT_FOLLOWS.match(text, match.end()) or (front.endswith(_IN) and _SMALL_WORD.match(text, match.end()))
    say = cardinal if counts and not is_day else ordinal
    return f"{_day_name(match['month'])} " + " to ".join(say(day) for day in days)


def _day_month(match: re.Match[str]) -> str:
    """One or two days before a month: 5-7 May 2024."""
    days = [int(day) for day in (match["first"], match["day"]) if day]
    article = "" if match["of"] or re.search(r"\bthe $", before(match, 5), re.IGNORECASE) else "the "
    words = f"{article}{' to '.join(ordinal(day) for day in days)} of {_day_name(match['month'])}"
    return words + (f" {spoken_year(match['year'])}" if match["year"] else "")


def _month_of_year(match: re.Match[str]) -> str | None:
    """A month of a year: 2024-12. None for a range of years: 2010-12."""
    if int(match["month"]) > int(match["year"][2:]):
        return None
    return f"{_month(match['month'])} {year(int(match['year']))}"


def _clock(match: re.Match[str]) -> str | None:
    """A time of day: 7:05 as "seven oh five", 7:00 as "seven o'clock". None for a time that cannot be, or in an equation."""
    groups = match.groupdict()
    hour, minute, second, day_half = int(match["hour"]), int(match["minute"]), groups.get("second"), groups["half"]
    if hour > 24 or (in_equation(match) and not day_half):
        return None
    words = [digits(match["hour"]) if match["hour"] in ("00", "0") and not day_half else cardinal(hour)]
    if minute:
        words.append(f"oh {ONES[minute]}" if minute < 10 else cardinal(minute))
    elif not day_half:
        is_hundred = match["hour"].startswith("0") and hour  # 07:00
        words = [f"{digits(match['hour'])} hundred" if is_hundred else f"{cardinal(hour)} o'clock"]
    if second:
        count = amount(second + groups["part"]) if groups["part"] else cardinal(int(second))
        words.append(f"and {count} second" + ("" if second == "01" and not groups["part"] else "s"))
    if day_half:
        words.append(_half(day_half))
    if groups.get("utc") or groups.get("ahead"):
        words.append(f"UTC {_clock_ahead(groups['ahead'])}" if groups["ahead"] else "UTC")
    return " ".join((*words, *(groups["zone"] or "").split()))


def _lap(match: re.Match[str]) -> str | None:
    """A duration of minutes and seconds, 1:23.45. None for a ratio, or in an equation."""
    minutes, seconds = int(match["minutes"]), match["seconds"].removeprefix("0")
    if awaits_ratio(before(match, 24)) or in_equation(match):
        return None
    return f"{cardinal(minutes)} minute{'' if minutes == 1 else 's'} and {amount(seconds)} seconds"


def awaits_ratio(text: str) -> bool:
    """Whether 1:12.5 after this text is a ratio and no time."""
    return bool(_RATIO.search(text[-24:]))


def _clock_ahead(text: str) -> str:
    """The words for how far a clock is ahead of UTC: "+05:30" as "plus five thirty"."""
    digit_text = re.sub(r"\D", "", text)
    hours, minutes = (digit_text, "") if len(digit_text) < 3 else (digit_text[:-2], digit_text[-2:])
    minute_words = f" {cardinal(int(minutes))}" if minutes.strip("0") else ""
    return f"{'plus' if text[0] == '+' else 'minus'} {cardinal(int(hours))}{minute_words}"


def _half(half: str) -> str:
    """A.M. or P.M.: the lexicon spells letters with dots, and the last dot may end the sentence."""
    return f"{half.upper()}.M."


def _decade(match: re.Match[str]) -> str | None:
    """A decade in words: 1990s, the 90s. None for two digits that no word before them makes a decade."""
    return _spell_decade(match["number"]) if len(match["number"]) == 4 or _DECADE_BEFORE.search(before(match, 12)) else None


def _spell_decade(number: str) -> str:
    if len(number) == 4:
        return plural(year(int(number)))
    return plural(cardinal(int(number))) if int(number) else "two thousands"


def _range_of_years(match: re.Match[str]) -> str | None:
    """Two years of one century: 1914-18. None if they do not ascend."""
    first, last = match["first"], match["last"]
    if int(first[2:]) >= int(last) or first[:2] > "21":
        return None
    return f"{year(int(first))} to " + (f"oh {ONES[int(last)]}" if last[0] == "0" else cardinal(int(last)))


PATTERNS = {"named": DATE_NAMES, "weekday": alternatives(WEEKDAYS)}
SPELLINGS: dict[str, Spell] = {
    "month": _month,
    "day": _day_name,
    "half": _half,
    "clock ahead": _clock_ahead,
    "decade": _spell_decade,
    "year": spoken_year,
}
FUNCTIONS: dict[str, Say] = {
    "month day": _month_day,
    "day month": _day_month,
    "month of year": _month_of_year,
    "clock": _clock,
    "lap": _lap,
    "decade": _decade,
    "range of years": _range_of_years,
}
