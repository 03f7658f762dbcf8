"""The phrases of a text: where they are cut, and with which phonemes each is spoken.

The cuts of a text that is still being written are a function of the characters alone, not of the pieces they arrive in: the cutter takes
one character after the other. Phonemes come from the lexicon and the out-of-vocabulary net of the package hibari-tts (Apache-2.0, no
espeak). The subpackage spoken turns written text into words; the package's own rules for numbers and signs are not used. The package
imports onnxruntime when the first word comes that is in no lexicon."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from omnistage.models.smol.plain_text import AsGiven, PlainText
from omnistage.models.smol.spoken.abbreviations import NUMBERED, SHORTS, WORDS_TOO
from omnistage.models.smol.spoken.characters import Quotation
from omnistage.models.smol.spoken.reader import is_open, read_phrase
from omnistage.models.smol.spoken.signs import SHORT_BOOKS
from omnistage.models.smol.spoken.times import DATE_NAMES, SHORT_DAYS, WEEKDAYS

FIRST_WORDS = 4
"""The first phrase is cut after this many whole words even without punctuation: the listener is waiting."""
PATIENCE = 2
"""Further words that a cut without punctuation waits for, rather than leave "of", "the" or a number at the end of a phrase."""
MIN_WORDS = 2
MAX_WORDS = 24
MAX_CHARACTERS = 200
LOOK_BACK = 20
"""How many spaces are tried for a cut in a text that is too long, beginning with the last."""

_CLOSERS = "\"'”’)]}»"
_OPENERS = "(\"'“‘["
_SENTENCE_ENDS = ".!?…"
_CLAUSE_ENDS = ",;:—–"
_FUNCTION_WORD_LIST = """
a an the of to in on at by for from with as is are was were be and or but that which who not no my your his her its our their this these
"""
_FUNCTION_WORDS = frozenset(_FUNCTION_WORD_LIST.split())
_OTHER_SHORTS = frozenset(("etc", "al"))
_UNITS = frozenset(("yrs", "hrs", "mins", "secs", "lbs", "tbsp", "tsp", "min", "max", "avg"))
"""Abbreviations that, unlike the others, end a sentence if a capital letter follows."""
_GO_ON = (SHORTS - NUMBERED.keys() - _UNITS) | _OTHER_SHORTS | frozenset((*SHORT_BOOKS, "Rs"))
_NUMERAL = re.compile(r"[IVXLivxl]+,?")
_RANGE_BEGINS = re.compile(
    rf"(?:\d[\d:.,]*(?:st|nd|rd|th|h)?|[ap]\.?m\.?|\d ?[A-Za-z]{{1,3}}|[½¼¾%°]|noon|midnight|{DATE_NAMES}\.?)$", re.IGNORECASE
)
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_WORD = re.compile(r"[^\W_]")
_LIST_NUMBER = re.compile(r"\d{1,3}[.)]")


class Pause(enum.Enum):
    """The kind of rest that follows a phrase."""

    NONE = "none"
    CLAUSE = "clause"
    SENTENCE = "sentence"
    PARAGRAPH = "paragraph"


@dataclass(frozen=True, slots=True)
class Phrase:
    """Text to be spoken in one breath, without line breaks. pause: the rest after it. places: the place of each character in the whole
    text, see Placed; empty for a phrase that comes from no text. Each quote, apostrophe and prime is written as `Quotation` says."""

    text: str
    pause: Pause
    places: tuple[int, ...] = field(default=(), compare=False)


class PhraseCutter:
    """Cuts one text into phrases: Markdown goes in, phrases of plain text come out. Symbols without a word (★★) make a phrase too, because
    characters that are not spoken are reported. ASCII symbols alone make none: they may be left over from Markdown. plain: the text is no
    Markdown. Formulas in LaTeX and characters of HTML are replaced by what they mean in both."""

    def __init__(self, plain: bool = False) -> None:
        self._is_plain = plain
        self._converter = AsGiven() if plain else PlainText()
        self._quotation = Quotation()
        self._text = ""
        self._places: list[int] = []
        self._words = 0  # Words begun in `_text`.
        self._in_word = False
        self._end: int | None = None  # Where the phrase ends, unless the next character goes on with it.
        self._pause = Pause.SENTENCE
        self._first = True  # No phrase with a word has been cut yet.

    def feed(self, text: str) -> Iterator[Phrase]:
        """Take more of the text; yield the phrases that are complete now."""
        for placed in self._converter.feed(text):
            yield from self._take(*placed)

    def flush(self) -> Iterator[Phrase]:
        """The text ends here: yield the rest."""
        for placed in self._converter.flush():
            yield from self._take(*placed)
        if self._end is not None:
            yield from self._cut_phrase(self._end, self._pause)
        last_mark = self._text.rstrip().rstrip(_CLOSERS)[-1:]  # Empty if the text has nothing else: "" is in every text.
        yield from self._cut_phrase(len(self._text), Pause.CLAUSE if last_mark and last_mark in _CLAUSE_ENDS else Pause.SENTENCE)

    def _take(self, character: str, place: int) -> Iterator[Phrase]:
        """Append a character of plain text; yield the phrase that it shows to be complete, if any."""
        if character == "\n":
            yield from self._cut_phrase(len(self._text), Pause.PARAGRAPH)
            return
        if self._end is not None and not character.isspace() and character not in _CLOSERS:
            end, self._end = self._end, None
            if not self._goes_on_with(character, end):
                yield from self._cut_phrase(end, self._pause)
        self._text += character
        self._places.append(place)
        if character.isspace():
            self._in_word = False
            yield from self._word_ended()
        elif _WORD.match(character) and not self._in_word:
            self._in_word = True
            self._words += 1
        if len(self._text) >= MAX_CHARACTERS:
            yield from self._cut_long()

    def _word_ended(self) -> Iterator[Phrase]:
        """A space has come: if a phrase ends before it, yield the phrase."""
        before = self._text.rstrip()
        word = before.rsplit(None, 1)[-1] if before else ""
        mark = word.rstrip(_CLOSERS)[-1:] or word[-1:]  # The last character within quotes and brackets.
        if not word or self._words == 0:
            return
        if mark in _CLAUSE_ENDS and self._words >= MIN_WORDS:
            self._end, self._pause = len(self._text), Pause.CLAUSE
            if not _may_go_on(word, before):
                yield from self._cut_phrase(self._end, self._pause)
        elif mark in _SENTENCE_ENDS and self._words >= MIN_WORDS and not _goes_on(word):
            self._end, self._pause = len(self._text), Pause.SENTENCE  # if a small letter follows, the sentence goes on
        elif self._is_long_after(word):
            yield from self._cut_phrase(len(self._text), Pause.NONE)

    def _goes_on_with(self, character: str, end: int) -> bool:
        """Whether the phrase goes on with this character, although a mark before it may have ended a sentence or a clause."""
        before = self._text[:end].rstrip()
        if self._pause is Pause.CLAUSE:
            if not before.endswith(","):
                beginnings = "JFMASONDTWnm$£€"  # Months, days, noon, midnight and prices begin so.
            elif before[:-1].rsplit(None, 1)[-1] in SHORT_DAYS:
                beginnings = "JFMASOND"  # Months begin so.
            else:
                beginnings = "IVXL"  # Numerals begin so.
            return character.isdecimal() or character in beginnings
        stem = before.rsplit(None, 1)[-1].removesuffix(".").lstrip(_OPENERS)
        # A numeral follows in `Fig. IV`, but not in `no. I think` or `a fig. It grew`: such abbreviations are words too.
        numeral = character in "IVX" and stem != "No" and (stem not in WORDS_TOO or stem[0].isupper())
        if stem in NUMBERED and (character.isdecimal() or character == "#" or numeral):
            return True
        return character.islower() or character in "=×+<>≤≥≈" or (stem in _UNITS and character.isdecimal())

    def _is_long_after(self, word: str) -> bool:
        """Whether to cut after this word without punctuation; never within words that are read as one, such as a number and its unit."""
        excess = self._words - (FIRST_WORDS if self._first else MAX_WORDS)
        return excess >= 0 and not is_open(self._text) and (excess >= PATIENCE or word.lower() not in _FUNCTION_WORDS)

    def _cut_long(self) -> Iterator[Phrase]:
        """Cut a phrase that is too long without a good place to cut: at the last space that is not inside words that are read as one, else
        at the last space, or right here in a text without spaces."""
        text = self._text.rstrip()
        spaces = [place for place, character in enumerate(text) if character == " "]
        free_spaces = [space for space in spaces[-LOOK_BACK:] if not is_open(text[:space])]
        yield from self._cut_phrase((free_spaces or spaces or [len(self._text)])[-1], Pause.NONE)

    def _cut_phrase(self, end: int, pause: Pause) -> Iterator[Phrase]:
        """Yield the text up to `end` as a phrase, unless it has nothing to say; keep the rest for the next one."""
        phrase, rest = self._text[:end].strip(), self._text[end:].lstrip()
        begin = end - len(self._text[:end].lstrip())  # Where the phrase begins in `_text`, after leading spaces.
        places = tuple(self._places[begin : begin + len(phrase)])
        self._text, self._places = rest, self._places[len(self._text) - len(rest) :]
        self._end = None
        self._words = len([word for word in self._text.split() if _WORD.search(word)])
        self._in_word = bool(self._text) and bool(_WORD.search(self._text.split()[-1])) and not self._text[-1].isspace()
        has_word = _WORD.search(phrase) is not None
        self._first = self._first and not has_word
        if has_word or not phrase.isascii() or (self._is_plain and phrase):
            yield Phrase(self._quotation.read(phrase), pause, places)
        if pause is Pause.PARAGRAPH:
            self._quotation.end()


def _may_go_on(word: str, before: str) -> bool:
    """Whether the mark at the end of a word may be within a list of numerals (I, II and III), before hours (Friday, 9 - 5) or in a range
    (9 AM – 5 PM), or before a code (PIN: 4521), so that no clause ends. before: the text up to the end of the word."""
    if word == "–":
        return _RANGE_BEGINS.search(before[:-1].rstrip()) is not None
    if word.endswith(":"):
        return is_open(before[:-1])
    return word.endswith(",") and (word[:-1] in WEEKDAYS or _NUMERAL.fullmatch(word) is not None)


def _goes_on(word: str) -> bool:
    """Whether the sentence goes on after this word, whatever follows: an abbreviation, an initial, the number of a list item."""
    if not word.endswith("."):
        return False
    stem = word[:-1].lstrip(_OPENERS)
    if stem in NUMBERED and len(stem) > 1:
        return False
    return stem in _GO_ON or bool(_INITIALS.fullmatch(stem)) or bool(_LIST_NUMBER.fullmatch(word))


# Phonemes ----------------------------------------------------------------------------------------------------------------------------


PAD = 0
MAX_PHONEMES = 400


@dataclass(frozen=True, slots=True)
class Reading:
    """How a text is spoken. normal: the words that are looked up in the lexicon. phonemes: their sounds, one letter for each; empty if
    nothing is spoken. starts: the index in `phonemes` at which each word begins, then the index of the end. borders, unspoken: see
    SpokenText. Unspoken characters have a meaning but no sound and no pause: letters of other scripts, emoji, signs without a word."""

    normal: str
    phonemes: str
    starts: tuple[int, ...]
    borders: tuple[tuple[int, int], ...] = ()
    unspoken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpokenRun:
    """Words of a text that are spoken as one. begin, end: indices of the words, as the text is split at spaces. first, last: indices of
    their letters in `Reading.phonemes`. `end` and `last` are exclusive."""

    begin: int
    end: int
    first: int
    last: int


class Phonemizer:
    """Turns English text into phoneme ids. symbols: the id of each phoneme letter. Not for use by two threads at once."""

    def __init__(self, symbols: Mapping[str, int]) -> None:
        from hibari.g2p import G2P

        # For words outside its lexicon the package loads onnxruntime, which otherwise reports to its maker over the network.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        self._g2p = G2P()
        self._symbols = dict(symbols)

    def read(self, text: str) -> Reading:
        """Read one phrase."""
        spoken_text = read_phrase(text)
        normal = spoken_text.text
        word_phonemes = [""]
        for token in self._g2p.phonemize_tokens(self._g2p.tokenize(normal)) if normal else ():
            word_phonemes[-1] += self._g2p.unk if token.phonemes is None else token.phonemes
            if token.whitespace:
                word_phonemes[-1] += " "
                word_phonemes.append("")
        phonemes = "".join(word_phonemes).lstrip()
        leading_spaces = sum(map(len, word_phonemes)) - len(phonemes)
        starts = tuple(max(place - leading_spaces, 0) for place in accumulate(map(len, word_phonemes), initial=0))
        phonemes = phonemes.rstrip()
        if not any(letter.isalpha() for letter in phonemes):
            phonemes = ""
        return Reading(normal, phonemes, starts, spoken_text.borders, spoken_text.unspoken)

    def ids(self, phonemes: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yield parts of at most MAX_PHONEMES letters: their ids, with a pad first and last, and the index of the letter of each id."""
        for begin, part in _parts(phonemes):
            places = [place for place, letter in enumerate(part, begin) if letter in self._symbols]
            yield [PAD, *(self._symbols[phonemes[place]] for place in places), PAD], places

    def runs(self, text: str, reading: Reading) -> Iterator[SpokenRun]:
        """Yield which words of a text sound at which letters of its reading. A word is a run of its own, unless a written form spans a
        space, such as a number with its unit."""
        words = text.split()
        for (begin, first), (end, last) in pairwise(reading.borders):
            letters = range(reading.starts[first], min(reading.starts[last], len(reading.phonemes)))
            sounds = [place for place in letters if reading.phonemes[place].isalpha() and reading.phonemes[place] in self._symbols]
            if sounds:
                # Marks alone, such as a dash, do not belong to the run, unless it has nothing else.
                indices = [word for word in range(begin, end) if any(map(str.isalnum, words[word]))] or range(begin, end)
                yield SpokenRun(indices[0], indices[-1] + 1, sounds[0], sounds[-1] + 1)


def _parts(phonemes: str) -> Iterator[tuple[int, str]]:
    """Yield pieces of at most MAX_PHONEMES letters, each after the index of its first letter; cut at spaces if there are any."""
    begin = 0
    while len(phonemes) - begin > MAX_PHONEMES:
        space = phonemes.rfind(" ", begin + 1, begin + MAX_PHONEMES)
        end = space if space > 0 else begin + MAX_PHONEMES
        yield begin, phonemes[begin:end]
        begin = len(phonemes) - len(phonemes[end:].lstrip())
    if begin < len(phonemes):
        yield begin, phonemes[begin:]
