"""Code2Wav of Qwen2.5-Omni: the sound of Transformers where it computes the whole, and near to it where it does not; the work that it does
ahead, on how many threads, and in how much memory."""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.speech_reference import WaveReference
from helpers.waiting import until
from helpers.waves import BLOCK, ENDS, SAMPLES, STREAMED, decibels, drawn, joined, loaded, samples, solved, sounds
from omnistage.engine.memory import KEPT_KERNELS, ONEDNN_KEEPS
from omnistage.models.interface import BadRequest, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav, Speech, noise, read_parts
from omnistage.models.qwen2_5_omni.wave.config import SCHEDULES, read_wave_config, schedule_of
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD
from omnistage.models.qwen2_5_omni.wave.window import METHODS, Flow, Solver, Trajectory
from omnistage.models.speech.code2wav import sessions_of
from omnistage.models.worker import Worker

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


async def test_voices_differ_and_the_seed_counts(quick: FlowCode2Wav, seed: int) -> None:
    codes = drawn(random.Random(seed), 30)
    first, *others = [await samples(quick, codes, WaveRequest(seed, voice=voice)) for voice in ("", *quick.info.voices)]
    assert np.array_equal(first, others[0]) and not np.array_equal(first, others[1])


# Lengths and ends ------------------------------------------------------------------------------------------------------------------


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


# Refusals and figures --------------------------------------------------------------------------------------------------------------------


async def test_a_voice_that_there_is_not_is_refused(quick: FlowCode2Wav) -> None:
    with pytest.raises(BadRequest, match=r"code2wav\.voice: there is no voice 'Nobody'; the voices are Chelsie and Ethan"):
        await quick.prepare(WaveRequest(0, voice="Nobody"))


@pytest.mark.parametrize(("free", "sessions"), [(1 << 40, 64), (1000, 20), (99, 1), (0, 1)])
def test_there_are_as_many_speeches_as_there_is_memory_for(free: int, sessions: int) -> None:
    assert sessions_of(10, LoadOptions(), free)[0] == sessions
    assert sessions_of(10, LoadOptions(max_sessions=7), free) == (7, "7")


@lengths.long_form(
    "models/test_revision.py::test_a_revision_changes_with_each_of_its_parts",
    unkept="solver, steps and lookahead change the results that a revision is made of",
)
def test_whatever_changes_a_sample_changes_the_revision(quick: FlowCode2Wav, omni_checkpoint: Path) -> None:
    others = (loaded(omni_checkpoint, solver="midpoint", steps=1), loaded(omni_checkpoint, solver="euler", steps=2, lookahead=2))
    for other in others:
        asyncio.run(other.close())
    assert len({quick.info.revision, *(other.info.revision for other in others)}) == 3


# Noise and solvers ----------------------------------------------------------------------------------------------------------------------


def test_noise_belongs_to_its_block(seed: int) -> None:
    """Whichever blocks are drawn with it; it is standard normal, and another one for each block and seed."""
    whole = noise(seed, 0, 40, 24, 80).view(40, 24, 80)
    for first in range(0, 37, 7):
        assert torch.equal(noise(seed, first, 3, 24, 80).view(3, 24, 80), whole[first : first + 3])
    assert abs(float(whole.mean())) < 0.02 and abs(float(whole.std()) - 1) < 0.02
    flat = whole.view(40, -1).numpy().astype(np.float64)
    assert np.abs(np.corrcoef(flat) - np.eye(40)).max() < 0.12
    assert not torch.equal(noise(seed + 1, 0, 1, 24, 80), whole[0])
    assert not torch.equal(noise(2**64 - 1, 2**40, 1, 24, 80), noise(2**64 - 2, 2**40, 1, 24, 80))


def solution(name: str, steps: int) -> float:
    """At 1, where y' = y cos(3t) and y(0) = 1."""
    solver = Solver.of(name, steps)
    trajectory = Trajectory(solver, torch.ones(1, dtype=torch.float64))
    for time in solver.evaluation_times():
        trajectory.take(trajectory.point * math.cos(3 * time))
    assert trajectory.done
    return float(trajectory.point)


