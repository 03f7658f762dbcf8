"""Code2Wav of Qwen3-Omni: the sound of Transformers in every profile, and the same bits however frames come, whoever else speaks, and
wherever a replica goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from helpers import lengths
from helpers.causal_waves import Codes, Samples, arriving, drawn, joined, reference, samples, sounds
from omnistage.models.interface import Piece, Profile, WaveRequest
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav, Speech, WindowJob
from omnistage.models.qwen3_omni.wave.config import SCHEDULES
from omnistage.models.worker import make_ahead

HEARD = (Profile.LATENCY, Profile.BALANCED, Profile.QUALITY)


@lengths.rounds(1, 6)
async def test_every_profile_is_the_sound_of_transformers(
    wave: CausalCode2Wav, other_wave: CausalCode2Wav, wave_folders: dict[str, Path], seed: int, rounds: int
) -> None:
    source = random.Random(seed)
    for number in range(2 * rounds):
        model, folder = ((wave, "tiny"), (other_wave, "other"))[number % 2]
        codes = drawn(model, source, source.randint(2, 70))
        with torch.inference_mode():
            expected = reference(wave_folders[folder], torch.float32)(torch.from_numpy(codes.astype(np.int64)).T[None])[0, 0].numpy()
        for profile in SCHEDULES:
            made = await samples(model, codes, WaveRequest(seed, profile))
            assert made.shape == expected.shape == (len(codes) * model.config.frame_samples - model.config.missing,)
            assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max(), f"{len(codes)} frames, {profile}"


async def test_the_end_of_a_speech_lacks_555_samples_and_nothing_between_windows_is_lost(wave: CausalCode2Wav, seed: int) -> None:
    source = random.Random(seed)
    for profile in SCHEDULES:
        for count in (0, 1, 2, 12, 13, source.randint(14, 60)):
            assert len(await samples(wave, drawn(wave, source, count), WaveRequest(seed, profile))) == max(1920 * count - 555, 0)


async def test_the_first_sound_needs_one_frame(wave: CausalCode2Wav, seed: int) -> None:
    codes = drawn(wave, random.Random(seed), 5)
    prepared, heard = await wave.prepare(WaveRequest(seed, Profile.LATENCY)), asyncio.Event()

    async def first_alone() -> AsyncIterator[Piece]:
        yield Piece("codes", 0, False, codes[:1])
        await heard.wait()
        yield Piece("codes", 1, True, codes[1:])

    async with aclosing(wave.decode(prepared, first_alone(), {"audio": 0})) as made:
        first = await anext(made)
        assert len(first.samples) == 1920 - 555 and first.prebuffer_s is not None and first.prebuffer_s >= 0
        heard.set()
        second = await anext(made)
        assert len(second.samples) == 1920 and second.prebuffer_s is None


# The same bits ---------------------------------------------------------------------------------------------------------------------


@lengths.one_or_all("profile", SCHEDULES)
async def test_the_bits_do_not_depend_on_how_frames_come(wave: CausalCode2Wav, seed: int, profile: str) -> None:
    source = random.Random(seed)
    profile = lengths.draw(profile, SCHEDULES, seed)
    codes = drawn(wave, source, source.randint(20, 90))
    whole = await samples(wave, codes, WaveRequest(seed, profile))
    sizes: list[Callable[[], int]] = [lambda: 1, lambda: 7, lambda: source.randint(0, 20)]
    for size in sizes:
        assert np.array_equal(joined(await sounds(wave, codes, WaveRequest(seed + 1, profile), size=size)), whole)


@lengths.one_or_all("profile", SCHEDULES)
@lengths.rounds(2, 20)
async def test_sound_goes_on_at_any_sample_with_the_same_bits(wave: CausalCode2Wav, seed: int, profile: str, rounds: int) -> None:
    """From the frame that the model asks for, from that which a sound before said is needed, or from any between."""
    source = random.Random(seed)
    profile = lengths.draw(profile, SCHEDULES, seed)
    codes, request = drawn(wave, source, source.randint(2 * wave.config.frames_before, 130)), WaveRequest(seed, profile)
    made = await sounds(wave, codes, request)
    whole, borders, prepared = joined(made), np.cumsum([len(sound.samples) for sound in made]).tolist(), await wave.prepare(request)
    for sample in (0, 1, len(whole), *source.choices(borders, k=rounds), *(source.randrange(len(whole)) for _ in range(rounds))):
        asked, told = wave.first_frame(prepared, sample), 0
        for border, each in zip(borders, made, strict=True):
            told = each.needs if border <= sample else told
        first = source.choice((asked, told, source.randint(0, asked)))
        rest = await sounds(wave, codes, request, sample=sample, first=first, size=lambda: source.randint(1, 30))
        assert np.array_equal(joined(rest), whole[sample:]), f"sample {sample}, frames from {first}"
        assert all(len(sound.samples) for sound in rest)


async def test_what_must_be_computed_again_is_bounded(wave: CausalCode2Wav) -> None:
    """However long the speech is: what the net looks back, and parts of the windows at both ends of it. Nearer to its beginning nothing
    more than all of it."""
    for profile in SCHEDULES:
        prepared = await wave.prepare(WaveRequest(0, profile))
        behind = [sample // 1920 - wave.first_frame(prepared, sample) for sample in range(0, 1 << 22, 4801)]
        assert min(behind) >= 0 and wave.config.frames_before <= max(behind) <= wave.config.frames_before + 2 * max(SCHEDULES[profile])


@lengths.rounds(6, 30)
async def test_many_at_once_have_the_bits_that_each_has_alone(wave: CausalCode2Wav, seed: int, rounds: int) -> None:
    """Speeches of all lengths and profiles, in all phases, some of which go on from elsewhere; some are given up meanwhile."""
    source = random.Random(seed)
    asked = [(drawn(wave, source, source.randint(1, 60)), WaveRequest(0, source.choice([*SCHEDULES])), n % 3 == 2) for n in range(rounds)]

    async def later(codes: Codes, request: WaveRequest, goes_on: bool) -> Samples:
        for _ in range(source.randrange(40)):
            await asyncio.sleep(0)
        sample = 1920 * len(codes) // 2 if goes_on else 0
        return joined(await sounds(wave, codes, request, sample=sample, size=lambda: source.randint(1, 30)))

    given_up = [asyncio.create_task(later(*each)) for each in asked[:3]]
    together = [asyncio.create_task(later(*each)) for each in asked]
    for task in given_up:
        for _ in range(source.randrange(200)):
            await asyncio.sleep(0)
        task.cancel()
    made = await asyncio.gather(*together)
    await asyncio.gather(*given_up, return_exceptions=True)
    for (codes, request, goes_on), heard in zip(asked, made, strict=True):
        whole = await samples(wave, codes, request)
        assert np.array_equal(whole[1920 * len(codes) // 2 if goes_on else 0 :], heard)
    assert wave.load().queued == 0


def test_speeches_at_different_phases_share_steps(wave: CausalCode2Wav, seed: int) -> None:
    """Near a beginning, in the middle, and one that goes on from elsewhere: windows of one size are of one shape. At a first frame, and
    where nothing is to sound, they are others."""
    source, windows = random.Random(seed), wave.windows
    net = windows.net

    def job(place: int, steps: int) -> WindowJob:
        state = net.start(place)
        for _ in range(steps):
            one = WindowJob(torch.from_numpy(drawn(wave, source, 4).astype(np.int64)), state)
            windows.step([one])
            assert one.after is not None
            state = one.after
        return WindowJob(torch.from_numpy(drawn(wave, source, 4).astype(np.int64)), state)

    jobs = [job(0, 1), job(0, 8), job(100, 0), job(100, 2)]
    first = job(0, 0)
    silent = replace(jobs[0], silent=True)
    assert len({windows.key(each) for each in jobs}) == 1 and len({windows.key(each) for each in (jobs[0], first, silent)}) == 3
    alone = [replace(each) for each in jobs]
    for each in alone:
        windows.step([each])
    windows.step(jobs)
    for made, own in zip(jobs, alone, strict=True):
        assert made.after is not None and own.after is not None and made.samples is not None and own.samples is not None
        assert made.after.place == own.after.place and made.after.seen == own.after.seen
        assert (made.samples - own.samples).abs().max() <= 1e-5 * own.samples.abs().max()


def test_what_a_silent_window_leaves_to_attention_is_the_same(wave: CausalCode2Wav, seed: int) -> None:
    codes = torch.from_numpy(drawn(wave, random.Random(seed), 6).astype(np.int64))
    heard, silent = WindowJob(codes, wave.windows.net.start(50)), WindowJob(codes, wave.windows.net.start(50), silent=True)
    for job in (heard, silent):
        wave.windows.step([job])
    assert heard.after is not None and silent.after is not None and silent.samples is not None
    assert torch.equal(heard.after.keys, silent.after.keys) and not len(silent.samples)


async def test_what_is_kept_of_a_speech_does_not_grow(wave: CausalCode2Wav, seed: int) -> None:
    source, prepared = random.Random(seed), await wave.prepare(WaveRequest(seed))
    speech, kept = Speech(wave.config, wave.windows.net, prepared.schedule), set[tuple[int, int]]()
    for frame in range(60):
        speech.feed(frame, drawn(wave, source, 1), last=False)
        while (job := speech.next()) is not None:
            wave.windows.step([job])
            speech.made(job)
        kept.add((len(speech._codes), speech._state.bytes))
    assert max(codes for codes, _ in kept) < max(prepared.schedule.sizes)
    assert len({size for _, size in kept}) == 2, "before the first window, and after it"


async def test_a_window_is_made_while_one_is_on_its_way_and_no_more(wave: CausalCode2Wav, seed: int) -> None:
    """A listener who does not take the sound holds up the stage that makes the codes."""
    codes, taken = drawn(wave, random.Random(seed), 60), 0
    prepared = await wave.prepare(WaveRequest(seed, Profile.QUALITY))

    async def counted() -> AsyncIterator[Piece]:
        nonlocal taken
        async for piece in arriving(codes, 0, lambda: 1):
            taken = piece.first + 1
            yield piece

    async with aclosing(make_ahead(wave.decode(prepared, counted(), {"audio": 0}))) as made:
        await anext(made)
    assert 4 <= taken <= 4 + 6 + 8 + 12
    assert wave.load().queued == 0
