"""Phrases to phoneme ids, with the lexicon and out-of-vocabulary net of the package hibari-tts (Apache-2.0, no espeak).

The subpackage spoken turns written text into words; the package's own rules for numbers and signs are not used. The package imports
onnxruntime when the first word comes that is in no lexicon.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from omnistage.models.smol.spoken.reader import read_phrase

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
        read = read_phrase(text)
        normal = read.text
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
        if not any(letter.isalpha() for letter in phonemes):
            phonemes = ""
        return Reading(normal, phonemes, starts, read.borders, read.unspoken)

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
                read = [word for word in range(begin, end) if any(map(str.isalnum, words[word]))] or range(begin, end)
                yield SpokenRun(read[0], read[-1] + 1, sounds[0], sounds[-1] + 1)


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
