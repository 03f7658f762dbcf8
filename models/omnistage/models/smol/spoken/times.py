"""Days, times of day, years and decades."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import COUNT_FOLLOWS, Form, alternatives, before, form, in_equation, table
from omnistage.models.smol.spoken.numbers import ONES, amount, cardinal, digits, ordinal, plural, year

MONTHS = table("January February March April May June July August September October November December")
SHORT_MONTHS = {month[:3]: month for month in MONTHS if month != "May"} | {"Sept": "September"}
SHORT_DAYS = {"Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Thurs": "Thursday"}
SHORT_DAYS |= {"Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday"}
WEEKDAYS = (*SHORT_DAYS, *table("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"))
NAMED = alternatives((*MONTHS, *SHORT_MONTHS, *WEEKDAYS))
"""Days and months, with which a range may begin and end."""
_SHORT_NAME = alternatives(SHORT_MONTHS | SHORT_DAYS)
MONTH = rf"(?P<month>{alternatives(MONTHS)}|(?:{alternatives(SHORT_MONTHS)})\b\.?)"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_AM = r"(?: ?(?P<half>[AaPp])(?:\.[Mm]\.|[Mm])(?![A-Za-z]))"
_ZONE = r"(?P<zone> (?:EST|EDT|CST|CDT|MST|MDT|PST|PDT|UTC|GMT|CET|CEST|BST|IST|JST|ET|PT|CT)\b)?"
_DECADE_BEFORE = re.compile(
    r"^$|(?:\d0'?s ?[-–]|\b(?:the|his|her|their|my|your|our|its|mid|early|late|in|and|to|of|or|roaring|swinging)[ -]|')$", re.IGNORECASE
)


def _month(name: str) -> str:
    return SHORT_MONTHS.get(name.rstrip("."), name.rstrip("."))


def _spoken_year(text: str) -> str:
    """A year of two or four digits in words; two digits are a year from 1931 to 2030."""
    if len(text) == 2:
        text = ("19" if int(text) > 30 else "20") + text
    return year(int(text)) if text[0] != "0" else digits(text)


def _date(month: int, day: int, written_year: str) -> str | None:
    """A date in words, without a year if it is empty. None for a month or day that cannot be."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    return f"{MONTHS[month - 1]} {ordinal(day)}" + (f", {_spoken_year(written_year)}" if written_year else "")


def _iso_date(match: re.Match[str]) -> str | None:
    """A date that begins with the year: 2024-05-07. None for a month or day that cannot be."""
    return _date(int(match["month"]), int(match["day"]), match["year"])


def _date_in_digits(match: re.Match[str]) -> str | None:
    """A date in digits: 25/12/2024, 12/25/2024. If both can be the month, it is the first; with points or hyphens (5.4.2024) the second."""
    first, second = int(match["first"]), int(match["second"])
    european = match["mark"] in ".-" and second <= 12 and len(match["year"]) == 4
    if match["mark"] in ".-" and len(match["year"]) == 2:
        return None
    month, day = (second, first) if first > 12 or european else (first, second)
    return _date(month, day, match["year"])


def _day(match: re.Match[str]) -> str | None:
    """A day without a year: 12/25 or 25/12. None for a day that cannot be. The forms of fractions are tried before it."""
    month, day = int(match["month"]), int(match["day"])
    return _date(month, day, "") if month <= 12 else _date(day, month, "")


def _month_day(match: re.Match[str]) -> str | None:
    """One or two days after a month: May 5-7. In "In May 20 people came" the number counts. None for a day that cannot be."""
    days = [int(day) for day in (match["day"], match["last"]) if day]
    if not all(1 <= day <= 31 for day in days):
        return None
    front, text = before(match, 12), match.string
    is_day = match["place"] or _NO_COUNT_BEFORE.search(front)
    counts = COUNT_FOLLOWS.match(text, match.end()) or (front.endswith(_IN) and _SMALL_WORD.match(text, match.end()))
    say = cardinal if counts and not is_day else ordinal
    return f"{_month(match['month'])} " + " to ".join(say(day) for day in days)


_NO_COUNT_BEFORE = re.compile(r"\b(?:the|a|an|this|that|on|every|each|dated?|due|our|my|his|her|their|your|its) $", re.IGNORECASE)
_IN = ("In ", "in ")
_SMALL_WORD = re.compile(r" (?!(?:and|or|to|at|was|is|the|a|an|this|when|as)\b)[a-z]{2,}")


