"""The work that a Code2Wav does ahead, on how many threads, and in how much memory: none of it changes a bit."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.waiting import until
from helpers.waves import BLOCK, SAMPLES, STREAMED, drawn, loaded, samples, solved
from omnistage.engine.memory import KEPT_KERNELS, ONEDNN_KEEPS
from omnistage.models.interface import Piece, WaveRequest
from omnistage.models.memory import private_bytes
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav, Speech, read_parts
from omnistage.models.qwen2_5_omni.wave.config import read_wave_config
from omnistage.models.qwen2_5_omni.wave.window import Flow, Solver
from omnistage.models.worker import Worker


@lengths.long_form(
    "models/test_worker.py::test_two_in_a_row_make_two_ahead",
    "models/test_worker.py::test_the_next_is_made_while_one_is_looked_at_and_none_behind_it",
)
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
            needed = prepared.schedule.window(number + 2, 1 << 62, has_ended=False)
            assert needed is not None
            await until(lambda past=needed.past: came >= past)  # type: ignore[misc]
            await until(lambda: quick.load().queued == 0)
            assert came == needed.past


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


@lengths.long_form("models/qwen2_5_omni/test_code2wav_threads.py::test_what_is_kept_of_a_speech_does_not_grow")
@pytest.mark.timeout(600)
@lengths.rounds(24, 300)
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


@lengths.long_form("models/qwen2_5_omni/test_code2wav_threads.py::test_how_many_threads_there_are_changes_no_bit")
@lengths.rounds(3, 60)
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


@lengths.long_form(
    "models/qwen2_5_omni/test_code2wav_threads.py::test_how_many_threads_there_are_changes_no_bit",
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