@pytest.mark.parametrize(("name", "order"), [("rk4", 4), ("midpoint", 2), ("euler", 1)])
def test_a_method_has_its_order(name: str, order: int) -> None:
    """Twice the steps, 2^-order of the error; in float64."""
    exact = math.exp(math.sin(3) / 3)
    coarse, fine = (abs(solution(name, steps) - exact) for steps in (20, 40))
    assert abs(math.log2(coarse / fine) - order) < 0.3


def test_steps_are_evaluations() -> None:
    assert {name: Solver.of(name, 9).evaluations for name in METHODS} == {"rk4": 36, "midpoint": 18, "euler": 9}
    times = Solver.of("rk4", 9).times
    assert times[0] == 0 and times[-1] == 1 and all(begin < end for begin, end in pairwise(times))
    assert np.allclose(times, [1 - math.cos(math.pi / 2 * step / 9) for step in range(10)], atol=1e-6)


async def test_what_is_kept_of_a_speech_does_not_grow(quick: FlowCode2Wav, seed: int) -> None:
    source, sizes = random.Random(seed), set[tuple[int, ...]]()
    speech = Speech(quick.config, quick.windows, await quick.prepare(WaveRequest(seed)))
    for number in range(1500 // BLOCK):
        speech.feed(number * BLOCK, drawn(source, BLOCK), last=False)
        while (step := speech.next()) is not None:
            window, flow = step
            # The test looks at the input of the computation, not at its sound: noise is as good as any other input.
            flow.prepare(quick.windows.solver)
            speech.solved(window, flow)
            if number > 50:
                sizes.add((len(speech._codes), len(speech._before), 0 if speech._state is None else speech._state.nbytes))
    assert len(sizes) <= 6 and max(codes for codes, _, _ in sizes) <= 9 * BLOCK


@lengths.rounds(1, 20)
async def test_how_many_threads_there_are_changes_no_bit(omni_checkpoint: Path, quick: FlowCode2Wav, seed: int, rounds: int) -> None:
    source = random.Random(seed)
    workers = source.choice((1, 3, 4))
    other = loaded(omni_checkpoint, solver="euler", steps=2, workers=workers)
    for _ in range(rounds):
        speeches = [drawn(source, source.randint(1, 90)) for _ in range(source.choice((1, 4)))]
        request = WaveRequest(source.randrange(1 << 32), source.choice(STREAMED))
        made = [await asyncio.gather(*(samples(model, codes, request) for codes in speeches)) for model in (quick, other)]
        assert all(np.array_equal(a, b) for a, b in zip(*made, strict=True))
    assert other.info.revision == quick.info.revision and len(other.threads) == workers
    await other.close()


@lengths.long_form(
    "models/qwen2_5_omni/test_code2wav.py::test_how_many_threads_there_are_changes_no_bit",
    unkept="two threads make a sound of any length to the last bit",
)
@lengths.rounds(6, 60)
async def test_two_threads_make_the_sound_that_one_makes(quick: FlowCode2Wav, seed: int, rounds: int) -> None:
    """To the last bit, whatever its length: they share whole blocks, and add them in the order of one thread."""
    source, vocoder, worker = random.Random(seed), quick.windows.vocoder, Worker("aside", 1)
    torch.manual_seed(seed)
    for _ in range(rounds):
        frames = source.randint(1, 160)
        before, behind = source.randint(0, (frames - 1) // 2), source.randint(0, (frames - 1) // 2)
        mel = torch.randn(source.randint(1, 3), frames, quick.config.dit.mel_bins) - 5
        with torch.inference_mode():
            one, two = (vocoder.samples(mel, before, behind, aside) for aside in (None, worker.aside))
        assert one.shape[1] == (frames - before - behind) * quick.config.vocoder.frame_samples and torch.equal(one, two)
    await worker.close()


KERNELS_MADE = """
import sys
from pathlib import Path

import torch

from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.wave.code2wav import load_code2wav

model = load_code2wav(Path(sys.argv[1]), LoadOptions(threads=1, family={"solver": "euler", "steps": 1, "workers": 1}))
bins = model.config.dit.mel_bins
torch.manual_seed(0)
for turn in range(2):
    print(f"turn {turn}", flush=True)
    for frames in range(20, 68, 4):
        with torch.inference_mode():
            model.windows.vocoder.samples(torch.randn(1, frames, bins) - 5)
print("turn 2", flush=True)
"""


@lengths.long_form(unkept="kernels that a speech has made are kept for the next one")
def test_the_kernels_of_a_speech_are_there_for_the_next_one(omni_checkpoint: Path) -> None:
    """More of them than the engine has oneDNN keep: each speech would make its own anew, and be late with its first sound."""
    variables = {**os.environ, "ONEDNN_VERBOSE": "profile_create"}
    variables.pop(ONEDNN_KEEPS, None)
    done = subprocess.run(
        [sys.executable, "-c", KERNELS_MADE, str(omni_checkpoint)], env=variables, capture_output=True, text=True, timeout=110, check=True
    )
    _, first, second = (part.count("create:cache_miss") for part in done.stdout.split("turn 2")[0].split("turn "))
    assert first > KEPT_KERNELS and not second


async def test_an_error_of_the_second_thread_leaves_the_window_as_it_was(quick: FlowCode2Wav, seed: int) -> None:
    """And neither thread is left with the work."""
    codes, worker = drawn(random.Random(seed), 3 * BLOCK), Worker("aside", 1)
    await worker.close()
    prepared, flows = await quick.prepare(WaveRequest(seed, "latency")), list[Flow]()
    for _ in range(2):
        speech = Speech(quick.config, quick.windows, prepared)
        speech.feed(0, codes, last=False)
        step = speech.next()
        assert step is not None
        flows.append(step[1])
    with pytest.raises(RuntimeError, match="closed"):
        quick.windows.step([flows[0]], worker.aside)
    assert torch.equal(solved(quick, flows[0]).mel, solved(quick, flows[1]).mel)


@lengths.long_form(
    "models/steps/test_loop.py::test_what_is_due_first_steps_first_with_others_of_its_key",
    unkept="a step of a long speech is so short that it holds no listener up",
)
@pytest.mark.parametrize("alone", [pytest.param(True, marks=pytest.mark.long), False])
async def test_who_wants_the_whole_at_once_holds_up_nobody(omni_checkpoint: Path, quick: FlowCode2Wav, seed: int, alone: bool) -> None:
    """As many as there are threads, and one more, each with far more codes than a listener has who comes later. alone: with one thread."""
    model, source = loaded(omni_checkpoint, solver="euler", steps=2, workers=1) if alone else quick, random.Random(seed)
    workers = len(model.threads)
    wholes = [asyncio.create_task(samples(model, drawn(source, 4000), WaveRequest(seed, "offline"))) for _ in range(workers + 1)]
    await until(lambda: model.load().queued == workers + 1)
    codes = drawn(source, 60)
    heard = await samples(model, codes, WaveRequest(seed))
    assert not any(whole.done() for whole in wholes)
    for whole in wholes:
        whole.cancel()
    await asyncio.gather(*wholes, return_exceptions=True)
    assert model.load().queued == 0 and np.array_equal(heard, await samples(model, codes, WaveRequest(seed)))
    if alone:
        await model.close()


async def test_a_thread_that_waits_for_the_other_says_so(quick: FlowCode2Wav, seed: int) -> None:
    """Whoever watches threads would take it for one that hangs."""
    codes, worker, may_go, asked = drawn(random.Random(seed), 3 * BLOCK), Worker("main", 1), threading.Event(), threading.Event()
    speech = Speech(quick.config, quick.windows, await quick.prepare(WaveRequest(seed, "latency")))
    speech.feed(0, codes, last=False)
    step = speech.next()
    assert step is not None
    flow = step[1]

    with ThreadPoolExecutor(1) as other:

        def late(call: Callable[[], None]) -> Future[None]:
            def wait_and_call() -> None:
                asked.set()
                assert may_go.wait(60)
                call()

            return other.submit(wait_and_call)

        stepping = asyncio.create_task(worker.run(lambda: quick.windows.step([flow], late)))
        await until(asked.is_set)
        layers = quick.config.dit.layers
        await until(lambda: worker.activity.steps >= layers + 2)
        assert not stepping.done()
        may_go.set()
        await stepping
    await worker.close()
