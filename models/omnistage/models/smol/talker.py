"""The default Talker: text goes in, feature rows come out, a phrase at a time, with the time of every word."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.models.checkpoint.files import read_config
from omnistage.models.checkpoint.revision import compute_on_thread, revision
from omnistage.models.checkpoint.weights import load_weights
from omnistage.models.interface import (
    Activity,
    Alignment,
    BadRequest,
    Content,
    FinishReason,
    Frames,
    Load,
    ModelInfo,
    Piece,
    PortSpec,
    SpeechRequest,
    SpokenWord,
    TextPiece,
    Unspoken,
    Wanted,
)
from omnistage.models.options import LoadOptions
from omnistage.models.requests import choose_voice
from omnistage.models.smol.phrase import Pause, Phonemizer, Phrase, PhraseCutter, SpokenRun
from omnistage.models.smol.prosody import FEATURE_WIDTH, FRAME_RATE_HZ, FeatureNet, Silence, Timed
from omnistage.models.smol.spoken.rules import digest
from omnistage.models.speech.pace import computing_s, speakers_text
from omnistage.models.worker import Worker

Rows = NDArray[np.float32]

CODE_REVISION = "5"
"""Raise it with every change of the code that changes the rows, or the times of words. The tables of written forms count by themselves."""
VOICE = "heart"
FEATURES = "features"
ALIGNMENT = "alignment"
ROW_US = 1_000_000 // FRAME_RATE_HZ
SILENCE = {
    Pause.NONE: Silence(before=2, after=2),
    Pause.CLAUSE: Silence(before=2, after=4),
    Pause.SENTENCE: Silence(before=2, after=10),
    Pause.PARAGRAPH: Silence(before=2, after=16),
}
"""By the rest after a phrase: rows of 25 ms. The net puts the silence of a lone phrase around each, too long within a text."""
FIRST_PHRASE = Phrase("This is a zorbling, and that was the first of all the sentences that are spoken here.", Pause.SENTENCE)
"""Spoken to warm up, and for the revision; one of its words is in no lexicon, so that the net for such words is loaded."""


class SmolTalker:
    """The default Talker, a `TalkerModel`. Build it with `load_talker`. threads: number of torch threads of its computing thread."""

    def __init__(self, net: FeatureNet, phonemizer: Phonemizer, info: ModelInfo, threads: int) -> None:
        self._net = net
        self._phonemizer = phonemizer
        self.info = info
        self._worker = Worker(info.name, threads)
        self.threads: Sequence[Activity] = (self._worker.activity,)

    def load(self) -> Load:
        return Load(queued=self._worker.queued)

    async def prepare(self, request: SpeechRequest) -> SpeechRequest:
        """Raises BadRequest for a voice that this model does not have. The model can speak at all speeds that the contract allows."""
        choose_voice(self.info.voices, request.voice, "talker.voice")
        return request

    async def speak(
        self, prepared: SpeechRequest, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> AsyncGenerator[Frames | Alignment | Unspoken, None]:
        """See TalkerModel.speak. The pieces may cut the text anywhere. Text without a word gives no rows. If max_frames ends the speech,
        unspoken characters are reported up to the phrase in which it ends."""
        speech = _Speech(self._net, self._phonemizer, prepared, ports)
        async for phrase in _phrases(inputs, PhraseCutter(plain=prepared.plain)):
            part = await self._worker.run(partial(speech.say, phrase), urgent=speech.is_waited_for)
            if part.unspoken:
                yield Unspoken(part.unspoken)
            if part.words:
                yield Alignment(part.words)
            if len(part.rows):
                yield Frames(part.rows)
            if speech.finish_reason is FinishReason.LENGTH:
                break
        speech.check_reached()
        if ALIGNMENT in ports:
            yield Alignment((), last=True)
        if FEATURES in ports:
            yield Frames(_NO_ROWS, speech.finish_reason)

    async def warm_up(self) -> None:
        """Speak a sentence on the worker's thread, then once more to measure how many sessions it can serve in real time."""
        await self._worker.run(partial(_first_rows, self._net, self._phonemizer))
        speakers = await self._worker.run(self._speakers)
        self.info = replace(self.info, settings={**self.info.settings, "real_time_speakers": speakers_text(speakers)})

    def _speakers(self) -> float:
        """Measure how many seconds of speech a second of computing makes."""
        begin_s = computing_s(None, "cpu")
        rows = _first_rows(self._net, self._phonemizer)
        return len(rows) / FRAME_RATE_HZ / (computing_s(None, "cpu") - begin_s)

    async def close(self) -> None:
        """End the thread. No session may be running."""
        await self._worker.close()


