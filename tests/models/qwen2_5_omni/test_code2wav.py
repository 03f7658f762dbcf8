"""Code2Wav of Qwen2.5-Omni: the sound of Transformers where it computes the whole, near to it where it does not wait for that, and the same
bits however codes come, whoever else speaks, and wherever a replica goes on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers import lengths
from helpers.waiting import until
from helpers.wave_reference import WaveReference
from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.memory import private_bytes
from omnistage.models.common.worker import Worker
from omnistage.models.errors import LoadError
from omnistage.models.interface import BadRequest, Piece, Sound, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav
from omnistage.models.qwen2_5_omni.wave.config import read_wave_config
from omnistage.models.qwen2_5_omni.wave.loading import load_code2wav, read_parts
from omnistage.models.qwen2_5_omni.wave.schedule import PROFILES, Schedule
from omnistage.models.qwen2_5_omni.wave.solver import Solver
from omnistage.models.qwen2_5_omni.wave.speech import Prepared, Speech, sound
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD
from omnistage.models.qwen2_5_omni.wave.window import Flow, Vocoding

pytestmark = pytest.mark.slow

Codes = NDArray[np.uint32]
Samples = NDArray[np.float32]

SAMPLES = 480
"""Of a code."""
BLOCK = 12
ENDS = (8292, 8294)
STREAMED = ("latency", "balanced", "quality")


def loaded(folder: Path, **options: int | str) -> FlowCode2Wav:
    return load_code2wav(folder, LoadOptions(path=folder, family=options))


@pytest.fixture(scope="module")
def published(omni_checkpoint: Path) -> Iterator[FlowCode2Wav]:
    """As it was published: 9 steps of the Runge-Kutta method."""
    model = loaded(omni_checkpoint)
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="module")
def quick(omni_checkpoint: Path) -> Iterator[FlowCode2Wav]:
    """Two evaluations: what is claimed has nothing to do with how many there are."""
    model = loaded(omni_checkpoint, solver="euler", steps=2)
    yield model
    asyncio.run(model.close())


def drawn(source: random.Random, count: int) -> Codes:
    return np.array([[source.randrange(8193)] for _ in range(count)], np.uint32).reshape(-1, 1)


async def arriving(codes: Codes, first: int, size: Callable[[], int]) -> AsyncIterator[Piece]:
    """Codes from the place `first` on, in pieces; the end comes with the last of them. Memory of a piece is used again for the next."""
    while True:
        part = codes[first : first + size()].copy()
        yield Piece("codes", first, first + len(part) >= len(codes), part)
        first += len(part)
        part.fill(1 << 31)
        if first >= len(codes):
            return


async def sounds(
    model: FlowCode2Wav,
    codes: Codes,
    request: WaveRequest,
    *,
    sample: int = 0,
    first: int | None = None,
    size: Callable[[], int] = lambda: 1 << 20,
) -> list[Sound]:
    """first: code that comes first; None: the first that the model asks for."""
    prepared = await model.prepare(request)
    first = model.first_frame(prepared, sample) if first is None else first
    return [sound async for sound in model.decode(prepared, arriving(codes, first, size), {"audio": sample})]


async def samples(model: FlowCode2Wav, codes: Codes, request: WaveRequest, **how: int) -> Samples:
    return joined(await sounds(model, codes, request, **how))  # type: ignore[arg-type]


def joined(made: Sequence[Sound]) -> Samples:
    return np.concatenate([np.empty(0, np.float32), *(sound.samples[:, 0] for sound in made)])


def solved(model: FlowCode2Wav, flow: Flow) -> Flow:
    while not flow.done:
        model.windows.step([flow])
    return flow


def sounded(model: FlowCode2Wav, vocoding: Vocoding) -> Sound:
    while not vocoding.done:
        model.windows.step([vocoding])
    return sound(vocoding)


def decibels(made: Samples, expected: Samples) -> float:
    """Of the signal over what differs."""
    return float(10 * np.log10((expected.astype(np.float64) ** 2).mean() / ((made.astype(np.float64) - expected) ** 2).mean()))


# Against Transformers --------------------------------------------------------------------------------------------------------------


@lengths.rounds(2, 8)
async def test_all_at_once_it_is_the_sound_of_transformers(published: FlowCode2Wav, omni_checkpoint: Path, seed: int, rounds: int) -> None:
    reference, source = WaveReference(omni_checkpoint), random.Random(seed)
    for number in range(rounds):
        count = (source.randint(1, 30), source.randint(31, 120))[number % 2]
        codes, voice = drawn(source, count), source.choice(published.info.voices)
        made = await samples(published, codes, WaveRequest(seed + number, "offline", voice=voice))
        expected = reference.sound(codes, voice, seed + number)
        assert made.shape == expected.shape == (SAMPLES * count,)
        assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max(), f"{count} codes of {voice}"


async def test_a_window_that_looks_ahead_comes_near_to_the_whole(published: FlowCode2Wav, seed: int) -> None:
    """Each block that is looked at ahead makes what is missing much smaller; with random weights a block is worth more than it will be with
    real ones."""
    codes = drawn(random.Random(seed), 150)
    whole = await samples(published, codes, WaveRequest(seed, "offline"))
    near = {profile: decibels(await samples(published, codes, WaveRequest(seed, profile)), whole) for profile in STREAMED}
    assert near["balanced"] > 45 and near["latency"] > 45 and near["quality"] > near["balanced"] + 20, near


async def test_who_looks_as_far_ahead_as_anything_depends_makes_the_whole(quick: FlowCode2Wav, seed: int) -> None:
    """With two evaluations that is two blocks. The first refresh is behind the end of this speech."""
    codes, speaker = drawn(random.Random(seed), 18 * BLOCK - 5), next(iter(quick._speakers.values()))
    whole = await samples(quick, codes, WaveRequest(seed, "offline"))
    near = list[float]()
    for ahead in (1, 2, 3):
        speech = Speech(quick.config, quick.windows, Prepared(seed, Schedule((1, 2, 3, 6), ahead, BLOCK), speaker))
        speech.feed(0, codes, last=True)
        made = list[Sound]()
        while (job := speech.next()) is not None:
            made.append(sounded(quick, speech.solved(solved(quick, job))))
        near.append(decibels(joined(made), whole))
    assert near[0] < 90 < near[1] and near[2] > 90, near


@pytest.mark.parametrize("evaluations", [1, 2, 4])
def test_a_block_depends_on_no_more_than_its_neighbours(omni_checkpoint: Path, seed: int, evaluations: int) -> None:
    """Each evaluation sees one block more ahead and two more back."""
    source, blocks, solver = random.Random(seed), 14, Solver.of("euler", evaluations)
    windows, speakers = read_parts(omni_checkpoint, read_wave_config(omni_checkpoint), solver, torch.device("cpu"))
    config, dit, speaker = windows.dit.config, windows.dit, speakers["Chelsie"]
    codes, changed = torch.from_numpy(drawn(source, blocks * BLOCK)[:, 0].astype(np.int64)), source.randrange(4, 6)

    def solved(codes: torch.Tensor) -> torch.Tensor:
        point = torch.randn(1, blocks * config.block_frames, config.mel_bins, generator=torch.Generator().manual_seed(seed))
        condition = dit.conditions(codes, speaker, blocks)
        for number, (begin, end) in enumerate(zip(solver.times[:-1], solver.times[1:], strict=True)):
            slope, _ = dit.slopes(point, condition, [number], blocks * config.block_frames, None, None)
            point = point + slope * (end - begin)
        return point[0].view(blocks, -1)

    with torch.inference_mode():
        others = codes.clone()
        others[changed * BLOCK + source.randrange(BLOCK)] += 1
        differs = (solved(codes) != solved(others)).any(1).nonzero()[:, 0].tolist()
    assert differs[0] == max(changed - evaluations, 0) and differs[-1] == min(changed + 2 * evaluations, blocks - 1)


# The same bits ---------------------------------------------------------------------------------------------------------------------


@lengths.one_or_all("profile", PROFILES)
async def test_the_bits_do_not_depend_on_how_codes_come(quick: FlowCode2Wav, seed: int, profile: str) -> None:
    source = random.Random(seed)
    profile = lengths.draw(profile, PROFILES, seed)
    codes = drawn(source, source.randint(60, 500))
    whole = await samples(quick, codes, WaveRequest(seed, profile))
    assert len(whole) == SAMPLES * len(codes)
    sizes: list[Callable[[], int]] = [lambda: 1, lambda: 7, lambda: source.randint(0, 40)]
    for size in sizes:
        assert np.array_equal(joined(await sounds(quick, codes, WaveRequest(seed, profile), size=size)), whole)
    assert not np.array_equal(await samples(quick, codes, WaveRequest(seed + 1, profile)), whole)


@lengths.one_or_all("profile", PROFILES)
@lengths.rounds(2, 20)
async def test_sound_goes_on_at_any_sample_with_the_same_bits(quick: FlowCode2Wav, seed: int, profile: str, rounds: int) -> None:
    """From the code that the model asks for, from that which a sound before said is needed, and from any before it."""
    source = random.Random(seed)
    profile = lengths.draw(profile, PROFILES, seed)
    codes, request = drawn(source, source.randint(300, 700)), WaveRequest(seed, profile)
    made = await sounds(quick, codes, request)
    whole, borders, prepared = joined(made), np.cumsum([len(sound.samples) for sound in made]).tolist(), await quick.prepare(request)
    for sample in (0, 1, len(whole), *source.choices(borders, k=rounds), *(source.randrange(len(whole)) for _ in range(rounds))):
        asked, told = quick.first_frame(prepared, sample), 0
        for border, each in zip(borders, made, strict=True):
            told = each.needs if border <= sample else told
        for first in (asked, told, source.randint(0, max(asked, told))):
            rest = await sounds(quick, codes, request, sample=sample, first=min(first, asked), size=lambda: source.randint(1, 50))
            assert np.array_equal(joined(rest), whole[sample:]), f"sample {sample}, codes from {first}"
            assert all(len(sound.samples) for sound in rest)


@pytest.mark.parametrize("profile", STREAMED)
async def test_sound_goes_on_in_what_would_be_the_next_window(quick: FlowCode2Wav, seed: int, profile: str) -> None:
    """A speech that ends where a window is already whole but for what it looks ahead at: there the last one reaches beyond its chunk, also
    where the next would be fresh."""
    source, (sizes, ahead) = random.Random(seed), PROFILES[profile]
    schedule = Schedule(sizes, ahead, BLOCK)
    fresh = next(number for number in range(1, 99) if schedule.first_code(number) < schedule.begin(number))
    codes, request = drawn(source, schedule.begin(fresh) + source.randint(2, ahead * BLOCK - 1)), WaveRequest(seed, profile)
    whole = await samples(quick, codes, request)
    for sample in (SAMPLES * (schedule.begin(fresh) + 1), len(whole) - 1, source.randrange(SAMPLES * schedule.begin(fresh), len(whole))):
        assert np.array_equal(await samples(quick, codes, request, sample=sample), whole[sample:])


async def test_what_must_be_computed_again_is_bounded(quick: FlowCode2Wav) -> None:
    """However long the speech is."""
    for profile in STREAMED:
        prepared = await quick.prepare(WaveRequest(0, profile))
        behind = [sample // SAMPLES - quick.first_frame(prepared, sample) for sample in range(0, 1 << 24, 4801)]
        assert min(behind) >= 0 and max(behind) <= (24 + 6 + 2 + 2) * BLOCK


@lengths.rounds(6, 14)
async def test_many_at_once_have_the_bits_that_each_has_alone(published: FlowCode2Wav, seed: int, rounds: int) -> None:
    """Speeches of all lengths and profiles, in all phases; some are given up meanwhile."""
    source = random.Random(seed)
    asked = [(drawn(source, source.randint(1, 60)), WaveRequest(seed + n, source.choice(STREAMED))) for n in range(rounds)]

    async def later(codes: Codes, request: WaveRequest) -> Samples:
        await asyncio.sleep(source.random())
        return joined(await sounds(published, codes, request, size=lambda: source.randint(1, 30)))

    given_up = [asyncio.create_task(later(*each)) for each in asked[:3]]
    together = [asyncio.create_task(later(*each)) for each in asked]
    for task in given_up:
        await asyncio.sleep(0.3 * source.random())
        task.cancel()
    made = await asyncio.gather(*together)
    await asyncio.gather(*given_up, return_exceptions=True)
    for each, heard in zip(asked, made, strict=True):
        assert np.array_equal(await samples(published, *each), heard)
    assert published.load().queued == 0


async def test_voices_differ_and_the_seed_counts(quick: FlowCode2Wav, seed: int) -> None:
    codes = drawn(random.Random(seed), 30)
    first, *others = [await samples(quick, codes, WaveRequest(seed, voice=voice)) for voice in ("", *quick.info.voices)]
    assert np.array_equal(first, others[0]) and not np.array_equal(first, others[1])


# Lengths and ends ------------------------------------------------------------------------------------------------------------------


async def test_a_code_has_480_samples(quick: FlowCode2Wav, seed: int) -> None:
    source = random.Random(seed)
    for profile in PROFILES:
        for count in (0, 1, 11, 12, 13, 24, 25, source.randint(26, 200)):
            assert len(await samples(quick, drawn(source, count), WaveRequest(seed, profile))) == SAMPLES * count


async def test_the_first_sound_needs_two_blocks_of_codes(quick: FlowCode2Wav, seed: int) -> None:
    """12 codes of it are heard, 12 are looked at ahead."""
    codes = drawn(random.Random(seed), 25)
    prepared, heard = await quick.prepare(WaveRequest(seed, "balanced")), asyncio.Event()

    async def one_by_one() -> AsyncIterator[Piece]:
        for came in range(1, 2 * BLOCK + 1):
            yield Piece("codes", came - 1, False, codes[came - 1 : came])
        await heard.wait()
        yield Piece("codes", 2 * BLOCK, True, codes[2 * BLOCK :])

    async with aclosing(quick.decode(prepared, one_by_one(), {"audio": 0})) as made:
        assert len((await anext(made)).samples) == BLOCK * SAMPLES
        heard.set()
        assert len((await anext(made)).samples) == (BLOCK + 1) * SAMPLES


async def test_two_windows_are_made_while_one_is_on_its_way(quick: FlowCode2Wav, seed: int) -> None:
    """And no more: who does not take its sound holds up who makes the codes."""
    codes = drawn(random.Random(seed), 40 * BLOCK)
    prepared, came = await quick.prepare(WaveRequest(seed, "balanced")), 0

    async def by_blocks() -> AsyncIterator[Piece]:
        nonlocal came
        for came in range(BLOCK, len(codes) + 1, BLOCK):
            yield Piece("codes", came - BLOCK, came == len(codes), codes[came - BLOCK : came])

    async with aclosing(quick.decode(prepared, by_blocks(), {"audio": 0})) as made:
        for number in range(6):
            await anext(made)
            needed = prepared.schedule.window(number + 2, 1 << 62, ended=False)
            assert needed is not None
            await until(lambda past=needed.past: came >= past)  # type: ignore[misc]
            await until(lambda: quick.load().queued == 0)
            assert came == needed.past


async def test_a_speech_ends_with_what_ends_it(quick: FlowCode2Wav, seed: int) -> None:
    """Ends are no codes; what follows one is passed over."""
    source = random.Random(seed)
    codes, request = drawn(source, 40), WaveRequest(seed)
    whole = await samples(quick, codes, request)
    for end in ENDS:
        ended = np.concatenate((codes, [[end]], drawn(source, source.randint(0, 30)), [[8447]])).astype(np.uint32)
        assert np.array_equal(joined(await sounds(quick, ended, request, size=lambda: source.randint(1, 9))), whole)
        assert await sounds(quick, np.full((source.randint(1, 30), 1), end, np.uint32), request) == []


async def test_what_is_kept_of_a_speech_does_not_grow(quick: FlowCode2Wav, seed: int) -> None:
    source, sizes = random.Random(seed), set[tuple[int, ...]]()
    speech = Speech(quick.config, quick.windows, await quick.prepare(WaveRequest(seed)))
    for number in range(3000 // BLOCK):
        speech.feed(number * BLOCK, drawn(source, BLOCK), last=False)
        while (job := speech.next()) is not None:
            # What it is computed from is what is asked here, not its sound: noise is as good as what is made of it.
            speech.solved(job)
            if number > 100:
                sizes.add((len(speech._codes), len(speech._before), 0 if speech._left is None else speech._left.nbytes))
    assert len(sizes) <= 6 and max(codes for codes, _, _ in sizes) <= 9 * BLOCK


@pytest.mark.timeout(600)
@lengths.rounds(40, 300)
async def test_minutes_of_speech_take_no_more_memory_than_its_beginning(quick: FlowCode2Wav, seed: int, rounds: int) -> None:
    """rounds: seconds. The first twenty are enough for all that is kept."""
    source, second = random.Random(seed), 24_000 // SAMPLES
    heard, resident = 0, dict[int, int]()

    async def by_blocks() -> AsyncIterator[Piece]:
        for first in range(0, rounds * second, BLOCK):
            count = min(BLOCK, rounds * second - first)
            yield Piece("codes", first, first + count == rounds * second, drawn(source, count))

    async with aclosing(quick.decode(await quick.prepare(WaveRequest(seed)), by_blocks(), {"audio": 0})) as made:
        async for each in made:
            heard += len(each.samples)
            resident[heard // 24_000] = private_bytes()
    assert heard == rounds * 24_000
    begun = max(size for at, size in resident.items() if at <= 20)
    assert max(resident.values()) - begun <= 8 << 20, {at: size >> 20 for at, size in resident.items()}


# How many threads there are -----------------------------------------------------------------------------------------------------------


@lengths.rounds(2, 20)
async def test_how_many_threads_there_are_changes_no_bit(omni_checkpoint: Path, quick: FlowCode2Wav, seed: int, rounds: int) -> None:
    others = [loaded(omni_checkpoint, solver="euler", steps=2, workers=workers) for workers in (1, 3)]
    source = random.Random(seed)
    for _ in range(rounds):
        speeches = [drawn(source, source.randint(1, 150)) for _ in range(source.choice((1, 4)))]
        request = WaveRequest(source.randrange(1 << 32), source.choice(STREAMED))
        made = [await asyncio.gather(*(samples(model, codes, request) for codes in speeches)) for model in (quick, *others)]
        assert all(np.array_equal(a, b) and np.array_equal(a, c) for a, b, c in zip(*made, strict=True))
    assert {model.info.revision for model in others} == {quick.info.revision}
    assert [len(model.threads) for model in others] == [1, 3]
    await asyncio.gather(*(model.close() for model in others))


@lengths.rounds(6, 60)
async def test_two_threads_make_of_a_window_what_one_makes(omni_checkpoint: Path, seed: int, rounds: int) -> None:
    """To the last bit only where it is found to be so; so near everywhere."""
    source, solver, worker = random.Random(seed), Solver.of("euler", 3), Worker("aside", 1)
    windows, _ = read_parts(omni_checkpoint, read_wave_config(omni_checkpoint), solver, torch.device("cpu"))
    dit = windows.dit
    for _ in range(rounds):
        count, blocks, keep = source.randint(1, 3), source.randint(1, 8), source.choice((None, 0))
        frames = blocks * dit.config.block_frames - source.choice((0, source.randrange(dit.config.block_frames)))
        points = torch.randn(count, blocks * dit.config.block_frames, dit.config.mel_bins)
        conditions = torch.randn(2 * count, points.shape[1], dit.config.hidden_size)
        at = [source.randrange(3) for _ in range(count)]
        left = source.choice((None, torch.randn(count, *dit.kept_shape())))
        with torch.inference_mode():
            one, two = (dit.slopes(points, conditions, at, frames, left, keep, aside) for aside in (None, worker.aside))
        assert torch.allclose(one[0][:, :frames], two[0][:, :frames], rtol=1e-4, atol=1e-5)
        if one[1] is not None and two[1] is not None:
            assert torch.allclose(one[1], two[1], rtol=1e-4, atol=1e-5)
        assert (one[1] is None) == (two[1] is None) == (keep is None)
    await worker.close()


async def test_an_error_of_the_second_thread_leaves_the_window_as_it_was(quick: FlowCode2Wav, seed: int) -> None:
    """And neither thread is left with the work."""
    codes, worker = drawn(random.Random(seed), 3 * BLOCK), Worker("aside", 1)
    await worker.close()
    prepared, flows = await quick.prepare(WaveRequest(seed, "latency")), list[Flow]()
    for _ in range(2):
        speech = Speech(quick.config, quick.windows, prepared)
        speech.feed(0, codes, last=False)
        flow = speech.next()
        assert flow is not None
        flows.append(flow)
    with pytest.raises(RuntimeError, match="closed"):
        quick.windows.step([flows[0]], worker.aside)
    assert torch.equal(solved(quick, flows[0]).mel, solved(quick, flows[1]).mel)


def test_a_sample_depends_on_no_more_frames_than_are_kept_for_it(quick: FlowCode2Wav, seed: int) -> None:
    """So the vocoder makes of a piece with so many on each side what it makes of the whole."""
    source, vocoder = random.Random(seed), quick.windows.vocoder
    mel, hop = torch.randn(1, 4 * FIELD, quick.config.dit.mel_bins), quick.config.vocoder.frame_samples
    changed, frame = mel.clone(), source.randrange(FIELD, 3 * FIELD)
    changed[0, frame] += 1
    with torch.inference_mode():
        one, other = (vocoder.samples(each, 0, 0) for each in (mel, changed))
    differs = (one != other).flatten().nonzero()[:, 0]
    assert (frame - FIELD) * hop <= differs.min() < frame * hop
    assert (frame + 1) * hop <= differs.max() < (frame + FIELD + 1) * hop


# What is refused -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [8194, 8293, 8296, 1 << 31])
async def test_a_code_that_there_is_not_is_refused(quick: FlowCode2Wav, seed: int, wrong: int) -> None:
    codes = drawn(random.Random(seed), 60)
    whole = await samples(quick, codes, WaveRequest(seed))
    bad = codes.copy()
    bad[50] = wrong
    with pytest.raises(BadRequest, match=f"no code {wrong}; codes are below 8194"):
        await sounds(quick, bad, WaveRequest(seed), size=lambda: 5)
    assert np.array_equal(await samples(quick, codes, WaveRequest(seed)), whole)


async def test_codes_that_are_missing_are_told(quick: FlowCode2Wav, seed: int) -> None:
    codes = drawn(random.Random(seed), 60)
    with pytest.raises(BadRequest, match="code 0 and those behind it are needed; the first that came is number 3"):
        await sounds(quick, codes, WaveRequest(seed), first=3)
    with pytest.raises(BadRequest, match=r"the sound has 28800 samples: it cannot go on at sample 28801"):
        await sounds(quick, codes, WaveRequest(seed), sample=28801)


async def test_a_voice_that_there_is_not_is_refused(quick: FlowCode2Wav) -> None:
    with pytest.raises(BadRequest, match=r"code2wav\.voice: no voice 'Nobody'; there are Chelsie, Ethan"):
        await quick.prepare(WaveRequest(0, voice="Nobody"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"solver": "heun"}, "option solver of the code2wav of qwen2_5_omni is 'heun'; there are rk4, midpoint, euler"),
        ({"steps": -1}, "option steps of the code2wav of qwen2_5_omni is -1; 0 leaves it to the model"),
        ({"steps": 101}, "option steps of the code2wav of qwen2_5_omni is 101; 100 is the most"),
        ({"lookahead": 37}, "option lookahead of the code2wav of qwen2_5_omni is 37; 36 is the most"),
        ({"speed": 1}, r"unknown options \['speed'\] of the code2wav of qwen2_5_omni"),
    ],
)
def test_options_that_cannot_be_are_refused(omni_checkpoint: Path, options: dict[str, int | str], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        loaded(omni_checkpoint, **options)


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        ("dit_config", "block_size", 25, "'block_size' is 25, no whole number of codes of 2 frames"),
        ("dit_config", "repeats", 0, "'repeats' is 0"),
        ("dit_config", "look_ahead_layers", [22], "layers look ahead or back that are not among the 22 that there are"),
        ("dit_config", "mel_dim", 40, "'mel_dim' is 40 of what is made, 80 of what is made to sound"),
        ("bigvgan_config", "upsample_rates", "5", "lacks the list 'upsample_rates'"),
        ("bigvgan_config", "resblock_dilation_sizes", [1, 3, 5], "lacks the list '0'"),
    ],
)
def test_a_config_that_cannot_be_is_told(copied: Path, section: str, name: str, value: object, told: str) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["token2wav_config"][section][name] = value
    (copied / "config.json").unlink()
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=told):
        read_wave_config(copied)


def test_whatever_changes_a_sample_changes_the_revision(quick: FlowCode2Wav, published: FlowCode2Wav, omni_checkpoint: Path) -> None:
    other = loaded(omni_checkpoint, solver="euler", steps=2, lookahead=2)
    asyncio.run(other.close())
    assert len({quick.info.revision, published.info.revision, other.info.revision}) == 3
