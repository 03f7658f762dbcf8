"""Code2Wav: samples that depend on the rows alone, however they arrive and however they are cut into chunks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from helpers import lengths
from helpers.speech import Array, arrays, chunks_of, rows_of, samples_of
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.weights import load_weights
from omnistage.models.interface import BadRequest, Piece, WaveRequest
from omnistage.models.smol.code2wav import SAMPLES_PER_ROW, SCHEDULES, SmolCode2Wav, WaveSession, chunk_rows, load_code2wav
from omnistage.models.smol.prosody import COUNT, F0, FEATURE_WIDTH, INDEX
from omnistage.models.smol.talker import SmolTalker
from omnistage.models.smol.waveform import SpectrumNet, noise

TEXT = "The sky is blue because air scatters light. Is that clear? It took 150 years."
CUTS = 100


@pytest.fixture
async def rows(talker: SmolTalker) -> Array:
    return await rows_of(talker, TEXT)


@pytest.fixture(scope="module")
def net(default_model: Path) -> SpectrumNet:
    one = SpectrumNet()
    load_weights(one, default_model / "code2wav")
    return one


def decoded(net: SpectrumNet, rows: Array, schedule: tuple[int, ...], seed: int = 0) -> Array:
    session = WaveSession(net, seed, schedule)
    session.feed(0, rows)
    session.end()
    chunks = []
    while session.ready():
        chunks.append(session.step().samples)
    return np.concatenate(chunks)


def cut(rows: Array, draw: random.Random) -> list[Array]:
    places = sorted(draw.sample(range(1, len(rows)), draw.randrange(1, 30)))
    return np.split(rows, places)


async def test_it_tells_how_many_speak_in_real_time(code2wav: SmolCode2Wav) -> None:
    await code2wav.warm_up()
    assert float(code2wav.info.settings["real_time_speakers"].split(",")[0]) > 0


async def test_every_row_gives_its_samples(code2wav: SmolCode2Wav, rows: Array) -> None:
    samples = await samples_of(code2wav, rows)
    assert samples.shape == (len(rows) * SAMPLES_PER_ROW, 1)
    assert samples.dtype == np.float32
    assert np.abs(samples).max() <= 1
    assert np.sqrt(np.mean(samples**2)) > 0.01


@lengths.rounds(20, 100)
def test_chunked_equals_whole_across_phrases(net: SpectrumNet, rows: Array, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    whole = decoded(net, rows, (4096,))
    for _ in range(rounds):
        schedule = (*(draw.randrange(1, 80) for _ in range(draw.randrange(12))), draw.randrange(8, 80))
        assert np.abs(decoded(net, rows, schedule) - whole).max() <= 1e-5


@lengths.rounds(8, 25)
async def test_samples_do_not_depend_on_arrival(code2wav: SmolCode2Wav, rows: Array, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    expected = await chunks_of(code2wav, rows)
    for number in range(rounds):
        parts = np.split(rows, len(rows)) if number == 0 else cut(rows, draw)
        got = await chunks_of(code2wav, *parts)
        assert [len(chunk) for chunk in got] == [len(chunk) for chunk in expected]
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


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
    assert 1 <= rows <= left
    assert rows < 2 * schedule[-1]
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


def test_another_noise_changes_nothing_else(net: SpectrumNet, rows: Array) -> None:
    one, same, other = (decoded(net, rows, SCHEDULES["balanced"], seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.9


async def test_all_seeds_sound_alike(code2wav: SmolCode2Wav, rows: Array) -> None:
    """A client that asks for a seed means the words: the noise of a voice is always the same."""
    one, other = [await samples_of(code2wav, rows, request=WaveRequest(seed=seed)) for seed in (1, 2)]
    assert np.array_equal(one, other) and code2wav.info.draws is False


async def test_no_rows_give_no_sound(code2wav: SmolCode2Wav) -> None:
    assert await chunks_of(code2wav) == []
    assert await chunks_of(code2wav, np.empty((0, FEATURE_WIDTH), np.float32)) == []


@pytest.mark.parametrize("count", [1, 2, 10, 40])
async def test_stream_that_breaks_off_ends_where_its_rows_end(code2wav: SmolCode2Wav, rows: Array, count: int) -> None:
    samples = await samples_of(code2wav, rows[:count])
    assert samples.shape == (count * SAMPLES_PER_ROW, 1)
    assert np.isfinite(samples).all()


def broken(rows: Array, place: tuple[int, int], value: float) -> Array:
    copy = rows.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize("damage", ["nan", "index", "count", "no phrase", "fraction", "missing row"])
async def test_malformed_rows_are_refused(code2wav: SmolCode2Wav, rows: Array, damage: str) -> None:
    bad = {
        "nan": broken(rows, (3, 5), np.nan),
        "index": broken(rows, (2, INDEX), 7),
        "count": broken(rows, (2, COUNT), 7),
        "no phrase": broken(rows, (0, COUNT), 0),
        "fraction": broken(rows, (0, COUNT), 5.5),
        "missing row": np.delete(rows, 4, axis=0),
    }[damage]
    with pytest.raises(BadRequest) as refused:
        [chunk async for chunk in code2wav.decode(WaveRequest(seed=0), arrays([bad]), {"audio": 0})]
    assert refused.value.field == "features"
    assert code2wav.load().queued == 0


async def test_wild_but_finite_values_stay_in_range(code2wav: SmolCode2Wav, rows: Array) -> None:
    wild = rows.copy()
    wild[:, : F0.stop] *= 1e6
    samples = await samples_of(code2wav, wild)
    assert np.isfinite(samples).all()
    assert np.abs(samples).max() <= 1


async def test_cancel_at_any_moment_leaves_nothing_queued(code2wav: SmolCode2Wav, rows: Array, seed: int) -> None:
    draw = random.Random(seed)
    expected = await samples_of(code2wav, rows[:120])

    async def listen() -> None:
        async for _ in code2wav.decode(WaveRequest(seed=0), arrays([rows]), {"audio": 0}):
            await asyncio.sleep(0)

    for _ in range(60):
        tasks = [asyncio.create_task(listen()) for _ in range(3)]
        await asyncio.sleep(draw.random() * 0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert code2wav.load().queued == 0
    assert np.array_equal(await samples_of(code2wav, rows[:120]), expected)


async def test_sessions_at_once_do_not_touch_each_other(code2wav: SmolCode2Wav, rows: Array) -> None:
    requests = [WaveRequest(seed=seed) for seed in range(4)]
    alone = [await samples_of(code2wav, rows, request=request) for request in requests]
    together = await asyncio.gather(*(samples_of(code2wav, rows, request=request) for request in requests))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape"])
def test_incomplete_weights_are_refused(default_model: Path, tmp_path: Path, damage: str) -> None:
    weights = load_file(default_model / "code2wav" / "model.safetensors")
    if damage == "missing":
        del weights["dec.3.pw1.weight"]
    elif damage == "unexpected":
        weights["dec.9.pw1.weight"] = weights["dec.3.pw1.weight"]
    else:
        weights["dec.3.pw1.weight"] = weights["dec.3.pw1.weight"][:-1]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hibari-code2wav", "source_sha256": "0"}))
    with pytest.raises(BadCheckpoint, match=r"dec\.[39]\.pw1\.weight"):
        load_code2wav(tmp_path)
