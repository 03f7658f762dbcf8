"""Abbreviations, titles, and letters that are read one by one."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import COUNT_FOLLOWS, Form, alternatives, before, form, table
from omnistage.models.smol.spoken.numbers import LETTER_A, amount, cardinal, letters

TITLES = {
    "Mr": "Mister",
    "Mrs": "Missus",
    "Ms": "Miz",
    "Dr": "Doctor",
    "Prof": "Professor",
    "St": "Saint",
    "Mt": "Mount",
    "Lt": "Lieutenant",
    "Sgt": "Sergeant",
    "Capt": "Captain",
    "Cmdr": "Commander",
    "Cpl": "Corporal",
    "Msgr": "Monsignor",
}
"""Titles that stand before a name, with a full stop or without."""
DOTTED_TITLES = {
    "Ft": "Fort",
    "Gen": "General",
    "Gov": "Governor",
    "Sen": "Senator",
    "Rep": "Representative",
    "Col": "Colonel",
    "Rev": "Reverend",
    "Hon": "Honorable",
    "Pres": "President",
    "Supt": "Superintendent",
    "Maj": "Major",
    "Adm": "Admiral",
    "Fr": "Father",
    "Sr": "Senior",
    "Jr": "Junior",
    "Messrs": "Messrs",
}
_DOTTED = """
Jr Junior;Sr Senior;St Street;Mt Mount;Dr Drive;Ave Avenue;Blvd Boulevard;Rd Road;Ln Lane;Hwy Highway;Pkwy Parkway;Ste Suite;Apt Apartment
Bldg Building;Ltd Limited;Inc Incorporated;Corp Corporation;Co Company;Bros Brothers;Dept Department;dept department;Univ University
Assn Association;Govt Government;govt government;approx approximately;est established;vs versus;cf compare;ed edition;eds editors
avg average;max maximum;min minimum;misc miscellaneous;incl including;excl excluding;Prof Professor;Gen General;Gov Governor;Sen Senator
Rep Representative;Capt Captain;Lt Lieutenant;Col Colonel;Sgt Sergeant;Rev Reverend;Hon Honorable;Pres President;Atty Attorney
Jan January;Feb February;Mar March;Apr April;Jun June;Jul July;Aug August;Sep September;Sept September;Oct October;Nov November
Dec December
Mon Monday;Tue Tuesday;Tues Tuesday;Wed Wednesday;Thu Thursday;Thurs Thursday;Fri Friday;Sat Saturday;Sun Sunday;Mr Mister
Mrs Missus;Ms Miz;yrs years;hrs hours;mins minutes;secs seconds;lbs pounds;tbsp tablespoons;tsp teaspoons;Tel Telephone
tel telephone;Ext Extension;ext extension
"""
_NUMBERED = """
No Number;Nos Numbers;no number;nos numbers;Nr Number;p page;pp pages;P page;ch chapter;Ch Chapter;fig figure;Fig Figure
figs figures;Figs Figures;vol volume;Vol Volume;vols volumes;Vols Volumes;art article;Art Article;sec section;Sec Section;para paragraph
Para Paragraph;eq equation
Eq Equation;tab table;Tab Table;ver version;Ver Version;app appendix;App Appendix;ex example;Ex Example;op opus;Op Opus;Pt Part;pt part
c circa;ca circa;Rm Room;rm room;Rte Route;rte route
"""
_PLAIN = {
    "vs": "versus",
    "aka": "also known as",
    "AKA": "also known as",
    "BTW": "by the way",
    "YoY": "year over year",
    "MoM": "month over month",
    "QoQ": "quarter over quarter",
    "IMO": "in my opinion",
    "TBD": "to be determined",
}
_SLASHED = {
    "w/o": "without",
    "y/y": "year over year",
    "q/q": "quarter over quarter",
    "w/": "with",
    "b/c": "because",
    "c/o": "care of",
    "n/a": "not applicable",
    "N/A": "not applicable",
}


def _table(lines: str) -> dict[str, str]:
    return dict(entry.split(" ", 1) for entry in lines.strip().replace("\n", ";").split(";"))


DOTTED = _table(_DOTTED)
NUMBERED = _table(_NUMBERED)
WORDS_TOO = frozenset(table("no fig art app tab ex op sec No Fig Art App Tab Ex Op Sec"))
"""Abbreviations that may end a sentence, because they are words too."""
_LETTERED = frozenset(table("vol Vol vols Vols ch Ch pt Pt para Para pp"))
"""Abbreviations after which I may be a number, if a mark or the end follows it."""
SAYS = frozenset(
    table(
        "say says said answer answers answered reply replies replied shouted cried screamed whispered thought think voted vote meant means"
    )
)
_ANSWERS = re.compile(
    rf"(?:, ?|\b(?:{alternatives(SAYS)}|told (?:him|her|them|us|me|you)|(?:answer|vote) (?:is|was)|[a-z]+ly|firm|clear|flat|big|oh) )$",
    re.IGNORECASE,
)
"""Words before the answer "no"."""
_ONE_BEFORE = re.compile(r"\b(?:an?|one|my|his|her|our|their|modern|fine|this|that|the) $", re.IGNORECASE)
"""Words before a fig or an app that is no abbreviation."""
_SENTENCE_BEFORE = re.compile(r"(?:^|[.!?…][\"'”’)]* )[\"'“‘(]*$")
_COUNT_ENDS = re.compile(r"#?\d[\w.,/–-]*(?<![.,])(?:$|[^\w\s]| (?:and|or|to|&) \d)")
_STREET_BEFORE = re.compile(r"(?:\b[A-Z][a-z]+|\d(?:st|nd|rd|th)) $")
_SAINT_BEFORE = re.compile(
    r"\b(?:Mount|Port|Lake|Fort|Sault|Old|New|Saint|River|East|West|North|South|In|The|At|Near|From|To|And|On|Visit|Visiting|See|Love|Leave|Leaving|Tour|Explore"
    r"|Outside|Around|Historic|Downtown|Through|Via|For|With|By|When|Where|While|If|Is|Was|Are|Does|Did|After|Before|Since|Between|Like|Of|But)"
    r" $"
)


SENTENCE_BEGINS = re.compile(
    r"(?:The|An?|He|She|It|They|We|You|I|His|Her|Its|Their|Our|My|Your|This|That|These|Those|There|Here|Then|When|Where|What|Why|How|Which"
    r"|After|Before|Since|Until|During|While|Because|Although|Though|But|And|Or|So|If|As|For|From|With|Without|Was|Were|Did|Does|Has|Had|Later"
    r"|Now|Today|Next|Finally|However|Thus|Turn|Go|Take|Meet|Call)\b(?!-)"
)


def _title(match: re.Match[str]) -> str | None:
    """The word for a title before a name, or "Street" after one. None: it is read as it is written."""
    short = match["short"]
    front = before(match, 24)
    if short in ("St", "Dr", "Mt") and match["dot"] and SENTENCE_BEGINS.match(match.string, match.end()):
        return None  # Elm St. She did not.
    if short == "St" and _STREET_BEFORE.search(front) and not _SAINT_BEFORE.search(front):
        return "Street" if match["dot"] else None
    return TITLES.get(short) or DOTTED_TITLES.get(short)


def _is_star(match: re.Match[str]) -> bool:
    """Whether "Sun." is the star ("The Sun. It was hot.") and not Sunday."""
    front = before(match, 8)
    if re.search(r"\b(?:the|our|an?) $", front, re.IGNORECASE):
        return True
    begins = match.string[match.end() : match.end() + 1] == " " and SENTENCE_BEGINS.match(match.string, match.end() + 1)
    return (
        begins is not False and begins is not None and not re.search(r"\b(?:on|last|next|this|every|by|until|and|or|to) $|[-–,] ?$", front)
    )


def _dotted_abbreviation(match: re.Match[str]) -> str | None:
    """The words of an abbreviation with a full stop; the stop is kept if the text ends with it. None: it is read as it is written."""
    if match["short"] == "Sun" and _is_star(match):
        return None  # The star.
    goes_on = re.compile(r" [a-z]").match(match.string, match.end())
    if match["short"] == "Dr" and goes_on and not _STREET_BEFORE.search(re.sub(r"\b(?:The|A|My|Our|His|Her) $", "", before(match, 24))):
        return "Doctor"
    return DOTTED[match["short"]] + ("" if match.string[match.end() :].strip("\"'”’)") else ".")


def _numbered_abbreviation(match: re.Match[str]) -> str | None:
    """The word of an abbreviation before a number, "No. 3". None if a sentence ends there: "He said no. 3 of us left.", "No. I do not." """
    short, text = match["short"], match.string
    numeral = re.compile(r"[IVXivx]*\b").match(text, match.end())
    if numeral and numeral.group():
        if numeral.group() == "I":
            counts = short in _LETTERED and not re.compile(r" \w").match(text, numeral.end())
        else:
            begins = len(numeral.group()) == 1 or _SENTENCE_BEFORE.search(before(match, 4))
            counts = short not in ("No", "no") or "II" in numeral.group() or not begins
    elif short in WORDS_TOO and short.islower() and not _COUNT_ENDS.match(text, match.end()):
        number = re.compile(r"#?(?!1\b)\d[\w.,/–-]*").match(text, match.end())
        counted = number is not None and COUNT_FOLLOWS.match(text, number.end())
        counts = not (counted and not counted.group().startswith(" of the")) and not (_ANSWERS if short == "no" else _ONE_BEFORE).search(
            before(match, 16)
        )
    else:
        counts = True
    return NUMBERED[short] if counts else None


def _plain_abbreviation(match: re.Match[str]) -> str:
    return _PLAIN[match.group()]


def _slashed_abbreviation(match: re.Match[str]) -> str:
    return _SLASHED[match.group()]


def _as_written(match: re.Match[str]) -> str:
    return match.group()


def _joined_letters(match: re.Match[str]) -> str:
    """Spell letters around an ampersand: R&D, AT&T."""
    return " and ".join(letters(part) for part in match.group().split("&"))


LIVES = {"b": "born", "d": "died", "fl": "flourished", "r": "reigned"}
FUNCTIONS = {"sin": "sine", "cos": "cosine", "tan": "tangent", "log": "log", "ln": "log", "exp": "exponential", "sqrt": "the square root"}


def _war(match: re.Match[str]) -> str:
    return f"World War {cardinal(int(match['war']) if match['war'].isdecimal() else len(match['war']))}"


def _function(match: re.Match[str]) -> str:
    """A function of variables: f(x) as "f of x", f'(x) as "f prime of x"."""
    primes = {"": "", "'": " prime", "''": " double prime"}[match["primes"]]
    return f"{match['name']}{primes} of {' and '.join(amount(one) if one.isdecimal() else one for one in re.split(', ?', match['of']))}"


