"""Amounts with what they count: money, units, percent, degrees, sizes, fractions."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.characters import FRACTIONS
from omnistage.models.smol.spoken.currencies import CURRENCIES
from omnistage.models.smol.spoken.form import Form, after, alternatives, before, form, in_equation
from omnistage.models.smol.spoken.mistaken import are_seconds, awaits_letter, is_many, is_mistaken
from omnistage.models.smol.spoken.numbers import (
    NUMBER,
    WrittenNumber,
    amount,
    bare,
    cardinal,
    count_words,
    name,
    ordinal,
    parse_number,
    plural,
)
from omnistage.models.smol.spoken.units import UNIT, unit_names

_SCALES = {"k": "thousand", "m": "million", "mm": "million", "mn": "million", "mio": "million", "b": "billion", "bn": "billion"}
_SCALES |= {"t": "trillion", "tn": "trillion", "trn": "trillion"}
_SHORT = "[kKmMbBtT]|bn"
SCALE_WORDS = "hundred|thousand|million|billion|trillion|lakh|crore"
_SCALE = rf"(?:[ -]?(?P<scale>{SCALE_WORDS})\b|(?P<short>k|K|mm|mn|mio|m|M|MM|bn|b|B|Bn|tn|trn|t|T)(?![\w²³])| (?P<far>bn|mn|tn)\b)?"
_PER = r"(?:/(?P<per>hr|hour|h|day|week|wk|month|mo|year|yr|min|sec|s|kg|lb|oz|L|l|person|night|unit|kWh|user|gal|sq ft|ft|m²|ea)\b)?"
_PER_WORDS = {"hr": "hour", "h": "hour", "wk": "week", "mo": "month", "yr": "year", "min": "minute", "sec": "second", "s": "second"}
_PER_WORDS |= {"kg": "kilogram", "lb": "pound", "oz": "ounce", "L": "liter", "l": "liter", "kWh": "kilowatt hour", "gal": "gallon"}
_PER_WORDS |= {"sq ft": "square foot", "ft": "foot", "m²": "square meter", "ea": "each"}
_THING_BEFORE = re.compile(r"\b(?:an?|one|each|every) $", re.IGNORECASE)
_NO_THING = "or to in of for and per wide tall long high deep thick on at an? is was were are from with by the that which as if each every"
_THING = re.compile(rf"(?: |-)(?!(?:{_NO_THING.replace(' ', '|')}|more|less)\b)[a-z]{{2,}}")
_KIND = re.compile(
    r"[ -](?:bulb|lamp|charger|battery|resistor|capacitor|engine|motor|run|race|walk|hike|drive|speaker|amplifier|monitor|radius|limit|file"
    r"|timeout|interval|delay|clip|window|countdown|timer|pipe|cable|rope|board|lens|magnet|dose|tablet|pill|bag|bottle|sprint|swim|shift|flight|warranty"
    r"|adapter|heater|panel|supply|disk|stick|card|module|screen|tank|bucket|weight|plate|dumbbell|ladder|pole|steak|glass|can|jar|mug|cup|burger|wall|fence|tower|pool|radio|signal)s?"
    r"(?![\w'-])"
)
"""Words after a size that names a kind: the 60 W bulb."""
_COIN = re.compile(
    r"[ -](?:bill|note|coin|ticket|bet|fine|meal|chip|voucher|coupon|gift card|banknote|token|check|cheque|fee|discount|rebate|prize"
    r"|deposit|tip|bottle|book|phone|shirt|lunch|dinner|deal|contract|loan|budget|fund|grant|investment|donation|bonus|refund|copay|deductible)s?\b"
)
_FRACTION_NAMES = {2: "half", 4: "quarter"}
_PARTS = frozenset((2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 20, 24, 25, 30, 32, 36, 40, 48, 50, 60, 64, 72, 80, 90, 100, 128, 1000))
_DAY = re.compile(
    r"\b(?:on|by|until|since|from|before|after|due|dated?"
    r"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,?|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[.,]{1,2}) $",
    re.IGNORECASE,
)


def _money(match: re.Match[str]) -> str:
    """A price in words, or a range of prices; two digits after the point are its small coins."""
    groups = match.groupdict()
    names = CURRENCIES[groups.get("code") or groups["sign"].rstrip(".")]
    one, many, small, _ = names
    number = parse_number(groups["number"])
    if one == "euro" and re.fullmatch(r"\d{1,3}\.\d{3}", groups["number"]):
        number = parse_number(groups["number"].replace(".", ","))
    short = groups.get("short") or groups.get("far")
    scale = groups.get("scale") or (_SCALES[short.lower()] if short else "")
    thing = _COIN.match(match.string, match.end()) or _is_kind(match)
    if groups.get("last"):
        words = f"{amount(number)} to {amount(groups['last'])} {scale} {many}".replace("  ", " ")
    elif scale:
        words = f"{amount(number)} {scale} {one if thing else many}"
    elif len(number.part) == 2 and small:
        words = _with_coins(number, names)
    else:
        words = f"{amount(number)} {one if number.is_one or thing else many}"
    per = groups.get("per")
    return f"{words} {'' if per == 'ea' else 'per '}{_PER_WORDS.get(per, per)}" if per else words


def _scaled_range(match: re.Match[str]) -> str:
    """A range of prices in thousands or millions: $5M-10M."""
    first, last = (f"{amount(match[number])} {_SCALES[match[scale].lower()]}" for number, scale in (("number", "first"), ("last", "short")))
    return f"{first} to {last} {CURRENCIES[match['sign']][1]}"


def _price_with_fraction(match: re.Match[str]) -> str | None:
    """A price with a fraction: $3 1/2. None if the fraction is not between 0 and 1."""
    over, under = FRACTIONS[match["part"]] if match["part"] else (int(match["over"]), int(match["under"]))
    if not 0 < over < under:
        return None
    part = "a half" if (over, under) == (1, 2) else fraction(over, under)
    return f"{amount(match['number'])} and {part} {CURRENCIES[match['sign']][1]}"


def _number_in_brackets(match: re.Match[str]) -> str | None:
    """A number in brackets below zero, as in accounts: a loss of ($5m). None where the brackets only set it apart."""
    front, rest = before(match, 60), after(match, 8)
    alone = not front.strip() and not rest.strip(" .,;")
    sign = match.groupdict().get("sign")
    if not awaits_figure(front) and not (sign and alone):
        return None
    return _negative_amount(match) if sign else f"minus {amount(match['number'])}"


def awaits_figure(text: str) -> bool:
    """Whether a number in brackets after this text is below zero."""
    return bool(_FIGURE_BEFORE.search(text) and _ACCOUNT.search(text[-40:]))


def _negative_amount(match: re.Match[str]) -> str:
    return f"minus {_money(match)}"


_FIGURE_BEFORE = re.compile(r"(?:[:=]|\b(?:of|was|is|were|are|to|from|at|by|vs\.?|versus|than|and|income|loss|profit|EPS|cash flow)) $")
_ACCOUNT = re.compile(
    r"\b(?:loss|losses|revenue|results?|change|equity|cash|income|profit|earnings|EPS|EBITDA|EBIT|deficit|margin|balance|variance|net)\b",
    re.IGNORECASE,
)


def _with_coins(number: WrittenNumber, names: tuple[str, str, str, str]) -> str:
    """A price with its small coins: 5.50 as "five dollars and fifty cents". names: as in CURRENCIES."""
    one, many, small_one, small_many = names
    coins = int(number.part)
    small = f"{cardinal(coins)} {small_one if coins == 1 else small_many}"
    if coins and not number.whole.strip("0"):
        return small
    large = f"{amount(number._replace(part=''))} {one if number.whole == '1' else many}"
    return f"{large} and {small}" if coins else large


def _is_kind(match: re.Match[str]) -> bool:
    """Whether the amount says what kind of thing follows: a 5 km run, a $20 ticket."""
    if _KIND.match(match.string, match.end()):
        return True
    return bool(_THING_BEFORE.search(before(match, 8)) and _THING.match(match.string, match.end()))


def _unit(match: re.Match[str]) -> str | None:
    """A number with its unit: 5 km. None if the letters are no unit."""
    number, unit = match.group("number"), match.group("unit")
    if unit in ("K", "T", "N", "J") and " " not in match.group():
        return None  # 4K and 2T are names.
    if is_mistaken(match):
        return None
    if is_many(match):
        return f"{amount(number)} million"
    if unit == "s" and match.group()[-2].isdecimal() and parse_number(number).part == "" and not are_seconds(match):
        return _plural_number(match)
    one, many = unit_names(unit)
    scale = f" {match['scale']}" if match["scale"] else ""
    written = parse_number(number)
    return f"{amount(written)}{scale} {one if (written.is_one and not scale) or _is_kind(match) else many}"


def _plural_number(match: re.Match[str]) -> str:
    """The plural of a number: iPhone 5s, two 6s, F-150s."""
    number = match["number"]
    written = parse_number(number)
    if re.search(r"[A-Za-z]-?$", before(match, 2)) and number.isdecimal():
        return plural(name(number))
    return plural((amount(written) if written.grouped or not number.isdecimal() else bare(number)).removeprefix("one ") or "one")


def _seconds(match: re.Match[str]) -> str | None:
    """Seconds that might be a decade: a 30s clip. None for a decade."""
    if not are_seconds(match) or _AGE_BEFORE.search(before(match, 16)):
        return None
    return count_words(match["number"], "second", "second" if _is_kind(match) or _LIMIT.match(after(match, 12)) else "seconds")


_AGE_BEFORE = re.compile(
    r"\b(?:under|over|late|early|mid|the|about|around|by|until|nearly|almost|than|only|just)[ -]$|(?:\d{4}s?|'\d0s)[-–]$", re.IGNORECASE
)
_LIMIT = re.compile(r" (?:timeout|limit|delay|interval|clip|video|pause|break|window|countdown|timer|deadline)\b")


def _percent(match: re.Match[str]) -> str | None:
    """A number with %, ‰ or ‱. None if the % is an operator."""
    if match["sign"] == "%" and is_modulo(match):
        return None
    return f"{amount(match['number'])} " + {"%": "percent", "‰": "per thousand", "‱": "per ten thousand"}[match["sign"]]


def is_modulo(match: re.Match[str]) -> bool:
    """Whether the % that ends a match is the operator: after a space if an operand follows (10 % 3), else in an equation before a digit."""
    rest = after(match, 12)
    spaced = (len(match.group()) == 1 and before(match, 1) == " ") or match.group()[-2:] == " %"
    if spaced:
        return bool(re.match(r" (?:\d{1,6}|[b-zB-HJ-Z]|\()(?![A-Za-z'-])", rest))
    return bool(re.match(r"\d", rest)) and in_equation(match)


def _degrees(match: re.Match[str]) -> str:
    """A temperature, or an angle with its minutes and seconds, in words."""
    words = [count_words(match["number"], "degree", "degree" if _is_kind(match) else "degrees")]
    for part in ("minute", "second"):
        if match[part]:
            words.append(count_words(match[part], part, f"{part}s"))
    scales = {"C": "Celsius", "F": "Fahrenheit", "K": "Kelvin", "N": "north", "S": "south", "E": "east", "W": "west"}
    return " ".join([*words, scales.get(match["scale"] or "", "")]).strip()


def _bare_degrees(match: re.Match[str]) -> str | None:
    """A temperature without its sign: 72F. None if the text is not about heat."""
    front, near = before(match, 24), before(match, 60) + "|" + after(match, 40)
    if awaits_letter(front.rstrip()) or _SEAT.search(front) or re.search(r"[A-Za-z]-?$", front):
        return None
    fahrenheit = match["scale"] == "F" and 20 <= int(match["number"]) <= 600
    celsius = match["scale"] == "C" and 40 <= int(match["number"]) <= 400
    if not (fahrenheit or celsius or _HEATED_TO.search(front) or _HEAT.search(near) or _OTHER_SCALE.search(near)):
        return None
    return f"{count_words(match['number'], 'degree', 'degrees')} {'Celsius' if match['scale'] == 'C' else 'Fahrenheit'}"


_HEAT = re.compile(
    r"\b(?:temperatures?|degrees|ovens?|bak(?:e|ed|ing)|preheat(?:ed)?|heat(?:ed|ing)?|hot|cold|cool(?:ed|er|s)?|warm(?:er|ed)?|weather"
    r"|highs?|lows?|freez\w+|boil\w*|fever|roast(?:ed)?|melts?|thermostat|sunny|rainy|cloudy|forecast|outside|outdoors)\b"
)
_HEATED_TO = re.compile(r"\b(?:at|to|above|below|around|reach(?:es|ed)?|hits?) $")
_OTHER_SCALE = re.compile(r"\d ?F or \||\d ?°[CF]\b|\d ?[CF] ?[/(|]+\|? ?\d|[/(|]+\d{1,3} ?[CF]\b")
_SEAT = re.compile(
    r"\b(?:seats?|gates?|rooms?|apartment|apt|unit|row|bus|class|block|door|section|flight|platform|table|type)[. ]+$", re.IGNORECASE
)


def _thousandth(match: re.Match[str]) -> str:
    """A number with k that is read as a letter: a 5k run."""
    return f"{amount(match['number'])} K"


def _feet(match: re.Match[str]) -> str | None:
    """Feet and inches: 5 ft 7 in. If the second number is 12 or more and a mark ends it, minutes and seconds. None: it is neither."""
    inches = match["inches"]
    if float(inches) >= 12:
        if match["part"] or not match.group().endswith(("'", '"')) or float(inches) >= 60:
            return None
        return f"{count_words(match['feet'], 'minute', 'minutes')} {count_words(inches, 'second', 'seconds')}"
    words = count_words(match["feet"], "foot", "feet")
    if match["part"]:
        return f"{words} {amount(inches)} and {fraction(*FRACTIONS[match['part']])} inches"
    return f"{words} {count_words(inches, 'inch', 'inches')}"


def _lone_feet(match: re.Match[str]) -> str | None:
    """Feet without inches: 6'. None if the mark ends a quotation or is no sign of feet."""
    return (
        None
        if _closes(match, _SINGLE) or before(match, 1) == "+" or after(match, 7) == " minute"
        else count_words(match["number"], "foot", "foot" if _is_kind(match) or _SIZED.match(after(match, 12)) else "feet")
    )


