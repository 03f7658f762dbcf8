"""Code2Wav of Qwen2.5-Omni: the sound of Transformers where it computes the whole, near to it where it does not wait for that, and the same
bits however codes come, whoever else speaks, and wherever a replica goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.wave_reference import WaveReference
from helpers.waves import BLOCK, ENDS, SAMPLES, STREAMED, Codes, Samples, decibels, drawn, joined, samples, solved, sounded, sounds
from omnistage.models.interface import Piece, Sound, WaveRequest
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav, PreparedSpeech, Speech, read_parts
from omnistage.models.qwen2_5_omni.wave.config import SCHEDULES, read_wave_config, schedule_of
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD
from omnistage.models.qwen2_5_omni.wave.window import Solver

# Against Transformers --------------------------------------------------------------------------------------------------------------


@lengths.rounds(1, 9)
async def test_all_at_once_it_is_the_sound_of_transformers(
    published: FlowCode2Wav, omni_checkpoint: Path, seed: int, rounds: int, request: pytest.FixtureRequest
) -> None:
    """In the long form also long speeches, in a third of the steps: what is more in them has nothing to do with how many there are."""
    reference, source = WaveReference(omni_checkpoint), random.Random(seed)
    for number in range(seed, seed + rounds):
        speeches = [(published, 9, (1, 9 * BLOCK))]
        if rounds > 1:
            brief = request.getfixturevalue("brief")
            speeches += [(brief, 3, (24 * BLOCK + 1, 26 * BLOCK)), (brief, 3, (1, 34 * BLOCK))]
        model, steps, bounds = speeches[number % len(speeches)]
        count = source.randint(*bounds)
        codes, voice = drawn(source, count), source.choice(published.info.voices)
        made = await samples(model, codes, WaveRequest(number, "offline", voice=voice))
        expected = reference.sound(codes, voice, number, steps)
        assert made.shape == expected.shape == (SAMPLES * count,)
        assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max(), f"{count} codes of {voice}"


@lengths.long_form(
    "models/qwen2_5_omni/test_code2wav.py::test_a_block_depends_on_no_more_than_its_neighbours",
    unkept="the sound of each profile is near to the whole",
)
async def test_a_window_that_looks_ahead_comes_near_to_the_whole(published: FlowCode2Wav, seed: int) -> None:
    """Each block that is looked at ahead makes what is missing much smaller; with random weights a block is worth more than it will be with
    real ones."""
    codes = drawn(random.Random(seed), 100)
    whole = await samples(published, codes, WaveRequest(seed, "offline"))
    near = {profile: decibels(await samples(published, codes, WaveRequest(seed, profile)), whole) for profile in STREAMED}
    assert near["balanced"] > 45 and near["latency"] > 45 and near["quality"] > near["balanced"] + 20, near


@lengths.long_form(
    "models/qwen2_5_omni/test_code2wav.py::test_a_block_depends_on_no_more_than_its_neighbours",
    "models/qwen2_5_omni/test_code2wav.py::test_a_sample_depends_on_no_more_frames_than_are_kept_for_it",
)
async def test_who_looks_as_far_ahead_as_anything_depends_makes_the_whole(quick: FlowCode2Wav, seed: int) -> None:
    """With two evaluations that is two blocks. The first refresh is behind the end of this speech."""
    codes, speaker = drawn(random.Random(seed), 18 * BLOCK - 5), next(iter(quick._speakers.values()))
    whole = await samples(quick, codes, WaveRequest(seed, "offline"))
    near = list[float]()
    for ahead in (1, 2, 3):
        speech = Speech(quick.config, quick.windows, PreparedSpeech(seed, schedule_of((1, 2, 3, 6), ahead, BLOCK), speaker))
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


@lengths.one_or_all("profile", SCHEDULES)
async def test_the_bits_do_not_depend_on_how_codes_come(quick: FlowCode2Wav, seed: int, profile: str) -> None:
    source = random.Random(seed)
    profile = lengths.draw(profile, SCHEDULES, seed)
    codes = drawn(source, source.randint(50, 110))
    whole = await samples(quick, codes, WaveRequest(seed, profile))
    assert len(whole) == SAMPLES * len(codes)
    sizes: list[Callable[[], int]] = [lambda: 1, lambda: source.randint(0, 40)]
    for size in sizes:
        assert np.array_equal(joined(await sounds(quick, codes, WaveRequest(seed, profile), size=size)), whole)
    assert not np.array_equal(await samples(quick, codes, WaveRequest(seed + 1, profile)), whole)


@lengths.long_form(
    "models/qwen2_5_omni/test_code2wav.py::test_sound_goes_on_in_what_would_be_the_next_window",
    "models/contract/test_contract.py::test_contract_of_a_slow_model",
)
@lengths.one_or_all("profile", SCHEDULES)
@lengths.rounds(1, 20)
async def test_sound_goes_on_at_any_sample_with_the_same_bits(quick: FlowCode2Wav, seed: int, profile: str, rounds: int) -> None:
    """From the code that the model asks for, from that which a sound before said is needed, or from any before it."""
    source = random.Random(seed)
    profile = lengths.draw(profile, SCHEDULES, seed)
    codes, request = drawn(source, source.randint(220, 350)), WaveRequest(seed, profile)
    made = await sounds(quick, codes, request)
    whole, borders, prepared = joined(made), np.cumsum([len(sound.samples) for sound in made]).tolist(), await quick.prepare(request)
    for sample in (0, 1, len(whole), *source.choices(borders, k=rounds), *(source.randrange(len(whole)) for _ in range(rounds))):
        asked, told = quick.first_frame(prepared, sample), 0
        for border, each in zip(borders, made, strict=True):
            told = each.needs if border <= sample else told
        first = source.choice((asked, told, source.randint(0, max(asked, told))))
        rest = await sounds(quick, codes, request, sample=sample, first=min(first, asked), size=lambda: source.randint(1, 50))
        assert np.array_equal(joined(rest), whole[sample:]), f"sample {sample}, codes from {first}"
        assert all(len(sound.samples) for sound in rest)


@lengths.one_or_all("profile", STREAMED)
async def test_sound_goes_on_in_what_would_be_the_next_window(quick: FlowCode2Wav, seed: int, profile: str) -> None:
    """A speech that ends where a window is already whole but for what it looks ahead at: there the last one reaches beyond its chunk, also
    where the next would be fresh."""
    profile = lengths.draw(profile, STREAMED, seed)
    source, (sizes, ahead) = random.Random(seed), SCHEDULES[profile]
    schedule = schedule_of(sizes, ahead, BLOCK)
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


@lengths.rounds(4, 14)
async def test_many_at_once_have_the_bits_that_each_has_alone(brief: FlowCode2Wav, seed: int, rounds: int) -> None:
    """Speeches of all lengths and profiles, in all phases; some are given up meanwhile."""
    source = random.Random(seed)
    asked = [(drawn(source, source.randint(1, 40)), WaveRequest(seed + n, source.choice(STREAMED))) for n in range(rounds)]

    async def later(codes: Codes, request: WaveRequest) -> Samples:
        await asyncio.sleep(source.random())
        return joined(await sounds(brief, codes, request, size=lambda: source.randint(1, 30)))

    given_up = [asyncio.create_task(later(*each)) for each in asked[:3]]
    together = [asyncio.create_task(later(*each)) for each in asked]
    for task in given_up:
        await asyncio.sleep(0.3 * source.random())
        task.cancel()
    made = await asyncio.gather(*together)
    await asyncio.gather(*given_up, return_exceptions=True)
    for each, heard in zip(asked, made, strict=True):
        assert np.array_equal(await samples(brief, *each), heard)
    assert brief.load().queued == 0


async def test_voices_differ_and_the_seed_counts(quick: FlowCode2Wav, seed: int) -> None:
    codes = drawn(random.Random(seed), 30)
    first, *others = [await samples(quick, codes, WaveRequest(seed, voice=voice)) for voice in ("", *quick.info.voices)]
    assert np.array_equal(first, others[0]) and not np.array_equal(first, others[1])


# Lengths and ends ------------------------------------------------------------------------------------------------------------------


@lengths.one_or_all("profile", SCHEDULES)
async def test_a_code_has_480_samples(quick: FlowCode2Wav, seed: int, profile: str) -> None:
    source, profile = random.Random(seed), lengths.draw(profile, SCHEDULES, seed)
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


async def test_a_speech_ends_with_what_ends_it(quick: FlowCode2Wav, seed: int) -> None:
    """Ends are no codes; what follows one is passed over."""
    source = random.Random(seed)
    codes, request = drawn(source, 40), WaveRequest(seed)
    whole = await samples(quick, codes, request)
    for end in ENDS:
        ended = np.concatenate((codes, [[end]], drawn(source, source.randint(0, 30)), [[8447]])).astype(np.uint32)
        assert np.array_equal(joined(await sounds(quick, ended, request, size=lambda: source.randint(1, 9))), whole)
        assert await sounds(quick, np.full((source.randint(1, 30), 1), end, np.uint32), request) == []


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