_WORD = re.compile(r"\S+")

_NO_ROWS = np.empty((0, FEATURE_WIDTH), np.float32)


@dataclass(frozen=True, slots=True)
class _Part:
    """The wanted output of one phrase: rows [n, FEATURE_WIDTH], words with their times, and the characters that are not spoken."""

    rows: Rows
    words: tuple[SpokenWord, ...]
    unspoken: tuple[str, ...]


class _Speech:
    """The speech of one text, and how far it is. ports: by port, number of the first wanted item; earlier phrases get only times."""

    def __init__(self, net: FeatureNet, phonemizer: Phonemizer, request: SpeechRequest, ports: Wanted) -> None:
        self._net = net
        self._phonemizer = phonemizer
        self._request = request
        self._ports = ports
        self._rows = 0  # Number of the rows of the speech so far.
        self._words = 0  # Number of the words of the alignment so far.
        self._characters = 0  # Where the text begins that no told word covers.
        self.finish_reason = FinishReason.STOP

    @property
    def is_waited_for(self) -> bool:
        """Whether no wanted row has been made yet."""
        return self._rows <= self._ports.get(FEATURES, 0)

    def check_reached(self) -> None:
        """Raises BadRequest for a text that ends before the wanted output."""
        for port, reached, unit in ((FEATURES, self._rows, "frames"), (ALIGNMENT, self._words, "words")):
            first = self._ports.get(port, 0)
            if reached < first:
                raise BadRequest("resume.positions", f"the speech has {reached} {unit}: it cannot go on at number {first}")

    def say(self, phrase: Phrase) -> _Part:
        """Compute the next phrase and return its wanted output. Sets `finish_reason` to LENGTH if max_frames cuts the phrase."""
        text = _with_full_stop(phrase)
        reading = self._phonemizer.read(text)
        silence = SILENCE[phrase.pause]
        parts = [
            (self._net.timed(torch.tensor(ids), self._request.speed, silence), places)
            for ids, places in self._phonemizer.ids(reading.phonemes)
        ]
        rows_before, row_count = self._rows, sum(timed.count for timed, _ in parts)
        if self._request.max_frames and rows_before + row_count > self._request.max_frames:
            row_count, self.finish_reason = self._request.max_frames - rows_before, FinishReason.LENGTH
        self._rows += row_count
        words: list[SpokenWord] = []
        if ALIGNMENT in self._ports:
            sounds = _sounds(parts)
            for run in self._phonemizer.runs(text, reading):
                begin, end = sounds[run.first][0], min(sounds[run.last - 1][1], row_count)
                if begin < row_count:
                    self._add_word(words, _word(phrase, run, rows_before + begin, rows_before + end))
        skipped_words = max(self._ports.get(ALIGNMENT, 0) - self._words, 0)
        self._words += len(words)
        # If the speech ends before the first row of this phrase, its unspoken characters are not reported either.
        is_beyond_end = not row_count and self.finish_reason is FinishReason.LENGTH
        rows = self._wanted_rows([timed for timed, _ in parts], rows_before, row_count)
        return _Part(rows, tuple(words[skipped_words:]), () if is_beyond_end else reading.unspoken)

    def _add_word(self, words: list[SpokenWord], word: SpokenWord) -> None:
        """Add a word of a phrase to `words`. The words of a formula all have the place of the formula: they are added as one word."""
        if word.first_character >= self._characters:
            words.append(word)
            self._characters = word.first_character + word.character_count
        elif words:
            words[-1] = replace(words[-1], end_us=word.end_us)

    def _wanted_rows(self, parts: Sequence[Timed], rows_before: int, row_count: int) -> Rows:
        """The wanted rows of a phrase, [n, FEATURE_WIDTH]. rows_before: rows of the speech before it. row_count: how many rows of the
        phrase belong to the speech, at most."""
        first = max(self._ports[FEATURES] - rows_before, 0) if FEATURES in self._ports else row_count
        if first >= row_count:
            return _NO_ROWS
        return np.concatenate([self._net(timed).numpy() for timed in parts])[first:row_count]