def _day_month(match: re.Match[str]) -> str | None:
    """One or two days before a month: 5-7 May 2024. None for a day that cannot be."""
    days = [int(day) for day in (match["first"], match["day"]) if day]
    if not all(1 <= day <= 31 for day in days):
        return None
    article = "" if match["of"] or re.search(r"\bthe $", before(match, 5), re.IGNORECASE) else "the "
    words = f"{article}{' to '.join(ordinal(day) for day in days)} of {_month(match['month'])}"
    return words + (f" {_spoken_year(match['year'])}" if match["year"] else "")


def _month_of(match: re.Match[str]) -> str | None:
    """A month of a year: 12/2024, 2024-12. None for a range of years."""
    if "-" in match.group() and int(match["month"]) > int(match["year"][2:]):
        return None
    return f"{MONTHS[int(match['month']) - 1]} {year(int(match['year']))}"


def _dotted_days(match: re.Match[str]) -> str | None:
    """Days with a full stop: "5.-7. May"; "5. May" only if a year or a word before it shows a date, else None: a sentence may end there."""
    certain = match["first"] or match["year"] or _ON_DAY.search(before(match, 8))
    alone = not before(match, 8).strip() and not match.string[match.end() :].strip(".,")
    return _day_month(match) if certain or alone else None


_ON_DAY = re.compile(r"\b(?:on|[Oo]n the|the|am|vom|bis|from|to|until|by|since) $")


def _lone_month(match: re.Match[str]) -> str:
    return _month(match["month"])


def _clock(match: re.Match[str]) -> str | None:
    """A time of day: 7:05 as "seven oh five", 7:00 as "seven o'clock". None for a time that cannot be, or in an equation."""
    hour, minute, second = int(match["hour"]), int(match["minute"]), match["second"]
    if hour > 24 or minute > 59 or (second and int(second) > 59) or (in_equation(match) and not match["half"]):
        return None
    words = [digits(match["hour"]) if match["hour"] in ("00", "0") and not match["half"] else cardinal(hour)]
    if minute:
        words.append(f"oh {ONES[minute]}" if minute < 10 else cardinal(minute))
    elif not match["half"]:
        hundred = match["hour"].startswith("0") and hour
        words = [f"{digits(match['hour'])} hundred" if hundred else f"{cardinal(hour)} o'clock"]
    if second:
        words.append(f"and {cardinal(int(second))} second" + ("" if int(second) == 1 else "s"))
        if match["part"]:
            words[-1] = f"and {amount(second + match['part'])} seconds"
    groups = match.groupdict()
    if groups.get("utc") or groups.get("ahead"):
        words.append("UTC" + (_ahead(groups["ahead"]) if groups["ahead"] else ""))
    return " ".join(words) + _half_day(match) + (match["zone"] or "")


def _lap(match: re.Match[str]) -> str | None:
    """A duration of minutes and seconds, 1:23.45. None for a ratio, in an equation, or for more than 59 seconds."""
    minutes, seconds = int(match["minutes"]), match["seconds"].removeprefix("0")
    if int(match["seconds"][:2]) > 59 or awaits_ratio(before(match, 24)) or in_equation(match):
        return None
    return f"{cardinal(minutes)} minute{'' if minutes == 1 else 's'} and {amount(seconds)} seconds"


_RATIO = re.compile(r"\b(?:ratios?|odds|scale|mixture|dilution)(?: (?:of|is|was|are|at|to))?:? $", re.IGNORECASE)


def awaits_ratio(text: str) -> bool:
    """Whether 1:12.5 after this text is a ratio and no time."""
    return bool(_RATIO.search(text[-24:]))


def _ahead(text: str) -> str:
    """The words for how far a clock is ahead of UTC: "+05:30" as " plus five thirty"."""
    digits = re.sub(r"\D", "", text)
    hours, minutes = (digits, "") if len(digits) < 3 else (digits[:-2], digits[-2:])
    return f" {'plus' if text[0] == '+' else 'minus'} {cardinal(int(hours))}" + (f" {cardinal(int(minutes))}" if minutes.strip("0") else "")


def _half_day(match: re.Match[str]) -> str:
    """ " A.M." or " P.M.": the lexicon spells letters with dots, and the last dot may end the sentence. Empty if neither is written."""
    if not match["half"]:
        return ""
    return f" {match['half'].upper()}.M."


def _hour(match: re.Match[str]) -> str | None:
    """An hour with A.M. or P.M., and a zone if one is written: 9 am UTC. None for an hour above 24."""
    hour = int(match["hour"])
    return f"{cardinal(hour)}{_half_day(match)}{match['zone'] or ''}" if hour <= 24 else None