_SINGLE = re.compile(r"(?P<opens>(?<![^\s(\"“—-])'(?=\w|$))|(?<=[A-Za-z.,!?…)\"])'(?!\w)")
_DOUBLE = re.compile(r"(?P<opens>(?<![^\s('“—-])\"(?=[\w$£€'(.-]|$))|(?<=[^\s\d(])\"(?!\w)")
_THINGS = "screen|monitor|display|pipe|board|wheel|ladder|fence|wall|tube|nail|disk|frame|tire|pizza"
_SIZED = re.compile(rf" (?:{_THINGS})\b")
_SIZE = re.compile(rf"\b(?:inch|feet|foot|wide|tall|long|high|deep|thick|diameter|measures?|radius|{_THINGS})\b")
_SIZE_BEFORE, _SIZE_AFTER = re.compile(r"(?:\b[x×]|×|\bby) ?$"), re.compile(r" ?(?:[x×]|by\b) ?\d")
_SPEECH_BEFORE = re.compile(r"(?:\bam|'m|\bare|'re|\bI was) (?:[a-z]+ ){0,2}$")
_SPEECH_AFTER = re.compile(r",? (?:[A-Za-z]+ ){0,2}(?:said|says|asked|told|replied|answered|wrote|added|shouted|cried)\b")


