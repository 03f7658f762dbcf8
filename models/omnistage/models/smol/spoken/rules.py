"""The rules of written forms, which stand in the tables of this package: rows of rules.tsv say what is written, between which contexts, and
which words are said for it; other tables have lists of words and short forms. A line that begins with "# " is a remark. The text around
a form is read here too: what it says about the form."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

from omnistage.models.smol.spoken.numbers import amount, parse_number


def read_lines(name: str) -> Iterator[str]:
    """The lines of a table, without remarks."""
    text = files(__package__).joinpath("tables", name).read_text(encoding="utf-8")
    yield from (line for line in text.split("\n") if line and not line.startswith("# "))


def read_rows(name: str) -> Iterator[list[str]]:
    """The rows of a table, split at tabs."""
    yield from (line.split("\t") for line in read_lines(name))


def read_table(name: str) -> dict[str, str]:
    """A table of two columns: the words for each sign."""
    return {row[0]: row[1] for row in read_rows(name)}


def digest() -> str:
    """A hash of all tables: two voices whose tables differ pronounce a text differently."""
    tables = sorted(files(__package__).joinpath("tables").iterdir(), key=lambda table: table.name)
    return hashlib.sha256(b"".join(table.read_bytes() for table in tables)).hexdigest()[:12]


@functools.cache
def read_short_forms() -> dict[str, dict[str, str]]:
    """The table of abbreviations: for each kind, its short forms and their words."""
    forms = dict[str, dict[str, str]]()
    for kind, short, words in read_rows("abbreviations.tsv"):
        forms.setdefault(kind, {})[short] = words
    return forms


@functools.cache
def read_lists() -> dict[str, tuple[str, ...]]:
    """The lists of words, by name."""
    return {name: tuple(words.split()) for name, words in read_rows("words.tsv")}


# The text around a form --------------------------------------------------------------------------------------------------------------


def before(match: re.Match[str], characters: int) -> str:
    """The text before a match, at most `characters` long."""
    return match.string[max(match.start() - characters, 0) : match.start()]


def after(match: re.Match[str], characters: int) -> str:
    """The text after a match, at most `characters` long."""
    return match.string[match.end() : match.end() + characters]


_CLAUSE = re.compile(r"[;!?]|[.,:] |[A-Za-z]{3,}")
_RELATION = re.compile(r"[=≠≤≥≈]")


def in_equation(match: re.Match[str]) -> bool:
    """Whether a relation sign (= ≠ ≤ ≥ ≈) stands near the match, with no word of three letters and no end of a clause between."""
    return bool(_RELATION.search(_CLAUSE.split(before(match, 60))[-1]) or _RELATION.search(_CLAUSE.split(after(match, 60))[0]))


def alternatives(words: Iterable[str]) -> str:
    """A pattern that matches any of these words, the longest that fits."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


COUNT_FOLLOWS = re.compile(
    r" (?:of (?:us|them|you|these|those|the|my|our|his|her|their)\b(?! (?:same|following|next|previous) year)"
    r"|(?:people|(?:wo)?men|children|feet)\b"
    r"|(?!(?:was|is|has|as|this|his|its|us|does|across|unless|always|perhaps|sometimes|plus|minus|versus|yes|thus|besides|towards|afterwards"
    r"|regardless|less|marks|falls|begins|starts|ends|brings|comes|works|looks|remains|becomes|seems|means|sees|opens|closes|runs|goes|lies"
    r"|says|gives|takes|makes|shows|deals|lists|honors|celebrates|commemorates)\b)[a-z]{2,}(?<![su])s\b)"
)
"""Words after a number that counts things, as in "By May 20 people had come": plurals. Some words that end with s are verbs."""


_THING_BEFORE = re.compile(r"\b(?:an?|one|each|every) $", re.IGNORECASE)
_THING = re.compile(
    r"(?: |-)(?!(?:or|to|in|of|for|and|per|wide|tall|long|high|deep|thick|on|at|an?|is|was|are|were|from|with|by|the|that|which|as|if|each"
    r"|every|more|less)\b)[a-z]{2,}"
)
_KIND = re.compile(rf"[ -](?:{'|'.join(read_lists()['things'])})s?(?![\w'-])")
_MEASURE = re.compile(rf" (?:{'|'.join(read_lists()['sized things'])})s?\b")


def is_kind(match: re.Match[str]) -> bool:
    """Whether an amount says what kind of thing follows: a 5 km run, the 60 W bulb."""
    text, end = match.string, match.end()
    if _KIND.match(text, end) or _MEASURE.match(text, end):
        return True
    return bool(_THING_BEFORE.search(before(match, 8)) and _THING.match(text, end))


# The rules ---------------------------------------------------------------------------------------------------------------------------


MAX_CONTEXT = 48
"""How many characters before a form may decide about it."""
Say = Callable[[re.Match[str]], str | None]
"""Returns the words for a match: "" for a mark without a sound, None if the match is something else after all."""
Spell = Callable[[str], str | None]
"""Returns the words for a group of a match, or None as `Say`."""
_NAME = re.compile(r"\{([a-z][a-z -]*)\}")
_PIECE = re.compile(r"\[(?P<optional>[^\]]*)\]|\{(?P<group>\w+)(?::(?P<how>[^}]*))?\}")
_FIXED = re.compile(r"([!=])(\S+)")


