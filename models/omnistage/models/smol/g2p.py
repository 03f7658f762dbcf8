"""Phrases to phoneme ids, with the rules, lexicon and out-of-vocabulary net of the package hibari-tts (Apache-2.0, no espeak).

The package reads numbers, years, dates, times, money, units and common abbreviations; this file brings text into the form it expects.
Onnxruntime is imported by the package when the first word that is in no lexicon comes.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

PAD = 0
MAX_PHONEMES = 400
MAX_DIGITS = 12
"""A longer run of digits is a name, not an amount: it is read digit by digit."""

_URL = re.compile(r"(?:(?:https?|ftp)://|www\.)([^\s/?#]+)[^\s]*?(?=[.,;:!?)\]\"']*(?:\s|$))", re.IGNORECASE)
_ADDRESS = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+|\b(?:[a-zA-Z][\w-]*\.)+(?:com|org|net|edu|gov|io|ai|dev)\b")
_LONG_NUMBER = re.compile(r"\d[\d,.]*\d")
_DIGIT_RUN = re.compile(r"\d+")
_LAST_KNOWN = 0xFF
_SPOKEN_MARKS = "“”‘’–—…°±×÷½¼¾²³€£¥₹₩¢§µ→"
_UNSPOKEN = re.compile(rf"[^a-zA-ZÀ-ÖØ-öø-ÿ0-9\s!\"#$%&'()*+,\-./:;<=>?@^_~{_SPOKEN_MARKS}]")
_MEANING = ("Lu", "Ll", "Lt", "Lo", "Nd", "Nl", "No", "Sm", "Sc", "So")
_REPEATED = re.compile(r"([^\w\s])\1{2,}")


def speakable(text: str) -> str:
    """What can be read aloud in English: addresses in words, long numbers digit by digit, other scripts and emoji left out."""
    text = "".join(_latin(character) for character in unicodedata.normalize("NFC", text))
    text = _URL.sub(lambda match: match.group(1).removeprefix("www.").replace(".", " dot "), text)
    text = _ADDRESS.sub(lambda match: match.group().replace("@", " at ").replace(".", " dot "), text)
    text = _UNSPOKEN.sub(" ", text)
    text = _REPEATED.sub(r"\1", text)
    text = _LONG_NUMBER.sub(_short_or_spelled, text)
    return " ".join(text.split())


def unspoken(text: str) -> tuple[str, ...]:
    """Runs of characters that mean something and are not read: not punctuation, bullets, lines, marks of accents or what cannot be seen."""
    runs, joined = [""], False
    for character in unicodedata.normalize("NFC", text):
        if _is_lost(character):
            runs[-1] += character
            joined = True
        elif joined and unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf"):
            runs[-1] += character
        elif joined:
            runs.append("")
            joined = False
    return tuple(run for run in runs if run)


def _is_lost(character: str) -> bool:
    if not _UNSPOKEN.match(_latin(character)):
        return False
    return unicodedata.category(character) in _MEANING and not "\u2500" <= character <= "\u25ff"


def _latin(character: str) -> str:
    """A letter with a mark that the lexicon does not know without its mark: ř is read as r."""
    if ord(character) <= _LAST_KNOWN:
        return character
    base = unicodedata.normalize("NFD", character)[0]
    return base if base.isascii() else character


def _short_or_spelled(match: re.Match[str]) -> str:
    number = match.group()
    runs = _DIGIT_RUN.findall(number)
    grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})*(?:\.\d+)?", number)
    if sum(map(len, runs)) <= MAX_DIGITS and (grouped or len(runs) <= 2):
        return number
    return " ".join(" ".join(run) if len(run) > 4 or len(runs) == 1 else run for run in runs)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a text is read. normal: as words that the lexicon reads one by one. phonemes: their letters; empty where there is nothing to say.
    starts: the place of each word in them, and that of the end. unspoken: runs of characters of the text that mean something and got
    neither a sound nor a pause: letters of other scripts, emoji, signs without a word."""

    normal: str
    phonemes: str
    starts: tuple[int, ...]
    unspoken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpokenRun:
    """Words from begin to end of a text, counted between its spaces, and the letters of its phonemes from first to last, at which they
    sound. Ends are behind."""

    begin: int
    end: int
    first: int
    last: int