def is_sized(text: str, begin: int, end: int) -> bool:
    """Whether the text around a mark after a number is about a size."""
    front, rest = text[max(begin - 60, 0) : begin], text[end : end + 40]
    return bool(
        _SIZE_BEFORE.search(re.sub(r"[\d.]+$", "", front))
        or _SIZE_AFTER.match(rest)
        or _SIZE.search(re.split(r"[.;!?] ", front)[-1] + re.split(r"[.;!?] ", rest)[0])
    )


def _closes(match: re.Match[str], marks: re.Pattern[str]) -> bool:
    """Whether the mark after a number ends a quotation: one is open, and no later mark ends it. If no opening mark is before it, the words
    around it decide. marks: a pattern for the marks that open or end a quotation, apart from marks after a digit."""
    front, rest = before(match, 200), after(match, 200)
    *_, last = (None, *marks.finditer(front))
    if last and last["opens"] is not None:
        following = marks.search(rest)
        ended = following is not None and following["opens"] is None
        return not (ended or _SIZE_AFTER.match(rest))
    if _SIZE_BEFORE.search(front) or _SIZE_AFTER.match(rest) or _is_kind(match) or _SIZE.search(front[-60:] + rest[:40]):
        return False
    if not front.strip("(\"'“ ") and rest[:1] == " " and not match.groupdict().get("over") and not _THING.match(rest):
        return True
    return bool(_SPEECH_BEFORE.search(front) or _SPEECH_AFTER.match(rest))