def _decade(match: re.Match[str]) -> str | None:
    """A decade in words: 1990s, the 90s. None for two digits that no mark or word before them makes a decade."""
    number, written = int(match["number"]), match["number"]
    if len(written) == 4:
        return plural(year(number))
    if match["mark"] or _DECADE_BEFORE.search(before(match, 12)):
        return plural(cardinal(number)) if number else "two thousands"
    return None


def _short_year(match: re.Match[str]) -> str:
    text = match["year"]
    return f"oh {ONES[int(text)]}" if text[0] == "0" else cardinal(int(text))


def _range_of_years(match: re.Match[str]) -> str | None:
    """Two years of one century: 1914-18. None if they do not ascend."""
    first, last = match["first"], match["last"]
    if int(first[2:]) >= int(last) or first[:2] > "21":
        return None
    return f"{year(int(first))} to " + (f"oh {ONES[int(last)]}" if last[0] == "0" else cardinal(int(last)))


def _scale(match: re.Match[str]) -> str:
    """The scale of a map: 1:50,000."""
    return f"{cardinal(int(match['one']))} to {amount(match['many'])}"


def _short_name(match: re.Match[str]) -> str:
    """A name in a range of days or months: Mon-Fri."""
    name = match["name"] or match["last"]
    return SHORT_DAYS.get(name) or SHORT_MONTHS[name]


def _duration(match: re.Match[str]) -> str:
    """A duration with its units: 1h30m, 2h 5m 10s."""
    words = []
    for name in ("hour", "minute", "second"):
        if match[name]:
            words.append(f"{cardinal(int(match[name]))} {name}" + ("" if int(match[name]) == 1 else "s"))
    return " ".join(words)


def _before_christ(match: re.Match[str]) -> str:
    """The number of a year that B.C., A.D. or CE follows."""
    text = match["number"]
    return year(int(text)) if len(text) == 4 else amount(text)


def _countdown(match: re.Match[str]) -> str:
    return f"{match.group()[0]} minus"


def _french_time(match: re.Match[str]) -> str | None:
    """A time of day after a word such as "at": at 15h30. None elsewhere: a duration."""
    hour, minute = int(match["hour"]), int(match["minute"])
    if hour > 24 or minute > 59 or not (_AT.search(before(match, 8)) or (hour > 7 and not before(match, 1))):
        return None
    return f"{cardinal(hour)} " + (f"oh {ONES[minute]}" if 0 < minute < 10 else cardinal(minute) if minute else "o'clock")


def _day_with_stop(match: re.Match[str]) -> str | None:
    """A day and month in the middle of a sentence: 31.12. until today."""
    return _date(int(match["month"]), int(match["day"]), "")


