"""The default Code2Wav: samples depend on the rows alone, however they come and are cut into chunks; and it goes on at any
sample with the bits of the undisturbed one, and little of what lies before is computed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import lengths
from helpers.speech import Array, arrays, cancel_often, chunks_of, rows_of, samples_of, sounds_of
from omnistage.models.interface import BadRequest, Piece, Sound, WaveRequest
from omnistage.models.smol.code2wav import FRAMES_PER_ROW, NOISE_SEED, SAMPLES_PER_ROW, SCHEDULES, SmolCode2Wav, WaveSession, chunk_rows
from omnistage.models.smol.prosody import COUNT, F0, FEATURE_WIDTH, INDEX
from omnistage.models.smol.talker import SmolTalker
from omnistage.models.smol.waveform import SpectrumNet, noise

TEXT = "The sky is blue because air scatters light. Is that clear? It took 150 years."
LONG_TEXT = (
    "The sky is blue because air scatters light. Is that clear? It took one hundred and fifty years for people to learn how the light of "
    "the sun is scattered by the very small parts of the air above us, and nobody knew why it was so until then. So there."
)
IN_CHUNKS = ("latency", "balanced", "quality")


@pytest.fixture
async def rows(talker: SmolTalker) -> Array:
    return await rows_of(talker, TEXT)


@pytest.fixture
async def long_rows(talker: SmolTalker) -> Array:
    return await rows_of(talker, LONG_TEXT)


def decoded(net: SpectrumNet, rows: Array, schedule: tuple[int, ...], seed: int = 0, first: int = 0) -> Array:
    session = WaveSession(net, seed, schedule, first)
    session.feed(0, rows)
    session.end()
    chunks = []
    while session.ready():
        chunks.append(session.step().samples)
    return np.concatenate(chunks)


def cut(rows: Array, draw: random.Random) -> list[Array]:
    return np.split(rows, sorted(draw.choices(range(len(rows) + 1), k=draw.randrange(1, 30))))


async def test_every_row_gives_its_samples(code2wav: SmolCode2Wav, rows: Array) -> None:
    samples = await samples_of(code2wav, rows)
    assert samples.shape == (len(rows) * SAMPLES_PER_ROW, 1) and samples.dtype == np.float32
    assert np.abs(samples).max() <= 1
    assert np.sqrt(np.mean(samples**2)) > 0.01


@lengths.rounds(20, 100)
def test_chunked_equals_whole_across_phrases(spectra: SpectrumNet, rows: Array, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    whole = decoded(spectra, rows, (4096,))
    for _ in range(rounds):
        schedule = (*(draw.randrange(1, 80) for _ in range(draw.randrange(12))), draw.randrange(8, 80))
        assert np.abs(decoded(spectra, rows, schedule) - whole).max() <= 1e-5


@lengths.rounds(8, 25)
async def test_samples_do_not_depend_on_arrival(code2wav: SmolCode2Wav, rows: Array, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    expected = await chunks_of(code2wav, rows)
    for number in range(rounds):
        parts = np.split(rows, len(rows)) if number == 0 else cut(rows, draw)
        assert all(map(np.array_equal, expected, chunks := await chunks_of(code2wav, *parts))) and len(chunks) == len(expected)


async def test_phrases_do_not_touch_each_other(code2wav: SmolCode2Wav, talker: SmolTalker) -> None:
    one, two = await rows_of(talker, "This is one phrase."), await rows_of(talker, "Here comes another one!")
    both = await samples_of(code2wav, one, two, request=WaveRequest(seed=3, profile="offline"))
    alone = await samples_of(code2wav, one, request=WaveRequest(seed=3, profile="offline"))
    assert np.array_equal(both[: len(alone)], alone)


@pytest.mark.parametrize(("profile", "first"), [("latency", 4), ("balanced", 8), ("quality", 16), ("offline", 128)])
async def test_profiles_are_schedules(code2wav: SmolCode2Wav, rows: Array, profile: str, first: int) -> None:
    chunks = await chunks_of(code2wav, rows, request=WaveRequest(seed=0, profile=profile))
    assert len(chunks[0]) // SAMPLES_PER_ROW in (first, int(rows[0, COUNT]))
    balanced = await samples_of(code2wav, rows)
    assert np.abs(np.concatenate(chunks) - balanced).max() <= 1e-5


async def test_first_chunk_waits_only_for_its_context(code2wav: SmolCode2Wav, rows: Array) -> None:
    more = asyncio.Event()

    async def arriving() -> AsyncIterator[Piece]:
        yield Piece("features", 0, False, rows[:23])
        await more.wait()

    sound = code2wav.decode(WaveRequest(seed=0), arriving(), {"audio": 0})
    assert len((await anext(sound)).samples) == 8 * SAMPLES_PER_ROW
    await sound.aclose()


@given(st.sampled_from(list(SCHEDULES.values())), st.integers(0, 5000), st.integers(1, 4096))
def test_chunk_sizes(schedule: tuple[int, ...], first: int, left: int) -> None:
    rows = chunk_rows(schedule, first, left)
    assert 1 <= rows <= left and rows < 2 * schedule[-1]
    if left >= 2 * schedule[-1]:
        assert rows in schedule
        assert left - rows >= schedule[-1]


def test_chunks_grow() -> None:
    assert [chunk_rows(SCHEDULES["balanced"], first, 4096) for first in (0, 8, 23, 24, 100)] == [8, 16, 16, 32, 32]


def test_noise_is_a_function_of_seed_and_frame() -> None:
    assert (noise(5, 10, 4)[1:3] == noise(5, 11, 2)).all()
    assert not (noise(5, 10, 1) == noise(6, 10, 1)).any()
    assert not (noise(5, 10, 1) == noise(5, 11, 1)).any()
    assert abs(float(noise(1, 0, 50).real.std()) - 1) < 0.05


def test_another_noise_changes_nothing_else(spectra: SpectrumNet, rows: Array) -> None:
    one, same, other = (decoded(spectra, rows, SCHEDULES["balanced"], seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.9


async def test_all_seeds_sound_alike(code2wav: SmolCode2Wav, rows: Array) -> None:
    """A client that asks for a seed means the words: the noise of a voice is always the same."""
    one, other = [await samples_of(code2wav, rows, request=WaveRequest(seed=seed)) for seed in (1, 2)]
    assert np.array_equal(one, other) and code2wav.info.draws is False


async def test_no_rows_give_no_sound(code2wav: SmolCode2Wav) -> None:
    assert await chunks_of(code2wav) == await chunks_of(code2wav, np.empty((0, FEATURE_WIDTH), np.float32)) == []


BROKEN = {"nan": (3, 5, np.nan), "index": (2, INDEX, 7), "count": (2, COUNT, 7), "no phrase": (0, COUNT, 0), "fraction": (0, COUNT, 5.5)}
"""Numbers in the place of others."""


@pytest.mark.parametrize("damage", [*BROKEN, "missing row"])
async def test_malformed_rows_are_refused(code2wav: SmolCode2Wav, rows: Array, damage: str) -> None:
    bad = rows.copy() if damage in BROKEN else np.delete(rows, 4, axis=0)
    if damage in BROKEN:
        row, column, value = BROKEN[damage]
        bad[row, column] = value
    with pytest.raises(BadRequest, match=r"^features: "):
        await chunks_of(code2wav, bad)
    assert code2wav.load().queued == 0


async def test_wild_but_finite_values_stay_in_range(code2wav: SmolCode2Wav, rows: Array) -> None:
    wild = rows.copy()
    wild[:, : F0.stop] *= 1e6
    samples = await samples_of(code2wav, wild)
    assert np.isfinite(samples).all()
    assert np.abs(samples).max() <= 1


async def test_cancel_at_any_moment_leaves_nothing_queued(code2wav: SmolCode2Wav, rows: Array, seed: int) -> None:
    expected = await samples_of(code2wav, rows[:120])
    await cancel_often(code2wav, lambda: code2wav.decode(WaveRequest(seed=0), arrays([rows]), {"audio": 0}), random.Random(seed))
    assert np.array_equal(await samples_of(code2wav, rows[:120]), expected)


async def test_sessions_at_once_do_not_touch_each_other(code2wav: SmolCode2Wav, rows: Array) -> None:
    requests = [WaveRequest(seed=seed) for seed in range(4)]
    alone = [await samples_of(code2wav, rows, request=request) for request in requests]
    together = await asyncio.gather(*(samples_of(code2wav, rows, request=request) for request in requests))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


# Sound that goes on -----------------------------------------------------------------------------------------------------------------------


def joined(sounds: list[Sound]) -> Array:
    return np.concatenate([np.empty((0, 1), np.float32), *(sound.samples for sound in sounds)])


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
    code2wav: SmolCode2Wav, long_rows: Array, seed: int, profile: str, broken_off: bool, rounds: int
) -> None:
    """rounds: samples inside of sounds, and as many at the border of two."""
    profile = lengths.draw(profile, SCHEDULES, seed)
    draw = random.Random(seed)
    rows = long_rows[: draw.randrange(300, 420)] if broken_off else long_rows
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
async def test_a_sound_that_is_broken_off_is_as_long_as_its_rows(code2wav: SmolCode2Wav, long_rows: Array, seed: int, profile: str) -> None:
    """Wherever that is: also where every row was needed, and used, before it was known that no more come."""
    profile = lengths.draw(profile, SCHEDULES, seed)
    for count in range(1, 60):
        sounds = await sounds_of(code2wav, long_rows[:count], request=WaveRequest(0, profile))
        assert joined(sounds).shape == (count * SAMPLES_PER_ROW, 1) and np.isfinite(joined(sounds)).all()


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
    spectra: SpectrumNet, code2wav: SmolCode2Wav, long_rows: Array, seed: int, profile: str
) -> None:
    """At every row of one whole chunk in the middle of a long phrase."""
    profile = lengths.draw(profile, IN_CHUNKS, seed)
    whole = joined(await sounds_of(code2wav, long_rows, request=WaveRequest(7, profile)))
    begin = int(np.flatnonzero(long_rows[:, COUNT] >= 250)[0]) + 120
    for row in range(begin, begin + SCHEDULES[profile][-1]):
        first = row * SAMPLES_PER_ROW
        samples = given_first(spectra, long_rows, SCHEDULES[profile], first)
        assert np.array_equal(samples, whole[first : first + len(samples)]), f"row {row}"


async def test_needs_are_where_the_phrase_of_the_next_sample_begins(code2wav: SmolCode2Wav, long_rows: Array) -> None:
    begins = [*np.flatnonzero(long_rows[:, INDEX] == 0).tolist(), len(long_rows)]
    heard = 0
    for sound in await sounds_of(code2wav, long_rows):
        heard += len(sound.samples)
        assert sound.needs == max(begin for begin in begins if begin * SAMPLES_PER_ROW <= heard)
    assert heard == len(long_rows) * SAMPLES_PER_ROW


async def test_only_the_end_of_what_is_known_is_computed(spectra: SpectrumNet, long_rows: Array) -> None:
    """The listener has heard 200 rows of a phrase. The net sees the last few of them, and nothing of the phrases before it."""
    seen = 0

    def count(_: nn.Module, arguments: tuple[Tensor]) -> None:
        nonlocal seen
        seen += len(arguments[0])

    end = int(np.flatnonzero(long_rows[:, COUNT] >= 250)[0]) + 200
    with spectra.dec_in.register_forward_pre_hook(count):
        samples = decoded(spectra, long_rows, SCHEDULES["balanced"], first=end * SAMPLES_PER_ROW)
    left = len(long_rows) - end
    assert len(samples) == left * SAMPLES_PER_ROW
    assert left * FRAMES_PER_ROW <= seen <= (left + 100) * FRAMES_PER_ROW


async def test_a_needed_phrase_without_its_beginning_is_refused(code2wav: SmolCode2Wav, long_rows: Array) -> None:
    for begin, first in ((1, 0), (1, 600), (100, 70_000), (len(long_rows), 0), (len(long_rows), 1000)):
        with pytest.raises(BadRequest, match=r"^features: "):
            await sounds_of(code2wav, long_rows[begin:], first=begin, sample=first)


@pytest.mark.parametrize("beyond", [1, 10**6, 2**64])
async def test_sound_that_ends_before_its_first_sample_is_refused(code2wav: SmolCode2Wav, long_rows: Array, beyond: int) -> None:
    with pytest.raises(BadRequest, match=r"^resume\.positions: "):
        await sounds_of(code2wav, long_rows, sample=len(long_rows) * SAMPLES_PER_ROW + beyond)
    assert code2wav.load().queued == 0


async def test_rows_that_are_skipped_are_checked_all_the_same(code2wav: SmolCode2Wav, long_rows: Array) -> None:
    bad = np.delete(long_rows, 10, axis=0)
    with pytest.raises(BadRequest, match="out of order"):
        await sounds_of(code2wav, bad, sample=100_000)