def _inches(match: re.Match[str]) -> str | None:
    """Inches in words; the singular before a thing: a 5-inch screen. None: the mark ends a quotation."""
    if _closes(match, _DOUBLE):
        return None
    if match["over"]:
        part = fraction(int(match["over"]), int(match["under"]))
        return f"{amount(match['number'])} and {part} inches" if match["number"] else f"{part} inch"
    return count_words(match["number"], "inch", "inch" if _is_kind(match) or _SIZED.match(after(match, 12)) else "inches")


def _by(match: re.Match[str]) -> str | None:
    """The word for the x between two numbers: "by" (3 x 4 m), but "times" in an equation or before a power of ten."""
    power = re.match(r" ?10[\^⁻⁰¹²³⁴-⁹]", after(match, 4))
    return "times" if in_equation(match) or power else "by"


def fraction(over: int, under: int) -> str:
    """A fraction in words: 2/3 as "two thirds"."""
    if under == 2:
        return "one half" if over == 1 else f"{cardinal(over)} halves"
    name = _FRACTION_NAMES.get(under) or ordinal(under)
    return f"{cardinal(over)} {name if over == 1 else plural(name)}"


def _fraction_of(match: re.Match[str]) -> str | None:
    """A fraction of a unit: 1/2 tsp. None if it is not between 0 and 1."""
    over, under = int(match["over"]), int(match["under"])
    if not (0 < over < under and match["under"][0] != "0"):
        return None
    return f"{fraction(over, under)} {unit_names(match['unit'])[0]}"


