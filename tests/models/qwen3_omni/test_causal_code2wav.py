"""Code2Wav of Qwen3-Omni: its net is that of Transformers, the same in any chunks; the sound of Transformers in every profile, how its
windows share steps, what a checkpoint may lack."""

from __future__ import annotations

import asyncio
import inspect
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
from helpers.causal_waves import drawn, loaded, net_of, norms_in_float64, published_config, reference, section, written
from helpers.models import RowInputs
from helpers.talker_reference import TalkerReference
from helpers.waiting import until
from helpers.waves import arriving, samples
from omnistage.models.checkpoint.files import WEIGHTS, BadCheckpoint
from omnistage.models.interface import Piece, Profile, Sampling, SpeechRequest, TensorRows, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.family import MODEL_TYPE
from omnistage.models.qwen3_omni.talker import load_talker
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav, Speech, WindowJob
from omnistage.models.qwen3_omni.wave.config import SCHEDULES, read_wave_config
from omnistage.models.qwen3_omni.wave.net import CausalNet, WaveState
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


KINDS = ("tiny", "other")


def random_codes(net: CausalNet, source: random.Random, speeches: int, frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    return torch.randint(net.config.codes, (speeches, frames, net.config.codebooks), generator=generator)


def sounded(net: CausalNet, codes: torch.Tensor, sizes: list[int], states: list[WaveState] | None = None) -> torch.Tensor:
    """In chunks of these sizes."""
    states = states or [net.start() for _ in codes]
    made = []
    with torch.inference_mode():
        for chunk in codes.split(sizes, 1):
            samples, states = net.step(chunk, states)
            made.append(samples)
    return torch.cat(made, 1)


def cut(source: random.Random, frames: int) -> list[int]:
    """Chunks of random sizes that are so many frames together."""
    sizes = list[int]()
    while sum(sizes) < frames:
        sizes.append(min(source.choice((1, 1, 2, 3, 5, 9, 17, 31)), frames - sum(sizes)))
    return sizes


def apart(made: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in parts of the loudest sample."""
    assert made.shape == expected.shape
    return float((made - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@lengths.rounds(2, 20)
def test_it_is_the_net_of_transformers(wave_folders: dict[str, Path], kind: str, seed: int, rounds: int) -> None:
    """The codes are one frame, and more frames than all layers look back."""
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float32)
    published = reference(wave_folders[kind], torch.float32)
    for frames in (1, *(source.randint(2, 2 * net.config.frames_before) for _ in range(rounds))):
        codes = random_codes(net, source, 1, frames)
        with torch.inference_mode():
            expected = published(codes.transpose(1, 2))[:, 0]
        assert expected.shape == (1, frames * net.config.frame_samples - net.config.missing)
        assert expected.std() > 0.01 and expected.abs().max() < 1, "neither silence nor what is cut off says much"
        assert apart(sounded(net, codes, [frames]), expected) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_it_is_the_net_of_transformers_to_the_last_digits(
    wave_folders: dict[str, Path], kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float64)
    norms_in_float64(monkeypatch)
    published = reference(wave_folders[kind], torch.float64)
    codes = random_codes(net, source, 1, source.randint(net.config.window, 60))
    with torch.inference_mode():
        expected = published(codes.transpose(1, 2))[:, 0]
    assert apart(sounded(net, codes, cut(source, codes.shape[1])), expected) <= 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"])
@lengths.rounds(2, 20)
def test_chunks_are_the_whole(wave_folders: dict[str, Path], dtype: torch.dtype, tolerance: float, seed: int, rounds: int) -> None:
    source = random.Random(seed)
    for number in range(rounds):
        net = net_of(wave_folders[KINDS[number % 2]], dtype)
        frames = source.randint(2, 70)
        codes = random_codes(net, source, 2, frames)
        whole = sounded(net, codes, [frames])
        for sizes in ([1] * frames, [frames - 1, 1], cut(source, frames)):
            assert apart(sounded(net, codes, sizes), whole) <= tolerance, f"{frames} frames as {sizes}"


def test_published_sizes_lose_555_samples_and_look_578_frames_back() -> None:
    """8 layers that see 71 frames of the past, and 10 of convolutions."""
    config = published_config()
    assert (config.frame_samples, config.missing, config.heard_frames, config.frames_before) == (1920, 555, 10, 578)
    assert config.frame_rate_hz == 12.5


def test_what_transformers_loses_between_its_chunks_is_not_lost(wave_folders: dict[str, Path], seed: int) -> None:
    """Its `chunked_decode`, which its `generate` calls, lacks samples at the end of every 300th frame."""
    source, net = random.Random(seed), net_of(wave_folders["tiny"], torch.float32)
    published = reference(wave_folders["tiny"], torch.float32)
    codes, config = random_codes(net, source, 1, 45), net.config
    with torch.inference_mode():
        lacking = published.chunked_decode(codes.transpose(1, 2), chunk_size=20, left_context_size=5)
    assert inspect.signature(published.chunked_decode).parameters["chunk_size"].default == 300
    assert lacking.shape[-1] == 45 * config.frame_samples - 3 * config.missing
    assert sounded(net, codes, [20, 20, 5]).shape[1] == 45 * config.frame_samples - config.missing


def test_a_million_frames_later_it_sounds_the_same(wave_folders: dict[str, Path], seed: int) -> None:
    """Nothing has grown. The angles of places are those of Transformers, which have few digits left there; what is heard has enough."""
    source, net = random.Random(seed), net_of(wave_folders["tiny"], torch.float32)
    before, late = net.config.frames_before, 1_000_000
    codes = random_codes(net, source, 1, before + 10)
    places = torch.arange(late, late + 5)[None]
    turning = reference(wave_folders["tiny"], torch.float32).pre_transformer.rotary_emb(torch.zeros(1), places)
    assert all(torch.equal(own, other) for own, other in zip(net._turned(places), turning, strict=True))
    with torch.inference_mode():
        (early, _), (made, (left,)) = (net.step(codes, [net.start(place)]) for place in (100, late))
    assert left.place == late + len(codes[0]) and left.bytes == net.start(1).bytes
    heard = before * net.config.frame_samples
    assert 0 < apart(made[:, heard:], early[:, heard:]) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_depends_on_no_frame_farther_than_is_said(wave_folders: dict[str, Path], kind: str, seed: int) -> None:
    """Another frame changes samples from its own place on, up to the frames that look back to it and no farther; the last of those are
    reached only by attention, through every layer. The convolutions alone reach as far as is said, too."""
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float64)
    config = net.config
    changed, frames = source.randint(1, 20), config.frames_before + 30
    codes = random_codes(net, source, 1, frames)
    other = codes.clone()
    other[0, changed] = (codes[0, changed] + 1) % config.codes
    differs = (sounded(net, codes, [frames]) != sounded(net, other, [frames]))[0].nonzero()[:, 0]
    per, missing = config.frame_samples, config.missing
    assert changed * per - missing <= differs.min() < (changed + 1) * per - missing
    assert differs.max() < (changed + 1 + config.frames_before) * per - missing


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_on_far_enough_before_makes_the_same(wave_folders: dict[str, Path], kind: str, seed: int) -> None:
    """With nothing of what was before, in the same chunks: to the bit. A window later it would be heard."""
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float32)
    config, size = net.config, source.randint(1, 4)
    begin = size * source.randint(1, 9)
    wanted = begin + -(-config.frames_before // size) * size
    codes = random_codes(net, source, 1, wanted + 5 * size)
    whole = sounded(net, codes, [size] * (codes.shape[1] // size))[:, wanted * config.frame_samples - config.missing :]

    def from_frame(first: int) -> torch.Tensor:
        left = codes[:, first:]
        made = sounded(net, left, [size] * (left.shape[1] // size), [net.start(first)])
        return made[:, (wanted - first) * config.frame_samples :]

    assert torch.equal(from_frame(begin), whole)
    near = wanted - config.heard_frames // size * size
    assert not torch.equal(from_frame(near), whole)


def test_what_a_step_leaves_does_not_grow_and_keeps_nobody_elses(wave_folders: dict[str, Path], seed: int) -> None:
    source, net = random.Random(seed), net_of(wave_folders["tiny"], torch.float32)
    states = [net.start() for _ in range(3)]
    sizes = set[int]()
    with torch.inference_mode():
        for _ in range(12):
            _, states = net.step(random_codes(net, source, 3, source.randint(1, 20)), states)
            sizes |= {state.bytes for state in states}
    assert sizes == {net.start(1).bytes}
    for state in states:
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in (state.keys, *state.inputs))