_AT = re.compile(r"\b(?:at|from|to|until|till|by|before|after|since|à) $", re.IGNORECASE)
TIMES: tuple[Form, ...] = (
    form(r"(?:(?P<many>1000)s|100s(?= of\b))\b", lambda match: "thousands" if match["many"] else "hundreds"),
    form(r"(?P<year>\d{4})(?P<mark>[-/.])(?P<month>\d{2})(?P=mark)(?P<day>\d{2})(?!\d|[-/.]\d)(?:T(?=\d\d:))?", _iso_date),
    form(r"(?P<year>[12]\d{3})/(?P<month>\d{1,2})/(?P<day>\d{1,2})(?!\d|[-/.]\d)", _iso_date),
    form(r"(?P<first>\d{1,2})(?P<mark>[-/.])(?P<second>\d{1,2})(?P=mark)(?P<year>\d{4}|\d{2})(?!\d|[-/.]\d)", _date_in_digits),
    form(r"(?P<one>\d{1,2}):(?P<many>\d{1,3}(?:,\d{3})+)(?![\d:]|\.\d)", _scale),
    form(
        rf"(?P<hour>\d{{1,2}}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?P<part>\.\d{{1,6}})?)?(?!\d|:\d|\.\d){_AM}?"
        rf"(?:(?P<utc>Z)\b|(?:(?<=:\d\d:\d\d)|(?<=\.\d{{3}}))(?P<ahead>[-+−]\d\d:?\d\d)(?!\d))?{_ZONE}",
        _clock,
    ),
    form(r"(?P<minutes>\d{1,2}):(?P<seconds>\d\d\.\d{1,3})(?![\d:]|\.\d)", _lap),
    form(rf"(?P<hour>\d{{1,2}})\.(?P<minute>[0-5]\d)(?P<second>(?!))?(?P<part>(?!))?{_AM}{_ZONE}", _clock),
    form(rf"(?P<hour>\d{{1,2}}){_AM}{_ZONE}", _hour),
    form(r"(?P<number>\d{3}0|\d0)(?P<mark>)'?s\b(?!'\w)", _decade),
    form(r"(?P<hour>\d{1,2})h(?P<minute>\d\d)(?!\w)", _french_time),
    form(r"(?<![\d.])(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?= [a-z]|[-–])", _day_with_stop),
    form(r"(?P<hour>\d{1,3})h ?(?P<minute>\d{1,2})(?:m|min)?(?: ?(?P<second>\d{1,2})s)?\b", _duration),
    form(r"(?P<hour>)(?P<minute>\d{1,3})m ?(?P<second>\d{1,2})s\b", _duration),
    form(rf"(?P<first>(?!))?{_DAY}-(?P<of>(?!))?(?P<month>{alternatives(SHORT_MONTHS)}|May)-(?P<year>\d{{4}})(?!\d)", _day_month),
    form(r"(?P<year>(?:19|20)\d\d)-(?P<month>0[1-9]|1[0-2])(?![\d-])", _month_of),
    form(r"(?P<month>0?[1-9]|1[0-2])/(?P<year>(?:19|20)\d\d)(?![\d/])", _month_of),
    form(
        rf"(?:(?P<first>\d{{1,2}})(?:st|nd|rd|th)? ?[-–] ?)?{_DAY} (?P<of>of )?{MONTH}(?:,? (?P<year>\d{{4}})(?![\d:]))?(?![A-Za-z])",
        _day_month,
    ),
    form(rf"(?P<day>\d{{1,2}})\.(?= (?:bis|to|until|and|und) \d{{1,2}}\. {MONTH})", lambda match: f"the {ordinal(int(match['day']))}"),
    form(
        rf"(?:(?P<first>\d{{1,2}})\. ?[-–/] ?)?(?P<day>\d{{1,2}})\. (?P<of>of )?{MONTH}(?:,? (?P<year>\d{{4}})(?![\d:]))?(?![A-Za-z])",
        _dotted_days,
    ),
    form(r"(?P<first>1\d{3}|20\d\d)[-–/](?P<last>\d\d)(?![\d-])", _range_of_years),
    form(r"(?P<number>\d{1,5})(?= ?(?:B\.?C|A\.D|AD\b|CE\b))", _before_christ),
)
"""Forms that begin with a digit."""
DAYS: tuple[Form, ...] = (form(r"(?<!\d/)(?P<month>\d{1,2})/(?P<day>\d{1,2})(?![\d/]|\.\d)", _day),)
ZONES: tuple[Form, ...] = (
    form(r"(?<!\w)(?P<zone>UTC|GMT) ?(?P<ahead>[-+−]\d{1,2}(?::?\d\d)?)(?![\d:])", lambda match: match["zone"] + _ahead(match["ahead"])),
    form(r"(?<![\w-])[TLED][-−](?=\d+ ?(?:seconds?|minutes?|hours?|days?|weeks?|months?|min|h|s)\b|\d+:\d\d)", _countdown),
    form(r"(?<=\bat )T[-−](?=\d{1,3}\b)", _countdown),
)
"""The difference of a clock from UTC (UTC+2), and the time before a start (T-10 seconds)."""
MONTH_DAYS: tuple[Form, ...] = (
    form(
        rf"(?P<name>{_SHORT_NAME})(?=\.? ?[-–] ?(?:{_SHORT_NAME})(?![a-z]))"
        rf"|(?:(?<=[-–])|(?<=[-–] ))(?P<last>(?:{alternatives(SHORT_DAYS)})(?![a-z])|(?:{_SHORT_NAME})(?![a-z]|\.? \d))",
        _short_name,
    ),
    form(
        rf"{MONTH} (?P<day>\d{{1,2}})(?P<place>st|nd|rd|th)?(?:[-–](?P<last>\d{{1,2}})(?:st|nd|rd|th)?)?(?![\d%\w]|[:.,]\d|-\d)", _month_day
    ),
    form(rf"(?P<month>(?:{alternatives(SHORT_MONTHS)}))\.?(?= (?:\d{{4}}|'\d\d)\b)", _lone_month),
    form(rf"(?P<name>{alternatives(SHORT_DAYS)})(?P<last>)(?= \d{{1,2}}(?::\d|[ap]m\b| [ap]\.?m))", _short_name),
)
"""Forms that begin with a letter."""
APOSTROPHES: tuple[Form, ...] = (form(r"(?<!\w)(?P<mark>')(?P<number>\d0)s\b", _decade), form(r"'(?P<year>\d\d)(?![\w'])", _short_year))
