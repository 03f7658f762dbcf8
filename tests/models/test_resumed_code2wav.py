"""The default Code2Wav goes on at any sample with the bits of the undisturbed sound, and computes little of what lies before it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from helpers import lengths
from helpers.speech import Array, rows_of, sounds_of
from omnistage.models.checkpoint.weights import load_weights
from omnistage.models.interface import BadRequest, Sound, WaveRequest
from omnistage.models.smol.code2wav import FRAMES_PER_ROW, NOISE_SEED, SAMPLES_PER_ROW, SCHEDULES, SmolCode2Wav, WaveSession
from omnistage.models.smol.prosody import COUNT, INDEX
from omnistage.models.smol.talker import SmolTalker
from omnistage.models.smol.waveform import SpectrumNet

TEXT = (
    "The sky is blue because air scatters light. Is that clear? It took one hundred and fifty years for people to learn how the light of "
    "the sun is scattered by the very small parts of the air above us, and nobody knew why it was so until then. So there."
)


IN_CHUNKS = ("latency", "balanced", "quality")


@pytest.fixture
async def rows(talker: SmolTalker) -> Array:
    return await rows_of(talker, TEXT)


@pytest.fixture
def net(default_model: Path) -> SpectrumNet:
    one = SpectrumNet()
    load_weights(one, default_model / "code2wav")
    return one


def joined(sounds: list[Sound]) -> Array:
    return np.concatenate([np.empty((0, 1), np.float32), *(sound.samples for sound in sounds)])


def cut(rows: Array, draw: random.Random) -> list[Array]:
    return np.split(rows, sorted(draw.choices(range(len(rows) + 1), k=draw.randrange(1, 30))))


def needs_of(sounds: list[Sound], sample: int) -> int:
    """The `needs` that a listener who has heard the sound up to a sample was told last."""
    heard, needs = 0, 0
    for sound in sounds:
        heard += len(sound.samples)
        needs = sound.needs if heard <= sample else needs
    return needs


@lengths.one_or_all("profile", SCHEDULES)
@pytest.mark.parametrize("broken_off", [False, True])
@lengths.rounds(3, 14)
async def test_sound_goes_on_at_any_sample_with_the_same_bits(
    code2wav: SmolCode2Wav, rows: Array, seed: int, profile: str, broken_off: bool, rounds: int
) -> None:
    """rounds: samples inside of sounds, and as many at the border of two."""
    profile = lengths.draw(profile, SCHEDULES, seed)
    draw = random.Random(seed)
    rows = rows[: draw.randrange(300, 420)] if broken_off else rows
    sounds = await sounds_of(code2wav, rows, request=WaveRequest(seed, profile))
    whole = joined(sounds)
    borders = np.cumsum([len(sound.samples) for sound in sounds]).tolist()
    for first in (0, 1, len(whole), *draw.choices(borders, k=rounds), *(draw.randrange(len(whole)) for _ in range(rounds))):
        kept = needs_of(sounds, first)
        begin = draw.choice([0, kept, draw.randint(0, kept)])
        rest = await sounds_of(code2wav, *cut(rows[begin:], draw), request=WaveRequest(seed, profile), first=begin, sample=first)
        assert np.array_equal(joined(rest), whole[first:]), f"sample {first}, rows from {begin}"
        assert all(len(sound.samples) for sound in rest)
        assert [sound.needs for sound in rest] == [sound.needs for sound in sounds[len(sounds) - len(rest) :]]


@lengths.one_or_all("profile", SCHEDULES)
async def test_a_sound_that_is_broken_off_is_as_long_as_its_rows(code2wav: SmolCode2Wav, rows: Array, seed: int, profile: str) -> None:
    """Wherever that is: also where every row was needed, and used, before it was known that no more come."""
    profile = lengths.draw(profile, SCHEDULES, seed)
    for count in range(1, 60):
        sounds = await sounds_of(code2wav, rows[:count], request=WaveRequest(0, profile))
        assert len(joined(sounds)) == count * SAMPLES_PER_ROW


def given_first(net: SpectrumNet, rows: Array, schedule: tuple[int, ...], first: int) -> Array:
    """The first sound of a session that goes on at sample `first`."""
    session = WaveSession(net, NOISE_SEED, schedule, first)
    session.feed(0, rows)
    session.end()
    while not len(samples := session.step().samples):
        pass
    return samples


@lengths.one_or_all("profile", IN_CHUNKS)
async def test_the_context_is_just_enough_wherever_the_net_begins(
    net: SpectrumNet, code2wav: SmolCode2Wav, rows: Array, seed: int, profile: str
) -> None:
    """At every row of one whole chunk in the middle of a long phrase."""
    profile = lengths.draw(profile, IN_CHUNKS, seed)
    whole = joined(await sounds_of(code2wav, rows, request=WaveRequest(7, profile)))
    begin = int(np.flatnonzero(rows[:, COUNT] >= 250)[0]) + 120
    for row in range(begin, begin + SCHEDULES[profile][-1]):
        first = row * SAMPLES_PER_ROW
        samples = given_first(net, rows, SCHEDULES[profile], first)
        assert np.array_equal(samples, whole[first : first + len(samples)]), f"row {row}"


async def test_needs_are_where_the_phrase_of_the_next_sample_begins(code2wav: SmolCode2Wav, rows: Array) -> None:
    begins = [*np.flatnonzero(rows[:, INDEX] == 0).tolist(), len(rows)]
    heard = 0
    for sound in await sounds_of(code2wav, rows):
        heard += len(sound.samples)
        assert sound.needs == max(begin for begin in begins if begin * SAMPLES_PER_ROW <= heard)
    assert heard == len(rows) * SAMPLES_PER_ROW


async def test_only_the_end_of_what_is_known_is_computed(net: SpectrumNet, rows: Array) -> None:
    """The listener has heard 200 rows of a phrase. The net sees the last few of them, and nothing of the phrases before it."""
    seen = 0

    def count(_: nn.Module, arguments: tuple[Tensor]) -> None:
        nonlocal seen
        seen += len(arguments[0])

    net.dec_in.register_forward_pre_hook(count)
    end = int(np.flatnonzero(rows[:, COUNT] >= 250)[0]) + 200
    session = WaveSession(net, 0, SCHEDULES["balanced"], end * SAMPLES_PER_ROW)
    session.feed(0, rows)
    session.end()
    samples = 0
    while session.ready():
        samples += len(session.step().samples)
    left = len(rows) - end
    assert samples == left * SAMPLES_PER_ROW
    assert left * FRAMES_PER_ROW <= seen <= (left + 100) * FRAMES_PER_ROW


async def test_a_needed_phrase_without_its_beginning_is_refused(code2wav: SmolCode2Wav, rows: Array) -> None:
    for begin, first in ((1, 0), (1, 600), (100, 70_000), (len(rows), 0), (len(rows), 1000)):
        with pytest.raises(BadRequest) as refused:
            await sounds_of(code2wav, rows[begin:], first=begin, sample=first)
        assert refused.value.field == "features"


@pytest.mark.parametrize("beyond", [1, 10**6, 2**64])
async def test_sound_that_ends_before_its_first_sample_is_refused(code2wav: SmolCode2Wav, rows: Array, beyond: int) -> None:
    with pytest.raises(BadRequest) as refused:
        await sounds_of(code2wav, rows, sample=len(rows) * SAMPLES_PER_ROW + beyond)
    assert refused.value.field == "resume.positions"
    assert code2wav.load().queued == 0


async def test_rows_that_are_skipped_are_checked_all_the_same(code2wav: SmolCode2Wav, rows: Array) -> None:
    bad = np.delete(rows, 10, axis=0)
    with pytest.raises(BadRequest, match="out of order"):
        await sounds_of(code2wav, bad, sample=100_000)
