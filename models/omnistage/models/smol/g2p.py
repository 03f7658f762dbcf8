"""Phrases to phoneme ids, with the rules, lexicon and out-of-vocabulary net of the package hibari-tts (Apache-2.0, no espeak).

The package reads numbers, years, dates, times, money, units and common abbreviations; this file brings text into the form it expects.
Onnxruntime is imported by the package when the first word that is in no lexicon comes.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping

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


class Phonemizer:
    """English text to the ids of a voice. Not for use by two threads at once."""

    def __init__(self, symbols: Mapping[str, int]) -> None:
        from hibari.g2p import G2P

        # For words that are not in its lexicon it loads onnxruntime, which otherwise reports to its maker over the network.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        self._g2p = G2P()
        self._symbols = dict(symbols)

    def phonemes(self, text: str) -> str:
        """One phrase in phoneme letters; empty where there is nothing to say."""
        plain = speakable(text)
        phonemes: str = self._g2p(plain) if plain else ""
        return phonemes if any(c.isalpha() for c in phonemes) else ""

    def ids(self, text: str) -> Iterator[list[int]]:
        """Ids with a pad first and last, in as many parts as MAX_PHONEMES demands; none where there is nothing to say."""
        for part in _parts(self.phonemes(text)):
            yield [PAD, *(self._symbols[letter] for letter in part if letter in self._symbols), PAD]


def _parts(phonemes: str) -> Iterator[str]:
    """Pieces of at most MAX_PHONEMES letters, cut at spaces where there are any."""
    while len(phonemes) > MAX_PHONEMES:
        space = phonemes.rfind(" ", 1, MAX_PHONEMES)
        cut = space if space > 0 else MAX_PHONEMES
        yield phonemes[:cut]
        phonemes = phonemes[cut:].lstrip()
    if phonemes:
        yield phonemes
