"""Markdown to words, one character at a time: the text that a person would read aloud.

It works on the characters in their order and never on the pieces they came in, so the result does not depend on the pieces. Headings,
bullets, quotes, emphasis, rules and HTML tags lose their marks; a link keeps its text; code blocks are left out; the cells of a table are
separated by commas. The result has one line for each paragraph, heading, list item or row. Every character knows its place in the Markdown:
where it stands or, for a character that is not in the Markdown, the place of the mark that it replaces or follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from omnistage.models.smol.spoken.notations import Notations, escaped

MAX_LINK_TEXT = 200
MAX_LINK_TARGET = 1000
MAX_TAG = 100
MAX_LINE_MARK = 12

_BULLET = re.compile(r"[-*+•]\s")
_QUOTE = re.compile(r">")
_HEADING = re.compile(r"#{1,6}\s")
_FENCE = re.compile(r"(`{3,}|~{3,})")
_RULE = re.compile(r"(?:[-*_=]\s*){3,}")
_TABLE_RULE = re.compile(r"[|:\-\s]+")
_OPENERS = re.compile(r"!\[|[\[<]")
_AUTOLINK = re.compile(r"(?:https?|ftp)://\S+|mailto:\S+|\S+@\S+")


Placed = tuple[str, int]
"""A character and its place: how many characters of the Markdown come before it."""


class PlainText:
    """Converts one Markdown text. `feed` returns the characters whose reading is certain by then, `flush` returns the rest."""

    def __init__(self) -> None:
        self._notations = Notations(escaped)
        self._out: list[Placed] = []
        self._place = -1  # Place of the last character read.
        self._newest_place = 0  # Place of the last character given to `_read`; `_place` goes back where held characters are read again.
        self._put_place = 0  # Place of the last character put out.
        self._is_gap = False  # Whether marks were left out behind the last character put out.
        self._text_place = 0  # Place of the last character put out that is no space.
        self._cell_has_text = False
        self._state: Callable[[str], None] = self._line_start  # Reads the next character.
        self._mark = ""  # The beginning of a line whose kind is not clear yet.
        self._mark_place = 0  # Place of its first character.
        self._break = ""  # Put out before the next line: "\n" a line break, "" a line break or a space as the line decides, " " nothing.
        self._fence = ""  # The marks that opened a code block.
        self._is_row = False  # A row of a table.
        self._is_heading = False
        self._last = ""  # The last character put out.
        self._run = ""  # Equal marks (* _ ~ `) in a row, not ended yet.
        self._run_place = -1  # Place of the last of them.
        self._held_text = ""  # Characters that are held back until it is clear whether they are a link or tag.
        self._held_places: list[int] = []  # Place of each of them: all characters of a formula have that of the formula.

    def feed(self, text: str) -> list[Placed]:
        """Read more of the text; returns the characters that are certain now."""
        self._read(self._notations.feed(text))
        return self._take_certain()

    def flush(self) -> list[Placed]:
        """The text ends here: returns the rest. An open link or tag is read as text, an open code block is left out."""
        self._read(self._notations.flush())
        if self._state == self._fenced:
            return []
        self._place += 1
        self._state("\n")
        out = self._take_certain()
        return out[:-1] if out and out[-1][0] == "\n" else out

    def _read(self, placed: list[Placed]) -> None:
        """Read characters, each with its place in the text."""
        for character, place in placed:
            self._place = self._newest_place = place
            self._state(character)

    def _take_certain(self) -> list[Placed]:
        """Return the characters that are certain: in a table row a last space stays, because a comma may come before it."""
        tail_count = 1 if self._is_row and self._out and self._out[-1][0] == " " else 0
        out, self._out = self._out[: len(self._out) - tail_count], self._out[len(self._out) - tail_count :]
        return out

    def _replay(self, text: str, places: Sequence[int]) -> None:
        """Read characters that were held back. places: of each of them."""
        place_before = self._place
        for character, place in zip(text, places, strict=True):
            self._place = min(place, place_before)  # The words of a formula may be longer than the formula.
            self._state(character)
        self._place = place_before

    # Beginnings of lines ------------------------------------------------------------------------------------------------------------

    def _line_start(self, character: str) -> None:
        """Collect the beginning of a line until its kind is clear."""
        if character == "\n":
            self._blank_or_rule()
        elif not self._mark and character in " \t":
            pass
        elif character == "|" and not self._mark:
            self._new_line(structure=True)
            self._is_row, self._cell_has_text = True, False
            self._state = self._table_mark
        else:
            self._mark_place = self._mark_place if self._mark else self._place
            self._mark += character
            self._decide()

    def _blank_or_rule(self) -> None:
        """The line ends before its kind is clear: it is blank, a rule, or a few characters of text."""
        mark, self._mark = self._mark, ""
        if mark and not _RULE.fullmatch(mark):
            self._text_line(mark)
            self._state("\n")
            return
        self._is_heading = False
        if self._last:
            self._break = "\n"

    def _decide(self) -> None:
        """Act on the beginning of a line if its kind is clear now."""
        mark = self._mark
        if _FENCE.fullmatch(mark):
            self._fence = mark
            self._mark = ""
            self._state = self._fence_info
        elif _BULLET.fullmatch(mark) or _HEADING.fullmatch(mark):
            self._new_line(structure=True)
            self._is_heading = mark[0] == "#"
            self._mark = ""
            # The rest of "- [ ] task" or "- # heading" is read like the beginning of a line; the break before it was put out.
        elif _QUOTE.fullmatch(mark):
            self._mark = ""
        elif not self._may_grow(mark):
            self._text_line(mark)

    @staticmethod
    def _may_grow(mark: str) -> bool:
        """Whether more characters could make this beginning of a line a mark."""
        if len(mark) > MAX_LINE_MARK:
            return False
        return bool(re.fullmatch(r"[-*+•_=]|#{1,6}|`{1,2}|~{1,2}|([-*_=])(?:\s*\1)*\s*", mark))

    def _text_line(self, mark: str) -> None:
        """Begin a line of text with the characters `mark`, which were collected."""
        self._mark = ""
        self._new_line(structure=not mark[0].islower(), before=self._place - self._mark_place)
        self._state = self._body
        self._replay(mark, range(self._mark_place, self._mark_place + len(mark)))

    def _new_line(self, structure: bool, before: int = 0) -> None:
        """Put out the break before a line. structure: it begins a new line; else it may go on with a wrapped one. before: see `_put`."""
        if self._last and self._break != " ":
            self._put("\n" if structure or self._break == "\n" else " ", before)
        self._break = " "

    # Lines that are left out --------------------------------------------------------------------------------------------------------

    def _fence_info(self, character: str) -> None:
        """Skip the line that opens a code block: its first characters may still be part of the fence."""
        if character == "\n":
            self._state = self._fenced
        elif not self._mark and character == self._fence[0]:
            self._fence += character
        else:
            self._mark = "-"  # Other text: the fence is complete.

    def _fenced(self, character: str) -> None:
        """Skip a code block, up to a line that holds only the fence."""
        if character != "\n":
            self._held_text = (self._held_text + character)[: len(self._fence) + MAX_LINE_MARK]  # A longer line is no fence.
            return
        line, self._held_text = self._held_text.strip(), ""
        if line.startswith(self._fence) and not line.strip(self._fence[0]):
            self._end_line("\n")

    def _table_mark(self, character: str) -> None:
        """Skip a table row that holds only rules (| - :) so far."""
        if character == "\n":
            self._end_line("")
        elif not _TABLE_RULE.fullmatch(character):
            self._state = self._body
            self._state(character)

    # Text -----------------------------------------------------------------------------------------------------------------------------

    def _body(self, character: str) -> None:
        """Read a character of text, or begin the mark that it opens."""
        if self._run and character != self._run[0]:
            self._end_run(character)
        if character == "\n":
            self._end_line("")
        elif character in "*_~`":
            self._run, self._run_place = (self._run + character)[:4], self._place
        elif character == "\\":
            self._state = self._escaped
        elif character == "[":
            self._hold(character, self._link_text)
        elif character == "]":  # Part of a link around a picture.
            self._hold("[", self._after_link_text)
        elif character == "<":
            self._hold(character, self._tag)
        elif character == "!":
            self._hold(character, self._bang)
        elif character == "|" and self._is_row:
            self._cell()
        elif character in " \t":
            if not self._is_row or self._last != " ":
                self._put(" ")
        else:
            self._put(character)

    def _put(self, text: str, before: int = 0) -> None:
        """Put out a text. before: by how many characters its place is before the place of the character that was read last."""
        place = max(min(self._place - before, self._newest_place), self._put_place)
        if self._is_gap and self._last.isdigit() and text[0].isdigit():
            self._out.append((" ", place))  # Marks that are left out do not make one number of two.
        self._is_gap, self._put_place = False, place
        self._out += [(character, place) for character in text]
        self._last = text[-1]
        if not text[-1].isspace():
            self._text_place = self._place - before
            self._cell_has_text = self._is_row and text != ","

    def _hold(self, character: str, state: Callable[[str], None]) -> None:
        """Hold back this character and those after it, which `state` reads."""
        self._held_text, self._held_places = character, [self._place]
        self._state = state

    def _hold_on(self, character: str) -> None:
        """Hold back one more character."""
        self._held_text += character
        self._held_places.append(self._place)

    def _end_line(self, line_break: str) -> None:
        """End a line. line_break: what `_break` becomes; after a heading or a table row it becomes "\\n", whatever is given."""
        if self._is_row or self._is_heading:
            line_break = "\n"
        self._is_row = self._is_heading = False
        self._held_text = ""
        self._mark = ""
        self._break = line_break
        self._state = self._line_start

    def _end_run(self, following: str) -> None:
        """End a run of equal marks: emphasis and code marks vanish; an operator between two operands is read."""
        run, self._run = self._run, ""
        before, distance = self._last, self._place - self._run_place
        self._is_gap = True
        is_operator = (before == " " and following == " ") or (before.isdigit() and following.isdigit())
        if run == "*" and is_operator:
            self._put(" times " if before.isdigit() else "times", distance)
        elif run == "**" and is_operator:
            self._put("**", distance)
        elif run == "~" or (run == "_" and before.isalnum() and following.isalnum()):
            self._put(run, distance)

    def _cell(self) -> None:
        """End a table cell: put a comma after its text, before the last space, which was kept for that; none after an empty cell."""
        if not self._cell_has_text:
            return
        self._cell_has_text = False
        if self._last == " " and self._out:
            self._out.insert(-1, (",", self._text_place))
        elif self._last != ",":
            self._put(",", self._place - self._text_place)

    def _escaped(self, character: str) -> None:
        """Read the character after a backslash: there a punctuation mark is text, and no Markdown."""
        self._state = self._body
        if character.isalnum() or character.isspace():
            self._state(character)
        else:
            self._put(character)

    def _bang(self, character: str) -> None:
        """Read the character after "!": with "[" it begins a picture, whose description is read."""
        self._state = self._body
        if character != "[":
            self._put("!", self._place - self._held_places[0])
        self._state(character)

    def _link_text(self, character: str) -> None:
        """Read the text of a link, up to its "]"."""
        if character == "]":
            self._state = self._after_link_text
        elif self._held_text == "[!" and character == "[":
            self._hold("[", self._link_text)  # a picture in a link: its description is the text
        elif character == "\n" or len(self._held_text) > MAX_LINK_TEXT:
            self._release(1, character)
        else:
            self._hold_on(character)

    def _after_link_text(self, character: str) -> None:
        """Read the character after the "]": with "(" or "[" a target follows; without a target it was no link."""
        text = self._held_text[1:]
        if character in "([":
            self._release(1, "")
            self._hold(")" if character == "(" else "]", self._link_target)
        elif re.fullmatch(r"\^?\d{0,3}|[ xX]", text):
            self._release(len(self._held_text), character)  # a footnote mark or a box to tick
        else:
            self._release(1, character)

    def _link_target(self, character: str) -> None:
        """Skip the target of a link. `_held_text` begins with the character that closes it."""
        if character == self._held_text[0]:
            self._state = self._body
            self._is_gap = True
        elif character == "\n" or len(self._held_text) > MAX_LINK_TARGET:
            self._release(len(self._held_text), character)
        else:
            self._hold_on(character)

    def _tag(self, character: str) -> None:
        """Read on after "<": a tag is left out, an address is read, anything else was no tag."""
        tag = self._held_text
        if character == ">":
            if _AUTOLINK.fullmatch(tag[1:]):
                self._release(len("<mailto:") if tag.startswith("<mailto:") else len("<"), "")
            else:
                self._release(len(tag), " ")
        elif len(tag) == 1 and not (character.isalpha() or character in "/!"):
            self._state = self._body
            self._put("<", self._place - self._held_places[0])
            self._state(character)
        elif character in "\n<" or len(tag) > MAX_TAG:
            self._state = self._body
            self._put("<", self._place - self._held_places[0])
            self._release(1, character)
        else:
            self._hold_on(character)

    def _release(self, skipped: int, following: str) -> None:
        """Read the held characters as text after all, without the first `skipped`, then `following`. Openers of links and tags in them are
        left out, so that no character is held twice and the time is linear."""
        text, places, self._held_text = self._held_text, self._held_places, ""
        self._state = self._body
        self._is_gap = True
        for part in _between(text, skipped):
            self._replay(text[part], places[part])
        for character in following:
            self._state(character)


class AsGiven:
    """Does the work of PlainText for a text that is no Markdown: it takes no mark for one, and joins lines as PlainText does."""

    def __init__(self) -> None:
        self._notations = Notations()
        self._at = -1  # Place of the last character read.
        self._breaks = 0  # Line breaks since the last character of text.
        self._has_text = False

    def feed(self, text: str) -> list[Placed]:
        """Read more of the text; returns its characters."""
        return self._placed_of(self._notations.feed(text))

    def flush(self) -> list[Placed]:
        """The text ends here: returns what was held back."""
        return self._placed_of(self._notations.flush())

    def _placed_of(self, read: list[Placed]) -> list[Placed]:
        out = list[Placed]()
        for character, place in read:
            self._at = place
            out += self._placed(character)
        return out

    def _placed(self, character: str) -> Iterator[Placed]:
        """Yield the character, after a line break or a space if it begins a line. A line that begins with a small letter was wrapped."""
        if character == "\n":
            self._breaks += 1
        elif not self._breaks or not character.isspace():
            if self._breaks and self._has_text:
                yield " " if self._breaks == 1 and character.islower() else "\n", self._at
            self._breaks, self._has_text = 0, True
            yield character, self._at


def _between(text: str, first: int) -> Iterator[slice]:
    """Yield the parts of a text, from index `first` on, that are not the opening marks of a link, a picture or a tag."""
    for opener in _OPENERS.finditer(text, first):
        yield slice(first, opener.start())
        first = opener.end()
    yield slice(first, len(text))