def _mixed_number(match: re.Match[str]) -> str | None:
    """A whole number with a fraction, and a unit if there is one: 2 1/2 cups. None if the fraction is not between 0 and 1."""
    over, under = int(match["over"]), int(match["under"])
    if not 0 < over < under:
        return None
    part = "a half" if (over, under) == (1, 2) else fraction(over, under)
    unit = f" {unit_names(match['unit'])[0 if _is_kind(match) else 1]}" if match["unit"] else ""
    return f"{amount(match['number'])} and {part}{unit}"


def _fraction_sign(match: re.Match[str]) -> str:
    """A fraction of one character, with a number before or a unit after it: 2½ cups."""
    over, under = FRACTIONS[match["sign"]]
    unit = f" {unit_names(match['unit'])[1 if match['number'] and not _is_kind(match) else 0]}" if match["unit"] else ""
    if not match["number"]:
        return fraction(over, under) + unit
    return f"{amount(match['number'])} and " + ("a half" if (over, under) == (1, 2) else fraction(over, under)) + unit


def _numbers_with_slash(match: re.Match[str]) -> str | None:
    """Two numbers with a slash: a fraction, a pair of numbers, or a quotient. None for a day."""
    over, under = match["over"], match["under"]
    one, other = int(over), int(under)
    if (over[0] == "0" or under[0] == "0") and not (over == "0" or under == "0"):
        return None
    is_day = 1 <= one <= 12 and 1 <= other <= 31 and len(over) <= 2
    is_european = 13 <= one <= 31 and 1 <= other <= 12
    if (is_day or is_european) and _DAY.search(before(match, 12)) and not in_equation(match) and not after(match, 4).startswith(" of"):
        return None
    if (one, other) in ((24, 7), (9, 11), (7, 11), (4, 20)) or (one == other and one > 10):
        return f"{cardinal(one)} {cardinal(other)}"
    if one == other and one > 0:
        return f"{cardinal(one)} out of {cardinal(other)}"
    equation = in_equation(match)
    if is_day and other > 12 and other not in (16, 20) and not equation:
        return None
    if re.match(r" (?:time|beat|meter|rhythm|split|rule|blend)\b", after(match, 8)):
        return f"{cardinal(one)} {cardinal(other)}"
    if other in (4, 5, 6, 10, 20, 100) and one <= other and awaits_score(before(match, 24)):
        return f"{cardinal(one)} out of {cardinal(other)}"
    if re.search(r"\b(?:[Pp]age|[Ss]lide|[Ss]tep|[Pp]art|[Tt]ask|[Ff]rame|[Cc]hunk|[Bb]atch|[Ee]poch|[Ll]evel) $", before(match, 8)):
        return f"{cardinal(one)} of {cardinal(other)}"
    if other in (5, 10) and re.match(" stars?", after(match, 6)):
        return f"{cardinal(one)} out of {cardinal(other)}"
    if 0 < one < other and (other in _PARTS or (equation and other < 100)):
        return fraction(one, other)
    if equation and one > other:
        return f"{cardinal(one)} divided by {cardinal(other)}"
    if other in range(2, 11) and one > other and one < 100 and not is_day:
        return fraction(one, other) if other not in (10,) else f"{cardinal(one)} over ten"
    if other in range(2, 5) and one > other:
        return fraction(one, other)
    if one == 1 and other and not is_day:
        return fraction(one, other)
    return None if is_day else f"{amount(over)} over {amount(under)}"


