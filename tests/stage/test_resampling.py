"""Code2Wav's stage: sound at another rate is soxr of the whole, however the model's sound came; the listener that it imagines counts the
sound that came too late, and no pause of the listener."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import lengths
from helpers.bare import bare_environment, bare_python
from helpers.contract import Case, Loaded, SampleRequest, check_it_goes_on_without_what_it_said_is_needless, run
from helpers.families import CASES
from helpers.logic import Whole
from helpers.run import params
from omnistage.code2wav.resampling import RATES_HZ, Conversion, Resampler, convert_sounds, possible_rates_hz
from omnistage.code2wav.stage import GRACE_S, Code2WavStage, Playhead
from omnistage.models.interface import BadRequest, Piece, Sound, Wanted, WaveRequest
from omnistage.models.toy import formulas
from omnistage.models.toy.formulas import SAMPLE_RATE_HZ
from omnistage.models.toy.stages import ToyCode2Wav, ToyOptions
from omnistage.stage.logic import Kept, Output, SessionTiming, StageLogic, Start
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError

soxr = pytest.importorskip("soxr", reason="the models extra is not installed")

Samples = NDArray[np.float32]

FLOAT32 = chunk_pb2.AUDIO_ENCODING_FLOAT32
SOURCES_HZ = (16000, 22050, 24000, 44100, 48000)
PAIRS = [(source, rate) for source, rate in itertools.product(SOURCES_HZ, RATES_HZ) if source != rate]
BOUND = 10 ** (-110 / 20)
"""The allowed difference: -110 dB of full scale."""


def noise(rng: random.Random, samples: int, channels: int = 1) -> Samples:
    """Random samples. The signal between two of them may be twice as loud, and is not clipped even then."""
    return np.random.default_rng(rng.getrandbits(64)).uniform(-0.25, 0.25, (samples, channels)).astype(np.float32)


def resampled(conversion: Conversion, sound: Samples, rng: random.Random, first: int = 0) -> Samples:
    """From output sample `first` on, the model's sound cut at random."""
    resampler = Resampler(conversion, sound.shape[1], first)
    at, parts = resampler.first_needed, []
    while at < len(sound):
        count = rng.choice([1, rng.randint(1, 50), rng.randint(1, 5000)])
        parts.append(resampler.push(sound[at : at + count]))
        at += count
    return np.concatenate([*parts, resampler.end()])


