"""The machine that reads written forms: rows of a table say what is written, between which contexts, and which words are said for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from omnistage.models.smol.spoken.form import in_equation, is_kind
from omnistage.models.smol.spoken.numbers import amount, parse_number
from omnistage.models.smol.spoken.tables import read_lines

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
    equation = True if before.startswith("equation") else False if before.startswith("no equation") else None
    before = names.expand(before.removeprefix("no ").removeprefix("equation").lstrip() if equation is not None else before)
    fixed = "".join(f"(?<{sign}{part})" for sign, part in _FIXED.findall(before)) if before[:1] in ("!", "=") else ""
    after = names.expand(after)
    if after:
        after = f"(?!{after[1:]})" if after[0] == "!" else f"(?={after})"
    context = re.compile(rf"(?:{before})$") if before and not fixed else None
    return Rule(row, re.compile(fixed + names.expand(form) + after).match, context, equation, _say(words, names))


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
        yield _written(words[end : match.start()])
        yield _optional(match["optional"], names) if match["optional"] else _group(match["group"], match["how"], names)
        end = match.end()
    yield _written(words[end:])


def _written(words: str) -> Say:
    return lambda match: words


def _optional(words: str, names: Names) -> Say:
    """Words that are said if all groups in them are written."""
    groups = [piece["group"] for piece in _PIECE.finditer(words)]
    say = _say(words, names)
    return lambda match: say(match) if all(match[group] for group in groups) else ""


def _group(group: str, form: str | None, names: Names) -> Say:
    """The reading of a group; or the noun that it counts, "foot/feet"; or, for "unit of n", the unit as the group n asks for."""
    name: str | int = 0 if group == "all" else group
    if form and "/" in form:
        one, plural_noun = form.split("/")
        return lambda match: one if _is_single(match, name) else plural_noun
    if form and " of " in form and form not in names.spellings:
        noun, counter = form.split(" of ")
        return lambda match: names.nouns[noun](match[name])[not _is_single(match, 0 if counter == "all" else counter)]
    spell: Spell = names.spellings[form] if form else amount
    return lambda match: spell(match[name])


def _is_single(match: re.Match[str], number: str | int) -> bool:
    """Whether the noun that this group counts is in the singular: after one, and before a thing of which it names the kind."""
    return (match[number][:1].isdecimal() and parse_number(match[number]).is_one and not match.groupdict().get("scale")) or is_kind(match)