ABBREVIATIONS: tuple[Form, ...] = (
    form(r"(?<!\w)(?:[A-Za-z]\.){2,8}(?![A-Za-z]{2})", _as_written),
    form(rf"(?<![\w.])(?P<short>{alternatives(TITLES)})(?P<dot>\.?) (?=[A-Z])", _title),
    form(rf"(?<![\w.])(?P<short>{alternatives(DOTTED_TITLES)})(?P<dot>\.) (?=[A-Z][a-z])", _title),
    form(rf"(?<![\w.])(?P<short>{alternatives(NUMBERED)})\. ?(?=#?\d|(?!I(?:'| [a-z]|$))[IVXivx]+\b)", _numbered_abbreviation),
    form(rf"(?<![\w.'])(?P<short>{alternatives(DOTTED)})\.(?!\w)", _dotted_abbreviation),
    form(rf"(?<![\w.])(?:{alternatives(_PLAIN)})(?![\w.])", _plain_abbreviation),
    form(rf"(?<![\w./])(?:{alternatives(_SLASHED)})(?!/)", _slashed_abbreviation),
    form(r"(?<![\w.])v\.(?= [A-Z])", "versus"),
    form(r"(?<!\w)WW(?P<war>I{1,3}|[123])(?!\w)", _war),
    form(rf"(?<![\w.])(?P<short>{alternatives(LIVES)})\. ?(?=\d{{3,4}}\b)", lambda match: LIVES[match["short"]]),
    form(rf"(?<!\w)(?:{alternatives(FUNCTIONS)})(?=\()", lambda match: f"{FUNCTIONS[match.group()]} of"),
    form(r"(?<![\w&])[A-Z]{1,3}&[A-Z]{1,3}(?![\w&])", _joined_letters),
    form(r"(?<!\w)(?P<letter>[A-GJQ])#(?!\w)", lambda match: f"{letters(match['letter'])} sharp"),
    form(r"(?<!\w)[A-DF]-(?=[\s.,;!?)]|$)(?! [-–—\d])", lambda match: f"{letters(match.group()[0])} minus"),
    form(r"(?<!\w)(?P<name>[fghpquvFGHP])(?P<primes>'{0,2})\((?P<of>(?:[a-z]|\d{1,4})(?:, ?(?:[a-z]|\d{1,4})){0,3})\)", _function),
    form(r"(?<!\w)P\((?P<of>\w)\|(?P<when>\w)\)", lambda match: f"P of {letters(match['of'])} given {letters(match['when'])}"),
    form(r"(?<!\w)(?:CO|NO|SO|CH)(?=[2-4](?!\w))", lambda match: letters(match.group())),
    form(r"(?<!\w)A(?=-?\d)", LETTER_A),
)
SHORTS = frozenset((*TITLES, *DOTTED_TITLES, *DOTTED, *NUMBERED, *_PLAIN, "WWI", "WWII", "WWIII", *FUNCTIONS))