class Phonemizer:
    """English text to the ids of a voice. Not for use by two threads at once."""

    def __init__(self, symbols: Mapping[str, int]) -> None:
        from hibari.g2p import G2P
        from hibari.g2p.normalize import normalize

        # For words that are not in its lexicon it loads onnxruntime, which otherwise reports to its maker over the network.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        self._g2p = G2P()
        self._normalize: Callable[[str], str] = normalize
        self._symbols = dict(symbols)

    def read(self, text: str) -> Reading:
        """One phrase."""
        normal = self._normal(text)
        letters = [""]
        for token in self._g2p.phonemize_tokens(self._g2p.tokenize(normal)) if normal else ():
            letters[-1] += self._g2p.unk if token.phonemes is None else token.phonemes
            if token.whitespace:
                letters[-1] += " "
                letters.append("")
        phonemes = "".join(letters).lstrip()
        unread = sum(map(len, letters)) - len(phonemes)
        starts = tuple(max(place - unread, 0) for place in accumulate(map(len, letters), initial=0))
        phonemes = phonemes.rstrip()
        return Reading(normal, phonemes if any(letter.isalpha() for letter in phonemes) else "", starts, unspoken(text))

    def ids(self, phonemes: str) -> Iterator[tuple[list[int], list[int]]]:
        """Ids of these phonemes with a pad first and last, in as many parts as MAX_PHONEMES demands, and the places of all but the pads."""
        for begin, part in _parts(phonemes):
            places = [place for place, letter in enumerate(part, begin) if letter in self._symbols]
            yield [PAD, *(self._symbols[phonemes[place]] for place in places), PAD], places

    def runs(self, text: str, reading: Reading) -> Iterator[SpokenRun]:
        """Which words of a text sound at which letters of its reading. A word is alone where it can be: what is read as its neighbours
        demand, such as the unit of a number, is in one run with them."""
        words = text.split()
        alone = [self._normal(word) for word in words]
        for (begin, first), (end, last) in pairwise(self._borders(words, alone, reading)):
            letters = range(reading.starts[first], min(reading.starts[last], len(reading.phonemes)))
            sounds = [place for place in letters if reading.phonemes[place].isalpha() and reading.phonemes[place] in self._symbols]
            if sounds:
                read = [word for word in range(begin, end) if any(map(str.isalnum, alone[word]))] or range(begin, end)
                yield SpokenRun(read[0], read[-1] + 1, sounds[0], sounds[-1] + 1)

    def _borders(self, words: Sequence[str], alone: Sequence[str], reading: Reading) -> list[tuple[int, int]]:
        """Numbers of words of a text and of its reading that begin at the same place. There is one before a word if what is before it and
        what follows, each read by itself, are read as in the whole. alone: the words as each is read by itself."""
        ends = [(0, 0), (len(words), len(reading.starts) - 1)]
        if len(reading.normal.split()) != len(reading.starts) - 1:
            return ends
        if _joined(alone) == reading.normal:
            return list(enumerate(accumulate((len(normal.split()) for normal in alone), initial=0)))
        between = []
        for word in range(1, len(words)):
            before, after = (self._normal(" ".join(part)) for part in (words[:word], words[word:]))
            if _joined((before, after)) == reading.normal:
                between.append((word, len(before.split())))
        return [ends[0], *between, ends[1]]

    def _normal(self, text: str) -> str:
        plain = speakable(text)
        return self._normalize(plain) if plain else ""


def _joined(parts: Iterable[str]) -> str:
    return " ".join(part for part in parts if part)


def _parts(phonemes: str) -> Iterator[tuple[int, str]]:
    """Pieces of at most MAX_PHONEMES letters and their places, cut at spaces where there are any."""
    begin = 0
    while len(phonemes) - begin > MAX_PHONEMES:
        space = phonemes.rfind(" ", begin + 1, begin + MAX_PHONEMES)
        end = space if space > 0 else begin + MAX_PHONEMES
        yield begin, phonemes[begin:end]
        begin = len(phonemes) - len(phonemes[end:].lstrip())
    if begin < len(phonemes):
        yield begin, phonemes[begin:]