@pytest.mark.parametrize(("source", "rate"), PAIRS, ids=str)
def test_it_is_soxr_of_the_whole(source: int, rate: int, seed: int) -> None:
    """In single and in double precision, from the first sample to the last; the sound cut at random, of one channel and of three."""
    rng = random.Random(seed)
    conversion = Conversion(source, rate)
    for channels in (1, 3):
        count = rng.randint(source // 5, source)
        sound = noise(rng, count + (count * rate / source % 1 == 0.5), channels)  # Where soxr rounds by chance.
        made = resampled(conversion, sound, rng)
        whole = np.asarray(soxr.resample(sound, source, rate, "VHQ"))
        exact = np.asarray(soxr.resample(sound.astype(np.float64), source, rate, "VHQ"))
        assert made.shape == whole.shape == (conversion.count(len(sound)), channels)
        assert np.abs(made - whole).max() < BOUND
        assert np.abs(made - exact).max() < BOUND
        assert 10 * np.log10(np.mean(exact**2) / np.mean((made - exact) ** 2)) > 120


@lengths.drawn_cells(14, ("source", "rate"), PAIRS, ids=str)
def test_cuts_and_places_to_go_on_change_no_bit(source: int, rate: int, seed: int) -> None:
    rng = random.Random(seed)
    conversion = Conversion(source, rate)
    sound = noise(rng, rng.randint(source // 5, source // 2), rng.choice([1, 2, 5]))
    whole = resampled(conversion, sound, rng)
    at_once = Resampler(conversion, sound.shape[1], 0)
    assert np.array_equal(np.concatenate([at_once.push(sound), at_once.end()]), whole)
    places = [0, 1, conversion.output_block - 1, conversion.output_block, len(whole) - 1, len(whole), *rng.choices(range(len(whole)), k=8)]
    for first in places:
        assert np.array_equal(resampled(conversion, sound, rng, first), whole[first:]), first


def test_channels_do_not_touch_each_other(seed: int) -> None:
    rng = random.Random(seed)
    conversion = Conversion(24000, 44100)
    sound = noise(rng, 9000, 8)
    together = resampled(conversion, sound, rng)
    for channel in range(8):
        assert np.array_equal(resampled(conversion, sound[:, channel : channel + 1], rng)[:, 0], together[:, channel])


@pytest.mark.parametrize(("source", "rate"), PAIRS, ids=str)
def test_short_sounds_have_the_stated_length(source: int, rate: int, seed: int) -> None:
    rng = random.Random(seed)
    conversion = Conversion(source, rate)
    for samples in (0, 1, 2, 3, 7, conversion.block - 1, conversion.block, conversion.block + 1, rng.randint(1, 3 * conversion.block)):
        made = resampled(conversion, noise(rng, samples), rng)
        assert len(made) == conversion.count(samples) == math.floor(samples * rate / source + 0.5)
        with pytest.raises(BadRequest) as refused:
            resampled(conversion, noise(rng, samples), rng, len(made) + 1)
        assert refused.value.field == "resume.positions"


@pytest.mark.parametrize(("rate", "held_back_ms"), [(8000, 20), (11025, 27), (16000, 10), (22050, 14), (44100, 10), (48000, 10)])
def test_little_is_held_back(rate: int, held_back_ms: int) -> None:
    """The bound is for a chunk of 200 ms, the first chunk of the default voice."""
    conversion = Conversion(24000, rate)
    given = Resampler(conversion, 1, 0).push(np.zeros((4800, 1), np.float32))
    assert 200 - len(given) / rate * 1000 <= held_back_ms


def test_full_scale_is_kept() -> None:
    """A square is as loud as samples can be, and its overtones belong to its shape."""
    square = np.where(np.arange(4800) // 50 % 2, 1, -1).astype(np.float32)[:, None]
    assert np.abs(soxr.resample(square, 24000, 16000, "VHQ")).max() > 1.1
    assert np.abs(resampled(Conversion(24000, 16000), square, random.Random(0))).max() == 1


async def test_what_is_needed_goes_with_the_context(seed: int) -> None:
    """A sound's `needs` may be told only when nothing is needed any more of what was before it: whoever goes on has to have the context."""
    rng = random.Random(seed)
    conversion = Conversion(24000, 16000)
    sound = noise(rng, 24000)
    ends = [*sorted(rng.sample(range(1, 24000), 40)), 24000]

    async def made() -> AsyncIterator[Sound]:
        for begin, end in itertools.pairwise([0, *ends]):
            yield Sound(sound[begin:end], needs=end)

    given, told = 0, []
    async for one in convert_sounds(made(), conversion, 1, 0, 0):
        given += len(one.samples)
        told.append((one.needs, conversion.first_needed(given)))
    assert given == 16000
    for needs, first_needed in told[:-1]:
        assert needs == max([end for end in ends if end <= first_needed], default=0)
    assert told[-1][0] == told[-2][0] > 20000  # After the last sample nobody needs to be told.


# In the stage ------------------------------------------------------------------------------------------------------------------------


VOICES = [case for case in CASES if str(case) in ("toy-code2wav", "smol-code2wav")]


@dataclass(frozen=True)
class LoadedVoice:
    """A loaded Code2Wav and what it speaks."""

    case: Case
    logic: StageLogic
    inputs: Mapping[str, Whole]

    def at(self, rate_hz: int) -> Loaded:
        """0: at the model's own rate."""
        return Loaded(self.case, self.logic, SampleRequest(params("code2wav", sample_rate_hz=rate_hz, encoding=FLOAT32), self.inputs))


@pytest.fixture(scope="module", params=VOICES, ids=str)
def voice(request: pytest.FixtureRequest) -> Iterator[LoadedVoice]:
    case: Case = request.param
    logic = case.load()
    yield LoadedVoice(case, logic, case.sample().inputs)
    asyncio.run(logic.close())


def heard(outputs: Sequence[Output | Kept], rate_hz: int) -> Samples:
    sounds = [np.empty(0, np.float32)]
    for output in outputs:
        if isinstance(output, Output) and output.payload is not None:
            assert isinstance(output.payload, chunk_pb2.AudioChunk)
            sounds.append(np.frombuffer(output.payload.data, np.float32))
            assert (output.payload.sample_rate_hz, len(sounds[-1])) == (rate_hz, output.count)
    return np.concatenate(sounds)


async def test_a_stage_goes_on_at_any_sample(voice: LoadedVoice, seed: int) -> None:
    """Bit for bit, with no more of its input than `Work.needs` says."""
    rng = random.Random(seed)
    rate_hz = rng.choice([rate for rate in RATES_HZ if rate != 24000])
    own = heard((await run(voice.at(0), rng)).outputs, 24000)
    whole = heard((await run(voice.at(rate_hz), rng)).outputs, rate_hz)
    assert len(whole) == Conversion(24000, rate_hz).count(len(own))
    expected = np.clip(soxr.resample(own, 24000, rate_hz, "VHQ"), -1, 1)
    assert np.abs(whole[: len(expected)] - expected).max() < BOUND
    for first in (1, len(whole), *rng.choices(range(len(whole)), k=4 if voice.case.slow else 25)):
        rest = await run(voice.at(rate_hz), rng, Start({"audio": first}))
        assert np.array_equal(heard(rest.outputs, rate_hz), whole[first:]), (rate_hz, first)


async def test_what_it_says_is_needless_is(voice: LoadedVoice, seed: int) -> None:
    await check_it_goes_on_without_what_it_said_is_needless(voice.at(random.Random(seed).choice([8000, 11025, 44100])), random.Random(seed))


async def test_no_frames_give_no_samples() -> None:
    voice = LoadedVoice(VOICES[0], VOICES[0].load(), {"codes": np.empty((0, formulas.CODEBOOKS), np.uint32)})
    for rate_hz in (8000, 24000, 44100):
        assert (await run(voice.at(rate_hz), random.Random(0))).outputs == [Output("audio", 0, None, last=True)]


@pytest.mark.parametrize("rate_hz", [1, 7999, 12345, 24001, 96000, (1 << 32) - 1])
async def test_other_rates_are_refused_with_those_that_are_possible(rate_hz: int) -> None:
    with pytest.raises(StageError) as refused:
        await VOICES[0].load().prepare(stage_pb2.Open(params=params("code2wav", sample_rate_hz=rate_hz)), Start())
    assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "code2wav.sample_rate_hz")
    for words in (str(rate_hz), "8000, 11025", "44100, 48000", "leave it out"):
        assert words in refused.value.message


def test_a_model_with_an_odd_rate_has_those_that_fit() -> None:
    """Blocks of more than 40 ms would hold a first packet back."""
    assert possible_rates_hz(24000) == possible_rates_hz(48000) == RATES_HZ
    assert possible_rates_hz(24001) == (24001,)
    assert possible_rates_hz(19200) == (8000, 11025, 12000, 16000, 19200, 22050, 24000, 32000, 44100, 48000)
    for source, rate in PAIRS:
        assert Conversion(source, rate).block <= source // 25


WITHOUT_SOXR = """
import asyncio
from omnistage.code2wav.stage import Code2WavStage
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
from omnistage.stage.logic import Start
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError

async def main():
    stage = Code2WavStage(load("toy", "code2wav", LoadOptions()))
    await stage.warm_up()
    await stage.prepare(stage_pb2.Open(), Start())
    params = stage_pb2.StageParams(code2wav=stage_pb2.Code2WavParams(sample_rate_hz=16000))
    try:
        await stage.prepare(stage_pb2.Open(params=params), Start())
    except StageError as error:
        print(error.reason, error.metadata["field"], error.message)

asyncio.run(main())
"""


def test_without_soxr_the_models_own_rate_remains(tmp_path: Path) -> None:
    said = subprocess.run(
        [*bare_python(), "-c", WITHOUT_SOXR],
        env=bare_environment(tmp_path, "server"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert said.startswith("BAD_REQUEST code2wav.sample_rate_hz ")
    assert "16000 is not possible" in said and "soxr" in said and "24000" in said and "omnistage[models]" in said


def test_who_always_has_something_to_play_is_not_starved() -> None:
    player = Playhead()
    for now, seconds in ((1.0, 0.5), (1.4, 0.2), (1.7 + GRACE_S / 2, 0.3)):
        player.hear(now, seconds)
    assert (player.underruns, player.starved_s) == (0, 0.0)


def test_silence_is_counted_as_often_and_as_long_as_it_is(seed: int) -> None:
    """Beside a player that asks at every millisecond whether there is something to play."""
    source = random.Random(seed)
    for _ in range(50):
        wait_s, now = source.choice([0.0, 0.3]), 0
        sounds = [(now := now + source.randint(1, 500), source.randint(1, 500)) for _ in range(30)]
        player = Playhead()
        for at, length in sounds:
            player.hear(at / 1000, length / 1000, wait_s)
        begins, held, silences = sounds[0][0] + round(1000 * wait_s), 0, list[int]()
        came = dict(sounds)
        silent = 0
        for at in range(sounds[0][0], sounds[-1][0] + 1):
            if at in came:
                held += came[at]
                silences += [silent] * (silent > 0)
                silent = 0
            if at >= begins:
                silent += held == 0
                held -= held > 0
        counted = [length for length in silences if length > 1000 * GRACE_S]
        assert player.underruns == pytest.approx(len(counted), abs=2)
        assert player.starved_s == pytest.approx(sum(counted) / 1000, abs=0.002 * len(sounds) + 0.04)


SOUND_S = 0.1


@dataclass
class SteppedClock:
    """Seconds that pass when a test says so: a busy machine adds none."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Late(ToyCode2Wav):
    """Makes four sounds, the third one late by `late_s`."""

    def __init__(self, clock: SteppedClock, late_s: float, prebuffer_s: float | None) -> None:
        super().__init__(ToyOptions())
        self.clock, self.late_s, self.prebuffer_s = clock, late_s, prebuffer_s

    async def decode(self, prepared: WaveRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        for number in range(4):
            if number == 2:
                self.clock.now_s += 2 * SOUND_S + self.late_s
            yield Sound(np.zeros((round(SOUND_S * SAMPLE_RATE_HZ), 1), np.float32), 0, None if number else self.prebuffer_s)


async def nothing() -> AsyncIterator[object]:
    return
    yield


async def pieces_heard(late_s: float, pause_s: float, prebuffer_s: float | None = None) -> SessionTiming:
    """pause_s: before each sound is taken."""
    clock, timing = SteppedClock(), SessionTiming()
    stage = Code2WavStage(Late(clock, late_s, prebuffer_s), clock)
    opened = stage_pb2.Open(params=stage_pb2.StageParams(code2wav=stage_pb2.Code2WavParams()))
    work = await stage.prepare(opened, Start())
    async with aclosing(work.run(nothing(), timing, Start())) as outputs:  # type: ignore[arg-type]
        async for _ in outputs:
            clock.now_s += pause_s
    return timing


@pytest.mark.parametrize("prebuffer_s", [None, 0.0, 0.2])
async def test_sound_that_is_made_late_is_counted(prebuffer_s: float | None) -> None:
    timing = await pieces_heard(0.5, 0, prebuffer_s)
    assert timing.audio_underruns == 1
    assert timing.audio_starved_s == pytest.approx(0.5 - (prebuffer_s or 0))


@pytest.mark.parametrize(
    ("late_s", "pause_s", "prebuffer_s"), [(0.5, 0, 60.0), (-2 * SOUND_S, 0.3, None)], ids=["told to wait long enough", "pauses"]
)
async def test_such_a_listener_lacks_nothing(late_s: float, pause_s: float, prebuffer_s: float | None) -> None:
    """A pause that is much longer than all of the sound."""
    timing = await pieces_heard(late_s, pause_s, prebuffer_s)
    assert (timing.audio_underruns, timing.audio_starved_s) == (0, 0)