_SCORED = re.compile(
    r"\b(?:scor(?:e|es|ed|ing)|rat(?:e|es|ed|ing)|grade[ds]?|mark|gave|give|gives|got|gets?|earned|verdict|pain|solid|perfect|review)"
    r"(?: (?:it|is|was|of|as|at|this|them|him|her|an?|about|only|level)){0,2}:? $",
    re.IGNORECASE,
)


def awaits_score(text: str) -> bool:
    """Whether 8/10 after this text means "eight out of ten"."""
    return bool(_SCORED.search(text[-24:]))


_SIGNS = alternatives(sign for sign in CURRENCIES if not sign.isalpha() and sign != "¢")
_NAMES = alternatives(sign for sign in CURRENCIES if sign.isalpha() and sign != "Rs")
_CODES = alternatives(sign for sign in CURRENCIES if sign.isalpha() and sign.isupper() and len(sign) == 3)

MONEY: tuple[Form, ...] = (
    form(
        rf"(?<![A-Za-z])(?P<sign>{_SIGNS}) ?(?P<number>{NUMBER})(?P<first>{_SHORT})"
        rf"[-–](?P<last>{NUMBER})(?P<short>{_SHORT})(?!\w)",
        _scaled_range,
    ),
    form(
        rf"(?<![A-Za-z])(?P<sign>{_SIGNS}) ?(?P<number>\d{{1,4}}) ?(?:(?<= )(?P<over>\d)/(?P<under>\d{{1,2}})(?![\d/])|(?P<part>[½¼¾⅓⅔]))",
        _price_with_fraction,
    ),
    form(
        rf"(?<![A-Za-z])(?P<sign>{_SIGNS}|(?:{_NAMES}|Rs\.?)(?= ?\d)) ?(?P<number>{NUMBER})"
        rf"(?:[-–](?P<last>{NUMBER})(?!%|\d))?{_SCALE}(?:(?<=\d) (?P<code>{_CODES})\b)?{_PER}",
        _money,
    ),
)
PRICES: tuple[Form, ...] = (
    form(
        rf"(?P<sign>{_SIGNS})/(?P<unit>{UNIT})(?![\w²³])",
        lambda match: f"{CURRENCIES[match['sign']][1]} per {unit_names(match['unit'])[0]}",
    ),
)
"""Prices without a number: $/kg."""
NEGATIVES: tuple[Form, ...] = (
    form(rf"\((?P<sign>{_SIGNS}|(?:{_NAMES})(?= )) ?(?P<number>{NUMBER}){_SCALE}{_PER}\)", _number_in_brackets),
    form(rf"\((?P<number>{NUMBER})\)(?!\w)", _number_in_brackets),
)
"""Amounts in brackets, some of which are below zero."""
SIGNED_NEGATIVES: tuple[Form, ...] = (
    form(rf"(?P<sign>{_SIGNS}) ?[-−](?P<number>{NUMBER}){_SCALE}{_PER}", _negative_amount),
    form(rf"(?P<sign>{_SIGNS}) ?\((?P<number>{NUMBER}){_SCALE}{_PER}\)", _negative_amount),
)
TENS_OF_SECONDS: tuple[Form, ...] = (form(r"(?P<number>\d{0,2}0)s(?![\w'])", _seconds),)
QUANTITIES: tuple[Form, ...] = (
    form(rf"(?P<number>{NUMBER}){_SCALE} ?(?P<sign>(?:{_SIGNS}|¢)(?![\d.])|(?:{_NAMES})\b){_PER}", _money),
    form(rf"(?P<number>{NUMBER}) ?(?P<sign>[%‰‱])", _percent),
    form(r"(?P<number>\d{1,6}),[-–—](?![\w-])", lambda match: amount(match["number"])),
    form(r"20[-/]20(?= vision)", "twenty twenty"),
    form(r"(?P<number>\d{1,3}) ?(?P<scale>[CF])(?![\w°-])", _bare_degrees),
    form(r"(?P<number>\d{1,3})k(?=[ -](?:run|race|walk|jog|marathon|course|route|resolution|video|monitor|TV|display)\b)", _thousandth),
    form(
        rf"(?P<number>{NUMBER}) ?°(?: ?(?P<minute>\d{{1,2}})['](?: ?"
        r"(?P<second>\d{1,2}(?:\.\d+)?)(?:\"|''))?)?(?: ?(?P<scale>[CFKNSEW])\b)?",
        _degrees,
    ),
    form(r"(?P<feet>\d{1,3}) ?(?:ft|feet|foot)\.? (?P<inches>\d{1,2}(?:\.\d+)?)(?P<part>[½¼¾])? ?(?:in\b|inch(?:es)?\b)", _feet),
    form(r"(?P<feet>[3-8])ft(?P<inches>\d|1[01])(?P<part>(?!))?(?:in)?(?![\w']|[.,]\d)", _feet),
    form(r"(?<![A-WYZa-wyz\d_])(?P<number>\d{1,3})'(?=[ .,;)”]|[x×]\d|$)", _lone_feet),
    form(r"(?<![\w'.])(?P<feet>\d{1,3})'[ -]?(?P<inches>\d{1,2}(?:\.\d+)?)(?P<part>[½¼¾])?(?:\"|''|(?![\w']))", _feet),
    form(
        r"(?:(?P<number>\d{1,4}(?:\.\d+)?)(?: (?=\d+/)|-(?=\d+/)|(?=\")))?(?:(?P<over>\d{1,2})/(?P<under>\d{1,2}))?"
        r"(?<=\d)\"(?:(?!\w)|(?=x\d))",
        _inches,
    ),
    form(
        rf"(?P<number>{NUMBER})(?: (?P<scale>{SCALE_WORDS}))?[ -]?(?P<unit>{UNIT})(?![\w²³]|'[a-z])(?:(?<=[a-z])\.(?= [a-z\d(]|[,;]))?",
        _unit,
    ),
    form(r"(?P<number>\d{1,4}(?:\.\d{1,4})?) in\.(?= [a-z\d(×=]|[,;])", lambda match: count_words(match["number"], "inch", "inches")),
    form(
        r"(?P<number>\d{1,4})(?: |-)(?P<over>\d{1,2})/(?P<under>\d{1,3})(?:(?:st|nds?|rds?|ths?)\b)?(?![\d/])"
        rf"(?:[ -](?P<unit>{UNIT})(?![\w²³]|'[a-z]))?",
        _mixed_number,
    ),
    form(
        rf"(?:(?P<number>\d{{1,4}}(?! )|\d{{1,2}}(?= )) ?)?(?P<sign>[{''.join(FRACTIONS)}])(?:[ -]?(?P<unit>{UNIT})(?![\w²³]))?",
        _fraction_sign,
    ),
    form(
        r"(?P<over>\d{1,2})/(?P<under>\d{1,3})(?:(?<!\d)|(?:rds?|ths?|nds?)\b)(?<=[a-z])",
        lambda match: fraction(int(match["over"]), int(match["under"])) if int(match["under"]) > 1 else None,
    ),
    form(rf"(?P<over>\d{{1,2}})/(?P<under>\d{{1,3}})[ -](?P<unit>{UNIT})(?![\w²³]|'[a-z])", _fraction_of),
    form(
        r"(?P<over>\d{1,3}\.\d{1,2})/(?P<under>5|10|100)(?![\d/.])",
        lambda match: f"{amount(match['over'])} out of {amount(match['under'])}",
    ),
    form("24/7/365(?![\\d/])", "twenty four seven three sixty five"),
    form(r"(?<!\d/)(?P<over>\d{1,4})/(?P<under>\d{1,4})(?![\d/]|\.\d|[A-Za-z])", _numbers_with_slash),
)
SIZES: tuple[Form, ...] = (form(r"(?<=[\d'\"])x(?=\d)|(?<=[\dm'\"t] )x(?= ?\d)", _by),)