def _sounds(parts: Sequence[tuple[Timed, Sequence[int]]]) -> dict[int, tuple[int, int]]:
    """By the index of each phoneme's letter: the first row of the phrase in which it sounds, and the row after the last."""
    sounds, rows_before = dict[int, tuple[int, int]](), 0
    for timed, places in parts:
        begins = [rows_before + row for row in timed.begins()]
        for number, place in enumerate(places, 1):  # The first id is a pad.
            sounds[place] = begins[number], begins[number + 1]
        rows_before += timed.count
    return sounds


def _word(phrase: Phrase, run: SpokenRun, begin: int, end: int) -> SpokenWord:
    """The place and time of words that sound from row `begin` of the speech to row `end` (exclusive). A mark that Markdown separates from
    them, such as the full stop after a link, is left out."""
    words = list(_WORD.finditer(phrase.text))
    characters = range(words[run.begin].start(), words[run.end - 1].end())
    letters = [number for number in characters if phrase.text[number].isalnum()] or characters
    first, last = letters[0], letters[-1]
    while first > characters[0] and _stands_by(phrase, first - 1, first):
        first -= 1
    while last < characters[-1] and _stands_by(phrase, last, last + 1):
        last += 1
    return SpokenWord(phrase.places[first], phrase.places[last] + 1 - phrase.places[first], begin * ROW_US, end * ROW_US)


def _stands_by(phrase: Phrase, one: int, other: int) -> bool:
    """Whether two characters of a phrase stand side by side in the Markdown, without a space."""
    return phrase.places[other] - phrase.places[one] == 1 and not phrase.text[one].isspace() and not phrase.text[other].isspace()


def _first_rows(net: FeatureNet, phonemizer: Phonemizer) -> Rows:
    return _Speech(net, phonemizer, SpeechRequest(seed=0), {FEATURES: 0}).say(FIRST_PHRASE).rows


async def _phrases(inputs: AsyncIterator[Piece], cutter: PhraseCutter) -> AsyncIterator[Phrase]:
    """Cut the text of the pieces into phrases."""
    async for piece in inputs:
        assert isinstance(piece.content, TextPiece)  # The only input port carries text.
        for phrase in cutter.feed(piece.content.text):
            yield phrase
    for phrase in cutter.flush():
        yield phrase


def _with_full_stop(phrase: Phrase) -> str:
    """The phrase's text. A heading or list item without punctuation gets a full stop, so that its pitch falls as in a sentence."""
    if phrase.pause in (Pause.NONE, Pause.CLAUSE) or phrase.text[-1] in ".!?…:;,\"'”’)":
        return phrase.text
    return phrase.text + "."


def load_talker(folder: Path, options: LoadOptions | None = None) -> SmolTalker:
    """Load from a folder `talker` that `convert_voice` wrote. Raises BadCheckpoint if it is incomplete or of another model."""
    options = options or LoadOptions()
    config = read_config(folder, "hibari-talker")
    with torch.device("meta"):  # Takes no memory: `load_weights` checks the sizes.
        net = FeatureNet(config.size("embeddings"), config.size("heads"))
    load_weights(net, folder)
    phonemizer = Phonemizer(config.table("symbols", int))
    rows = compute_on_thread(partial(_first_rows, net, phonemizer), options.threads)
    info = ModelInfo(
        name="hibari-talker",
        revision=revision(folder, f"{CODE_REVISION}-{digest()}", dtype="float32", device="cpu", threads=options.threads, results=(rows,)),
        accepts=(PortSpec("text", Content.TEXT),),
        produces=(PortSpec(FEATURES, Content.TENSOR, rate_hz=FRAME_RATE_HZ, width=FEATURE_WIDTH), PortSpec(ALIGNMENT, Content.ALIGNMENT)),
        max_sessions=options.sessions,
        voices=(VOICE,),
        draws=False,
        tells_unspoken=True,
    )
    return SmolTalker(net, phonemizer, info, options.threads)