class Rule(NamedTuple):
    """A rule. row: its line of the table. find: matches a text from the place where a form begins, with what follows. before: matches the
    text before it, or is None. equation: whether the form must stand in an equation or must not, or None. say: its words."""

    row: str
    find: Callable[[str, int], re.Match[str] | None]
    before: re.Pattern[str] | None
    equation: bool | None
    say: Say

    def words(self, match: re.Match[str]) -> str | None:
        """The words for a form that was found. None if what stands before it is not what the row wants."""
        place = match.start()
        if self.before and not self.before.search(match.string, max(place - MAX_CONTEXT, 0), place):
            return None
        if self.equation is not None and in_equation(match) != self.equation:
            return None
        return self.say(match)


@dataclass(frozen=True, slots=True)
class Names:
    """Things that the rows name. patterns: parts of patterns; the table adds its own. spellings: readings of one group. nouns: for a text,
    its singular and plural. functions: readings of a whole match."""

    patterns: dict[str, str]
    spellings: dict[str, Spell]
    nouns: dict[str, Callable[[str], tuple[str, str]]]
    functions: dict[str, Say]

    def expand(self, pattern: str) -> str:
        """A pattern with the named ones in their places."""
        return _NAME.sub(lambda match: f"(?:{self.patterns[match[1]]})", pattern)


def read_rules(table: str, names: Names) -> Iterator[tuple[list[str], Rule]]:
    """Read a table of rules: for each row the kinds of characters with which its form may begin, and the rule."""
    begins = list[str]()
    for line in read_lines(table):
        if line[0] == "@":
            name, pattern = line[1:].split("\t")
            names.patterns[name] = names.expand(pattern)
        elif "\t" in line:
            yield begins, _rule(line, names)
        elif line[0] == "[" and line[-1] == "]":
            begins = line[1:-1].split()
        else:
            raise ValueError(f"{table}: {line!r} is no row of four cells, no @name and no line in brackets")


def _rule(row: str, names: Names) -> Rule:
    """Compile a row."""
    before, form, after, words = row.split("\t")
    equation = None
    if before.startswith(("equation", "no equation")):
        equation = before.startswith("equation")
        before = before.removeprefix("no ").removeprefix("equation").lstrip()
    before, after = names.expand(before), names.expand(after)
    lookbehinds = "".join(f"(?<{sign}{part})" for sign, part in _FIXED.findall(before)) if before[:1] in ("!", "=") else ""
    if after:
        after = f"(?!{after[1:]})" if after[0] == "!" else f"(?={after})"
    context = re.compile(rf"(?:{before})$") if before and not lookbehinds else None
    return Rule(row, re.compile(lookbehinds + names.expand(form) + after).match, context, equation, _say(words, names))


def _say(words: str, names: Names) -> Say:
    """Returns the words of a row: a function of its whole match, or words with groups in them."""
    if words[:1] == "!":
        return names.functions[words[1:]]
    if "{" not in words:
        return lambda match: words
    pieces = list(_pieces(words, names))

    def say(match: re.Match[str]) -> str | None:
        parts = [piece(match) for piece in pieces]
        return None if None in parts else "".join(parts)  # type: ignore[arg-type]

    return say


def _pieces(words: str, names: Names) -> Iterator[Say]:
    """The pieces of a template, each a function of the match."""
    end = 0
    for match in _PIECE.finditer(words):
        yield _say_words(words[end : match.start()])
        yield _optional(match["optional"], names) if match["optional"] else _group(match["group"], match["how"], names)
        end = match.end()
    yield _say_words(words[end:])


def _say_words(words: str) -> Say:
    return lambda match: words


def _optional(words: str, names: Names) -> Say:
    """Words that are said if all groups in them are written."""
    groups = [piece["group"] for piece in _PIECE.finditer(words)]
    say = _say(words, names)
    return lambda match: say(match) if all(match[group] for group in groups) else ""


def _group(group: str, form: str | None, names: Names) -> Say:
    """The reading of a group. form: "foot/feet": the singular or the plural of a noun that the group counts. "unit of n": the noun that the
    group names, in the singular or the plural by the number in the group n. Else a name of `names.spellings`; None: an amount."""
    name: str | int = 0 if group == "all" else group
    if form and "/" in form:
        one, plural_noun = form.split("/")
        return lambda match: one if _is_single(match, name) else plural_noun
    if form and " of " in form and form not in names.spellings:
        noun, counter = form.split(" of ")
        # A noun is a pair: False is the index of its singular, True of its plural.
        return lambda match: names.nouns[noun](match[name])[not _is_single(match, 0 if counter == "all" else counter)]
    spell: Spell = names.spellings[form] if form else amount
    return lambda match: spell(match[name])


def _is_single(match: re.Match[str], number: str | int) -> bool:
    """Whether the noun that a group counts is in the singular: if the number is one, or if the noun names the kind of the next thing."""
    return (match[number][:1].isdecimal() and parse_number(match[number]).is_one and not match.groupdict().get("scale")) or is_kind(match)
