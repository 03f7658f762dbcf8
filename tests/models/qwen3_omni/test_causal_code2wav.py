"""Code2Wav of Qwen3-Omni: the sound of Transformers in every profile, how its windows share steps, what a checkpoint must
have, and how soon there is sound."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import lengths
from helpers.causal_waves import drawn, loaded, reference, section, written
from helpers.models import RowInputs
from helpers.talker_reference import TalkerReference
from helpers.waiting import until
from helpers.waves import arriving, samples
from omnistage.models.checkpoint.files import WEIGHTS, BadCheckpoint
from omnistage.models.interface import Piece, Profile, Sampling, SpeechRequest, TensorRows, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.config import MODEL_TYPE
from omnistage.models.qwen3_omni.talker import load_talker
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav, Speech, WindowJob
from omnistage.models.qwen3_omni.wave.config import SCHEDULES, read_wave_config
from omnistage.models.tiny import qwen3_omni as tiny
from omnistage.models.worker import make_ahead


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
        assert made.after.place == own.after.place and made.after.key_count == own.after.key_count
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
        while (step := speech.next()) is not None:
            window, job = step
            wave.windows.step([job])
            speech.finish(window, job)
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


# Checkpoints ---------------------------------------------------------------------------------------------------------------------------


async def test_a_voice_is_the_business_of_the_talker(wave: CausalCode2Wav, seed: int) -> None:
    """The router tells both of them; the codes have it."""
    codes = drawn(wave, random.Random(seed), 3)
    assert np.array_equal(await samples(wave, codes, WaveRequest(0, voice="Ethan")), await samples(wave, codes, WaveRequest(1)))


def configured(folder: Path, whole: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, **whole}))
    return folder


@pytest.mark.parametrize("whole", [{}, {"code2wav_config": tiny.code2wav_config(), "enable_audio_output": False}], ids=["none", "off"])
def test_a_checkpoint_that_does_not_speak_says_so(tmp_path: Path, whole: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match="this checkpoint has no Code2Wav; serve a pipeline of its Thinker alone"):
        read_wave_config(configured(tmp_path, whole))


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    config = {**tiny.code2wav_config(), "rope_theta": 700.0}
    published = read_wave_config(configured(tmp_path, {"code2wav_config": config}))
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 700.0}
    assert read_wave_config(configured(tmp_path, {"code2wav_config": config})) == published and published.rope_theta == 700


def test_weights_that_are_missing_unused_or_misshapen_are_told(wave_folders: dict[str, Path], tmp_path: Path) -> None:
    """Those of other parts are nothing that it looks at."""
    folder, name = configured(tmp_path, {"code2wav_config": section(wave_folders["other"])}), "code2wav.decoder.2.block.3.conv1.conv.weight"
    whole = load_file(wave_folders["other"] / WEIGHTS)
    cases = {
        f"lacks the weight {name}": {key: value for key, value in whole.items() if key != name},
        f"{name} is": {**whole, name: whole[name][:, :, :5].contiguous()},
        "has 1 weights that this model does not, the first is code2wav.decoder.9.conv.bias": {
            **whole,
            "code2wav.decoder.9.conv.bias": torch.zeros(3),
        },
        f"{name}.*": {**whole, name: torch.full_like(whole[name], float("nan"))},
    }
    for told, tensors in cases.items():
        save_file({**tensors, "thinker.lm_head.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
        with pytest.raises(BadCheckpoint, match=told):
            loaded(folder)
    save_file({**whole, "talker.codec_head.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
    asyncio.run(loaded(folder).close())


def test_whatever_changes_a_sample_changes_the_revision(wave: CausalCode2Wav, tmp_path: Path) -> None:
    other = loaded(written(tmp_path / "other", tiny.code2wav_config(), 6))
    asyncio.run(other.close())
    assert other.info.revision != wave.info.revision


# From the first token of an answer to the first sound -----------------------------------------------------------------------------------


async def test_the_first_sound_comes_of_one_row_and_one_frame(wave: CausalCode2Wav, tmp_path: Path, seed: int) -> None:
    """While the Thinker writes its second token."""
    reference = TalkerReference("tiny", int(os.environ["OMNISTAGE_TEST_SEED"]), tmp_path / "talker")
    talker = load_talker(reference.folder, LoadOptions(path=reference.folder, dtype="float32", max_sessions=2))
    made, line, (places, prompt, reply) = talker.engine.stats().items, RowInputs(), reference.rows(reference.asked(seed, tokens=3))
    for piece in (places, prompt, TensorRows("hidden", reply.rows[:1], last=False)):
        line.put(piece)
    speech = await talker.prepare(SpeechRequest(seed, sampling=Sampling(logit_bias={talker.config.codec.eos: -100.0}), max_frames=4))

    async def codes() -> AsyncIterator[Piece]:
        first = 0
        async with aclosing(talker.speak(speech, line.inputs(), {"codes": 0})) as frames:
            async for each in frames:
                yield Piece("codes", first, each.finish_reason is not None, each.rows)
                first += len(each.rows)

    async with aclosing(wave.decode(await wave.prepare(WaveRequest(seed, Profile.LATENCY)), codes(), {"audio": 0})) as sounds:
        async with asyncio.timeout(60):
            assert len((await anext(sounds)).samples) == 1920 - 555
            await until(lambda: talker.engine.stats().starved == 1)
            assert talker.engine.stats().items == made + 1
            line.put(TensorRows("hidden", reply.rows[1:], last=True))
            assert sum([len(sound.samples) async for sound in sounds]) == 3 * 1920
    await talker.close()
