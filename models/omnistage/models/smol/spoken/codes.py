"""Digits that are no amount: telephone numbers, addresses of machines, versions, models, codes; and numbers that no other form reads."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import Form, after, before, form, in_equation, table
from omnistage.models.smol.spoken.numbers import NUMBER, ONES, amount, bare, cardinal, digits, letters, name, ordinal, parse_number, plural

_SECRET_WORDS = """
zip zipcode postcode postal pin code passcode password ext extension account acct serial id dial ending digits otp tracking confirmation
case ticket invoice badge license licence passport routing membership ssn isbn issn upc sku imei combination phone tel telephone fax
mobile cell plate cvv cvc cvn
"""
_PLACE_WORDS = (
    "room rm suite apartment apt unit flight highway hwy route rte interstate bus gate boeing airbus porsche bay locker channel hotel"
)
_VERSION_WORDS = """
version versions ver release python java php ruby perl ios ipados macos android windows ubuntu debian fedora kernel linux node cuda django
react chrome firefox numpy torch pytorch tensorflow llama claude gemini qwen gcc clang go rust swift kotlin dotnet openssl postgres
postgresql mysql redis docker kubernetes protobuf grpc section
"""
SECRET = frozenset(_SECRET_WORDS.split())
PLACE = frozenset(_PLACE_WORDS.split())
VERSION = frozenset(_VERSION_WORDS.split())
LEADERS = SECRET | PLACE | VERSION
_LAST_WORDS = re.compile(r"([A-Za-z]+)\.?(?: (?:number|no\.?|numbers|code|is|was|in|are|type|[A-Z]{2,3}))*[:#]?(?: ?#)?[ -]$")
_STREET = re.compile(
    r"[A-Z]?(?: [NSEW]\.?)?(?: (?!The\b)[A-Z][A-Za-z']{1,20}){1,3}"
    r" (?:Street|St|Avenue|Ave|Road|Rd|Drive|Lane|Ln|Boulevard|Blvd|Court|Ct|Terrace|Place|Way|Highway|Hwy|Square|Parkway|Pkwy)\b"
)
"""Words after the number of a house."""
STATES = frozenset(
    table(
        "AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND OH OK OR PA RI SC SD TN TX"
        " UT VT VA WA WV WI WY DC PR"
    )
)
STATE_BEFORE = re.compile(rf"\b(?:{'|'.join(sorted(STATES))}),? $")
"""Words before a postal code."""
_EMERGENCY = re.compile(r"\b(?:call|calls|called|calling|dial|dialed|dialled|text|phone|ring)\b[^.;!?]{0,8}$", re.IGNORECASE)


def _leader(match: re.Match[str]) -> str:
    return _leader_of(before(match, 48))


def _leader_of(text: str) -> str:
    """The word of LEADERS that decides how the digits after this text are read, the last if there are several; empty if there is none."""
    found = _LAST_WORDS.search(text)
    words = re.findall("[a-z]+", found.group().lower()) if found else []
    return next((word for word in reversed(words) if word in LEADERS), "")


def _grouped_digits(match: re.Match[str]) -> str:
    """Read groups of digits digit by digit, with a rest between two groups."""
    groups = re.findall(r"\d+|X$", match.group())
    said = ", ".join(digits(group) or "X" for group in groups)
    return f"plus {said}" if match.group()[0] == "+" else said


def _machine(match: re.Match[str]) -> str | None:
    """An IPv4 address: 192.168.1.1:8080/24. None if a part is above 255."""
    if any(int(part) > 255 for part in match["host"].split(".")):
        return None
    words = " dot ".join(cardinal(int(part)) for part in match["host"].split("."))
    if match["port"]:
        words += f" port {amount(match['port'])}"
    return words + (f" slash {amount(match['mask'])}" if match["mask"] else "")


def _hardware(match: re.Match[str]) -> str:
    """Read the address of a network card or a UUID sign by sign."""
    return ", ".join(
        " ".join(ONES[int(one)] if one.isdecimal() else one.upper() for one in pair) for pair in re.split("[:-]", match.group())
    )


def _colons(match: re.Match[str]) -> str | None:
    """An IPv6 address, sign by sign: fe80::1/64. None if it has no digit, or neither :: nor eight groups."""
    host = match["host"]
    if not (re.search(r"\d", host) and ("::" in host or host.count(":") == 7)):
        return None
    words = " ".join("colon" if one == ":" else ONES[int(one)] if one.isdecimal() else letters(one) for one in host)
    if match.groupdict().get("port"):
        words += f" port {amount(match['port'])}"
    return words + (f" slash {amount(match['mask'])}" if match.groupdict().get("mask") else "")


def _version(match: re.Match[str]) -> str:
    """A version in words, with its label: v1.2-rc.1 as "version one point two R.C. one"."""
    said = " point ".join(digits(part) if part[0] == "0" and len(part) > 1 else amount(part) for part in match["number"].split("."))
    label = match.groupdict().get("label")
    if label:
        said += f" {_label(label)}"
    if match.groupdict().get("v") == "V" and match["number"].isdecimal() and not label:
        return f"V {said}"  # An engine, a rocket.
    return f"version {said}" if match.groupdict().get("v") else said


def _label(text: str) -> str:
    """The label of a version: -rc.1 as "R.C. one", +build.5 as "plus build five"."""
    words = []
    for piece in re.findall(r"[A-Za-z]+|\d+|[+]", text):
        if piece.isdecimal():
            words.append(name(piece))
        elif piece == "+":
            words.append("plus")
        else:
            words.append(letters(piece) if len(piece) < 3 or not re.search("[aeiouy]", piece, re.IGNORECASE) else piece)
    return " ".join(words)


def _grouped_number(match: re.Match[str]) -> str:
    """1.234.567 in words: a version after a word such as Python, else a number whose points group its digits."""
    return _version(match) if _leader(match) in VERSION else amount(match.group())


def _known_version(match: re.Match[str]) -> str | None:
    """A version after the name of a program: Python 3.12. None elsewhere."""
    return _version(match) if _leader(match) in VERSION else None


def _scientific_number(match: re.Match[str]) -> str:
    sign = "minus " if match["sign"] in ("-", "−") else ""
    return f"{amount(match['number'])} times ten to the power of {sign}{amount(match['power'].lstrip('0') or '0')}"


def _number_of_base(match: re.Match[str]) -> str:
    """A number of base 16, 2 or 8, digit by digit: 0x1F, 0b1010, 0o17."""
    return f"zero {match['base'].lower()} " + " ".join(ONES[int(one)] if one.isdecimal() else letters(one) for one in match["digits"])


def _aircraft(match: re.Match[str]) -> str:
    series = name(match["series"])
    return f"{name(match['number'])} {plural(series) if match['many'] else series}"


def _ordinal(match: re.Match[str]) -> str | None:
    """An ordinal in words: 22nd. None for more than 15 digits, or for digits after a point."""
    number = parse_number(match["number"])
    return ordinal(int(number.whole)) if len(number.whole) <= 15 and not number.part else None


def _times_as(match: re.Match[str]) -> str | None:
    """A number before x: "three times" in 3x faster, "three x" in 3x - 2y."""
    following = after(match, 3)
    if re.match("/[a-z]{2}", following):
        return f"{amount(match['number'])} times"
    if in_equation(match) or re.match(r" ?[-+*/^=−²³<>·×÷]", following) or re.search(r"[-+*/^=−<>·×÷] ?$", before(match, 2)):
        return f"{amount(match['number'])} x"
    return f"{amount(match['number'])} times"


def _millions(match: re.Match[str]) -> str:
    scales = {"M": "million", "B": "billion", "bn": "billion", "mn": "million", "tn": "trillion", "Bn": "billion", "k": "thousand"}
    return f"{amount(match['number'])} {scales[match['scale']]}"


def _list(match: re.Match[str]) -> str | None:
    """Numbers with commas between them: 1,2,3. None if the commas group digits."""
    if parse_number(match.group()).grouped:
        return None
    return ", ".join((bare(part) if part.isdecimal() else amount(part)) for part in match.group().split(","))


def _places(match: re.Match[str]) -> str:
    """1,2-dichloroethane: the numbers of atoms, one by one."""
    return " ".join(cardinal(int(part)) for part in match.group().split(","))


def _plain_number(match: re.Match[str]) -> str:
    """A number by itself: the text before it decides how its digits are read."""
    text = match.group()
    if not text.isdecimal():
        return amount(text)
    front = before(match, 1)
    leader = _leader(match)
    if (leader in SECRET and len(text) > 2) or (len(text) == 5 and STATE_BEFORE.search(before(match, 5))):
        return digits(text)
    if text in ("911", "999", "411", "112", "311", "511", "988") and (_EMERGENCY.search(before(match, 40)) or front == "("):
        return digits(text)
    if (leader in PLACE and len(text) <= 4) or (len(text) == 3 and _STREET.match(match.string, match.end())):
        return name(text)
    if text == "911":
        return digits(text)
    if len(text) == 4 and in_equation(match):
        return amount(text)
    if re.search(r"[A-Za-z]-?$|(?<![A-Za-z])[A-Z]\.$", before(match, 3)) and len(text) <= 4:
        return name(text)
    return bare(text)


def _digits_and_letters(match: re.Match[str]) -> str:
    """Digits and the letters after them: 5G, 3D, 747s."""
    number, tail = match["number"], match["letters"]
    named = re.search(r"[A-Za-z]$", before(match, 1)) or _STREET.match(match.string, match.start("letters"))
    said = name(number) if len(number) <= 4 and named else bare(number)
    if tail in ("s", "th", "rd", "nd", "st"):
        return plural(said) if tail == "s" else f"{said} {tail}"
    if len(tail) <= 3 and (tail.isupper() or len(tail) == 1):
        return f"{said} {letters(tail)}" if tail.isupper() else f"{said} {tail}"
    return f"{said} {tail}"


_PHONES = (
    r"\+?\d{1,3}[ .-]\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}",
    r"(?=\+(?:[ .()-]{0,2}\d){7})\+\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){1,6}",
    r"00[1-9]\d{0,2}(?: \d{2,6}){2,5}",
    r"\(\d{2,5}\) ?\d{3,4}[ .-]?\d{3,4}",
    r"\d{3}[ .-]\d{3}[ .-]\d{4}",
    r"\d{3}-\d{4}",
    r"0\d(?:[ .]\d\d){4}",
    r"0\d{2,4}[ -]\d{3,4}[ -]?\d{3,4}",
    r"0\d{2,4}[ /-]\d{5,8}",
    r"\d{4}(?:[ -]\d{4}){3}",
    r"\d{4} \d{6} \d{5}",
    r"\d{3}-\d{2}-\d{4}",
    r"\d{5}-\d{4}",
    r"97[89][ -]\d{1,5}(?:[ -]\d{1,7}){2}[ -][\dX]",
    r"\d{1,7}-\d{1,7}-\d{1,7}(?:-\d{1,7}){0,4}(?:-X)?",
)
_BYTE = r"[0-9A-Fa-f]{2}"
_MARKED_LABEL = r"[-+](?![vV]\d)[A-Za-z][0-9A-Za-z]{0,40}(?:[.-][0-9A-Za-z]{1,40}){0,6}"
_LABEL = (
    rf"(?P<label>(?:{_MARKED_LABEL}|-\d{{1,5}}-(?=[A-Za-z])[0-9A-Za-z-]{{1,40}}|[.-]?(?:a|b|c|rc|alpha|beta|dev|post|pre)\d{{1,4}})?"
    r"(?:\+[0-9A-Za-z]{1,40}(?:[.-][0-9A-Za-z]{1,40}){0,6})?)(?![0-9A-Za-z])"
)
"""Suffixes of a version: -beta.4, a1, .dev3, +build.5."""
HARDWARE: tuple[Form, ...] = (
    form(rf"(?<![\w:]){_BYTE}(?:([:-]){_BYTE})(?:\1{_BYTE}){{4}}(?![\w:])", _hardware),
    form(r"(?<![\w-])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![\w-])", _hardware),
)
_GROUPS = r"(?P<host>(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4})"
MACHINES: tuple[Form, ...] = (form(rf"(?<![\w:]){_GROUPS}(?:/(?P<mask>\d{{1,3}}))?(?![\w:])", _colons),)
BRACKETED: tuple[Form, ...] = (form(rf"\({_GROUPS}\):(?P<port>\d{{1,5}})(?!\d)", _colons),)
PHONES: tuple[Form, ...] = tuple(form(rf"(?<![\w.]){pattern}(?![\w]|[.,:-]\d)", _grouped_digits) for pattern in _PHONES)
CHARACTER_CODES: tuple[Form, ...] = (
    form(
        r"(?<!\w)U\+(?P<digits>[0-9A-F]{4,6})(?!\w)",
        lambda match: "U plus " + " ".join(ONES[int(one)] if one.isdecimal() else letters(one) for one in match["digits"]),
    ),
)
V_VERSIONS: tuple[Form, ...] = (form(rf"(?<![\w'])(?P<v>[vV])\.?(?P<number>\d{{1,6}}(?:\.\d{{1,8}}){{0,6}})(?!\d)(?:{_LABEL})?", _version),)
NAMES: tuple[Form, ...] = (
    form(r"(?P<host>\d{1,3}(?:\.\d{1,3}){3})(?!\.?\d)(?::(?P<port>\d{1,5}))?(?:/(?P<mask>\d{1,2}))?", _machine),
    *PHONES,
    form(r"(?<![\w.-])(?:1-)?\d{3}-(?=[A-Z]{4,8}\b)", _grouped_digits),
    form(r"\d{2,4}(?: \d{2,4}){1,5}(?!\w|[.,:-]\d)", lambda match: _grouped_digits(match) if _leader(match) in SECRET else None),
    form(r"802\.(?P<number>\d{1,2})(?!\d)", lambda match: f"eight oh two dot {cardinal(int(match['number']))}"),
    form(r"(?P<number>7[0-8]7)-(?P<series>\d{1,3})(?!\d)(?P<many>s\b)?", _aircraft),
    form(rf"(?P<number>{NUMBER})[eE](?P<sign>[-+−]?)(?P<power>\d{{1,3}})(?!\w)", _scientific_number),
    form(r"0(?P<base>[xX]|[bB](?=[01]{1,80}\b)|[oO](?=[0-7]{1,80}\b))(?P<digits>[0-9A-Fa-f]{1,80})\b", _number_of_base),
)
PLAIN: tuple[Form, ...] = (
    form(r"24[x×]7(?!\w)", "twenty four seven"),
    form(r"(?P<number>\d{1,4}(?:\.\d{1,4}){0,2})\.x(?!\w)", lambda match: f"{_version(match)} point x"),
    form(r"\d{1,2}(?:,\d{1,2}){1,3}(?=-(?:(?:di|tri|tetra)[a-z]{4}|[a-z]{0,20}(?:ane|ene|yne|[dtr]iol|amine|anone|yl|oic)\b))", _places),
    form(r"(?P<number>\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:st|nd|rd|th)\b", _ordinal),
    form(r"(?P<number>\d{1,3}(?:\.\d{3}){2,5})(?!\d|[.,]\d)", _grouped_number),
    form(rf"(?P<number>\d{{1,6}}(?:\.\d{{1,8}}){{2,8}})(?!\d|,\d)(?:{_LABEL})?", _version),
    form(rf"(?P<number>\d{{1,4}}\.\d{{1,4}})(?!\.?\d)(?:{_LABEL})?", _known_version),
    form(r"(?P<number>\d{1,4}\.\d{1,4})(?P<label>(?:rc|alpha|beta|[ab](?=\d))\d{1,4})(?![0-9A-Za-z])", _version),
    form(rf"(?P<number>{NUMBER})x(?![\w'])", _times_as),
    form(rf"(?P<number>{NUMBER})(?P<scale>[MB]|bn|mn|tn|Bn|k)(?= [a-z])", _millions),
    form(r"\d{1,4}(?:,\d{1,4}){2,}(?!\d|\.\d)", _list),
    form(r"(?<=\()\d{1,4}(?:\.\d{1,4})?(?:,\d{1,4}(?:\.\d{1,4})?){1,8}(?=\))", _list),
    form(r"(?P<number>\d+)(?P<letters>(?!x\d)[A-Za-z]{1,12})(?![A-Za-z'])", _digits_and_letters),
    form(NUMBER, _plain_number),
)


def awaits_digits(text: str) -> bool:
    """Whether the last words of this text decide how digits after it are read."""
    return bool(_leader_of(text[-48:] + " ") or _EMERGENCY.search(text[-24:] + " "))
