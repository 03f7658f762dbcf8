"""The voice against the original it was converted from, and against an ear."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import hibari
import numpy as np
import pytest
import torch
from hibari import dsp
from models.test_spoken import FORMS

from benchmarks.asr import recognise, recogniser, spoken_words, word_error_rate, words
from helpers import lengths
from helpers.speech import spoken
from omnistage.models.checkpoint.files import read_config
from omnistage.models.checkpoint.weights import load_weights
from omnistage.models.smol import waveform
from omnistage.models.smol.code2wav import SAMPLES_PER_ROW, SmolCode2Wav
from omnistage.models.smol.prosody import ENERGY, F0, TEXT_WIDTH, FeatureNet, Silence
from omnistage.models.smol.spoken import reader
from omnistage.models.smol.talker import SmolTalker
from omnistage.models.smol.waveform import BINS, SpectrumNet, SpectrumStream

SENTENCES = (
    "The capital of France is Paris.",
    "In 1984, about 2,500 people lived in the small town near the river.",
    "It costs $5.50 to enter the museum, and children under 12 go free.",
    "The train leaves at 10:30 a.m. and arrives at 4:15 p.m. on Monday.",
    "Water boils at 100 degrees Celsius, which is 212 degrees Fahrenheit.",
    "Dr. Smith said that 75% of the patients felt better after two weeks.",
    "First, wash the vegetables. Then cut them into small pieces. Finally, cook them for 20 minutes.",
    "Please bring 3 apples, 12 eggs, and a loaf of bread.",
    "Yes. I can help you with that. What would you like to know?",
    "To learn the guitar, **practice** every day, start with simple songs, and be patient with yourself.",
)
ALL_SILENCE = Silence(before=1000, after=1000)


@pytest.fixture(scope="module")
def original() -> hibari.Hibari:
    return hibari.Hibari()


@pytest.fixture(scope="module")
def features(default_model: Path) -> FeatureNet:
    config = read_config(default_model / "talker", "hibari-talker")
    net = FeatureNet(config.value("embeddings", int), config.value("heads", int))
    load_weights(net, default_model / "talker")
    return net


def run_original(voice: hibari.Hibari, ids: list[int], speed: float) -> list[np.ndarray]:
    """The five maps [BINS, frames] and f0 [frames] of the quantised graph."""
    feed = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
    return [output[0] for output in voice.sess.run(None, feed)]


def test_nets_follow_the_original(original: hibari.Hibari, features: FeatureNet, spectra: SpectrumNet) -> None:
    """The original rounds activations to 8 bits; that, and nothing else, is the difference. It may move a duration by one row. Other speeds
    are not compared: the original rounds each phoneme by itself there, so that the whole is up to a sixth too long."""
    compared = 0
    for sentence in SENTENCES:
        ids = original.ids(original.phonemize(sentence)[0])
        *maps, f0 = run_original(original, ids, 1.0)
        rows = features(features.timed(torch.tensor(ids), 1.0, ALL_SILENCE))
        assert abs(2 * len(rows) - len(f0)) <= 2
        if 2 * len(rows) != len(f0):
            continue
        compared += 1
        own_f0, energy = rows[:, F0].reshape(-1), rows[:, ENERGY].reshape(-1)
        assert np.median(np.abs(own_f0.numpy() - f0)) < 1
        pitch = (own_f0.relu() + 1).log() / 5
        frames = torch.cat([rows[:, :TEXT_WIDTH].repeat_interleave(2, 0), pitch[:, None], energy[:, None] / 5], dim=1)
        own = torch.split(SpectrumStream(spectra).push(frames, last=True), BINS, dim=1)
        for mine, theirs in zip(own, maps, strict=True):
            assert np.corrcoef(mine.numpy().ravel(), theirs.T.ravel())[0, 1] > 0.999
    assert compared >= 4


def test_signal_processing_equals_the_original(original: hibari.Hibari) -> None:
    ids = original.ids(original.phonemize(SENTENCES[1])[0])
    *maps, f0 = run_original(original, ids, 1.0)
    noise = waveform.noise(0, 0, len(f0))
    fixed = SimpleNamespace(standard_normal=lambda shape, dtype: torch.view_as_real(noise.T.contiguous()).reshape(shape).numpy())
    theirs = dsp.synth(*(one.copy() for one in maps), f0, fixed)
    pulses = waveform.PulseTrain().push(f0, last=True)
    mixed = waveform.mix(torch.from_numpy(np.concatenate(maps).T.copy()), pulses, noise)
    mine = waveform.OverlapAdd().push(mixed, last=True).numpy()
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() < 1e-5


@pytest.mark.parametrize("kind", ["talker", "code2wav"])
async def test_it_tells_how_many_speak_in_real_time(kind: str, request: pytest.FixtureRequest) -> None:
    model: SmolTalker | SmolCode2Wav = request.getfixturevalue(kind)
    await model.warm_up()
    assert float(model.info.settings["real_time_speakers"].split(",")[0]) > 0


@lengths.long_form(
    "models/test_voice.py::test_written_forms_are_heard_as_their_words",
    "system/test_default_model.py::test_the_words_in_the_sound_are_the_words_on_the_screen",
)
async def test_what_is_heard_is_the_text(talker: SmolTalker, code2wav: SmolCode2Wav) -> None:
    model = recogniser()
    pairs = []
    for sentence in SENTENCES:
        samples = await spoken(talker, code2wav, sentence)
        assert len(samples) % SAMPLES_PER_ROW == 0
        pairs.append((sentence, recognise(model, samples, waveform.SAMPLE_RATE_HZ)))
    assert word_error_rate(pairs) <= 0.05, pairs


@lengths.rounds(8, 60)
async def test_written_forms_are_heard_as_their_words(talker: SmolTalker, code2wav: SmolCode2Wav, seed: int, rounds: int) -> None:
    """A sentence has a form drawn from the table. The recogniser hears in it what it hears in the same sentence with the words written out,
    but for an error in five words: it is a small recogniser, which hears one sentence in four in two ways. So half of the sentences it may
    hear as it likes: by the errors of 416 sentences, eight drawn ones then fail once in 100,000 runs."""
    model, pairs = recogniser(), []
    # Without those that have pauses or letters of their own, which a recogniser writes as it likes.
    forms = [(written, said) for written, said in FORMS if reader.read_aloud(written).text.lower() == said]
    for written, said in random.Random(seed).sample(forms, rounds):
        samples = [await spoken(talker, code2wav, f"They wrote {one.rstrip('.')} again.") for one in (said, written)]
        ears = [recognise(model, one, waveform.SAMPLE_RATE_HZ) for one in samples]
        pairs.append((ears[0], ears[1]))
    pairs.sort(key=lambda pair: word_error_rate([pair]))
    assert word_error_rate(pairs[: -(rounds // 2)]) <= 0.2, pairs


async def test_rests_are_short(talker: SmolTalker, code2wav: SmolCode2Wav) -> None:
    """No sound begins later than 100 ms after the start, and no rest inside is longer than 0.6 s."""
    samples = (await spoken(talker, code2wav, SENTENCES[6]))[:, 0]
    loud = np.flatnonzero(np.abs(samples) > 10 ** (-40 / 20)) / waveform.SAMPLE_RATE_HZ
    assert loud[0] < 0.1
    assert np.diff(loud).max() < 0.6


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,200 people", "one thousand two hundred people"),
        ("It's $5.50!", "its five dollars fifty cents"),
        ("at 10.30 am.", "At 10:30 a.m."),
        ("March 3rd, 1991", "March 3 nineteen ninety-one"),
        ("75% of 42 km", "Seventy-five percent of forty-two kilometers"),
        ("Dr. Smith", "doctor Smith"),
    ],
)
def test_what_was_heard_is_judged_alike_in_digits_and_in_words(one: str, other: str) -> None:
    assert words(one) == words(other) == spoken_words(one)


@pytest.mark.parametrize(
    ("written", "said", "errors"),
    [
        ("It was 3/4 full.", "It was three quarters full.", 0),
        ("Louis XIV lost $1.5bn.", "Louis the 14th lost 1.5 billion dollars.", 0),
        ("from 1914-18", "from 1914 to 18", 0),
        ("5'10\" or 9.8 m/s²", "5 feet 10 inches or 9.8 meters per second squared", 0),
        ("three cats", "3 cats.", 0),
        ("a b c d", "a x c", 0.5),
    ],
)
def test_a_text_is_judged_by_what_is_meant(written: str, said: str, errors: float) -> None:
    assert word_error_rate([(written, said)]) == errors
