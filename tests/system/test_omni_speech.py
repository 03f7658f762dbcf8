"""Qwen2.5-Omni as real processes, from words and pictures to sound: what Transformers makes one after the other, and the same samples
whoever is lost on the way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from helpers import lengths, media_files
from helpers.ask import Answer, ask, refused
from helpers.command import omnistage
from helpers.disturbed import Step, after_text, ask_through, audio_chunks, begun, disturbed, found, holder, killed_holder, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.hanging import HANG, WAKE
from helpers.servers import all_free, omni_stub
from helpers.speech_reference import PENALTY, SpeechReference
from helpers.wave_reference import WaveReference
from omnistage.client import Omni
from omnistage.models.conversation import Media, Turn
from omnistage.models.qwen2_5_omni.config import read_thinker_config
from omnistage.models.qwen2_5_omni.thinker import tokenizer_of
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

pytestmark = pytest.mark.slow

KINDS = ("thinker", "talker", "code2wav")
TOKENS, FRAMES = 60, 250
CODE_SAMPLES = 480
STEPS = 1
ENDS = dict.fromkeys((8292, 8294), -100.0)
MOMENTS = {"as it begins": begun, "in text": text_chunks(20), "in speech": audio_chunks(3), "late": after_text(4)}

PIPELINE = """
name: qwen2_5_omni
description: the shipped one, whose codes can be asked for too
inputs: [text, image, audio, video]
outputs: [text, codes, audio]
stages:
  - {kind: thinker, family: qwen2_5_omni}
  - {kind: talker, family: qwen2_5_omni, takes: [prompt, places, hidden]}
  - {kind: code2wav, family: qwen2_5_omni, takes: [codes]}
defaults:
  thinker: {max_tokens: 64}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, omni_checkpoint: Path) -> Iterator[Fleet]:
    """Two of each kind. The flow takes one step of the published method: what is lost and found again has nothing to do with how many."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "pipeline.yaml").write_text(PIPELINE)
    with fleet(
        folder,
        kinds=KINDS,
        pipeline=str(folder / "pipeline.yaml"),
        family="qwen2_5_omni",
        options_of={"code2wav": {"steps": STEPS}},
        stage_args=["--checkpoint", str(omni_checkpoint), "--dtype", "float32"],
        # Each that starts would try for seconds which windows it may compute together.
        args_of={"code2wav": ["--max-batch-size", "1"]},
        can_hang=True,
    ) as running:
        yield running


def question(seed: int, *parts: stage_pb2.Part, tokens: int = TOKENS, frames: int = FRAMES, profile: str = "") -> omni_pb2.GenerateRequest:
    """Drawn text and speech that end where it is said."""
    thinker = stage_pb2.ThinkerParams(
        messages=[stage_pb2.Message(role="user", parts=parts or [stage_pb2.Part(text="What?")])],
        sampling=stage_pb2.Sampling(temperature=1, top_p=0.9),
        max_tokens=tokens,
        ignore_eos=True,
    )
    speech = stage_pb2.Sampling(temperature=1, top_p=0.9, repetition_penalty=1.05, logit_bias=ENDS)
    return omni_pb2.GenerateRequest(
        seed=seed,
        thinker=thinker,
        talker=stage_pb2.TalkerParams(max_frames=frames, sampling=speech),
        code2wav=stage_pb2.Code2WavParams(profile=profile),
    )


def samples(answer: Answer) -> NDArray[np.float32]:
    """Of an answer in float32."""
    return np.frombuffer(b"".join(chunk.audio.data for chunk in answer.of("audio")), "<f4")


@lengths.rounds(1, 6)
async def test_text_codes_and_sound_are_those_of_transformers(house: Fleet, omni_checkpoint: Path, seed: int, rounds: int) -> None:
    """Greedy, in the voice that is asked of the Talker alone; the noise is given to Transformers."""
    source, reference = random.Random(seed), SpeechReference(omni_checkpoint)
    sounds = WaveReference(omni_checkpoint, reference.whole)
    tokenizer = tokenizer_of(omni_checkpoint, read_thinker_config(omni_checkpoint))
    never = tokenizer.unsayable | tokenizer.ends
    async with omni_stub(house.address("router")) as stub:
        for number in range(rounds):
            picture = media_files.picture(source.getrandbits(30), source.randint(20, 120), source.randint(20, 120))
            turns = (Turn("user", (Media("image/png", picture), "What do you see?")),)
            tokens = reference.answer(turns, await reference.read(turns), 24, never).tokens
            voice, frames = source.choice(["Chelsie", "Ethan"]), source.randint(30, 80)
            given = reference.rows(turns, await reference.read(turns), tokens[:-1], voice)
            expected = reference.spoken(given, frames)
            shown = stage_pb2.Part(media=stage_pb2.Media(data=picture, media_type="image/png"))
            asked = question(seed + number, shown, stage_pb2.Part(text="What do you see?"), tokens=24, frames=frames, profile="offline")
            asked.thinker.sampling.CopyFrom(stage_pb2.Sampling())
            asked.talker.sampling.CopyFrom(stage_pb2.Sampling(repetition_penalty=PENALTY))
            asked.talker.voice, asked.code2wav.encoding = voice, chunk_pb2.AUDIO_ENCODING_FLOAT32
            answer = await ask(stub, asked)
            answer.check_whole()
            assert answer.tokens() == tokens
            if any(expected.close) and answer.codes() != expected.codes:
                continue  # two were almost equally good: from there on another speech is as right
            assert answer.codes() == expected.codes == reference.generated(given, frames)
            made, sound = samples(answer), sounds.sound(np.array(answer.codes(), np.uint32)[:, None], voice, seed + number, STEPS)
            assert made.shape == sound.shape == (CODE_SAMPLES * len(answer.codes()),)
            assert np.abs(made - sound).max() <= 1e-4 * np.abs(sound).max()


async def test_the_first_sound_comes_while_text_is_being_written(house: Fleet, seed: int) -> None:
    async with omni_stub(house.address("router")) as stub:
        answer, heard_at = Answer(), None
        async for event in stub.Generate(question(seed, tokens=800, frames=60), timeout=60):
            answer.take(event)
            if heard_at is None and answer.of("audio"):
                heard_at = len(answer.tokens())
        answer.check_whole()
        assert heard_at is not None and heard_at < 800 == len(answer.tokens())
        assert len(answer.of("audio")[0].audio.data) == 2 * 12 * CODE_SAMPLES
        assert len(answer.samples()) == CODE_SAMPLES * len(answer.codes())


async def test_a_player_is_told_how_long_to_wait(house: Fleet, seed: int) -> None:
    """With the first sound; and the account says whether who waited so had something to play at any time, as it says itself."""
    async with omni_stub(house.address("router")) as stub:
        answer, arrived = Answer(), list[float]()
        async for event in stub.Generate(question(seed, frames=200), timeout=60):
            answer.take(event)
            arrived += [time.monotonic()] * (len(answer.of("audio")) - len(arrived))
        first, *others = [chunk for chunk in answer.of("audio") if chunk.count]
        assert first.audio.HasField("prebuffer_ms") and not any(chunk.audio.HasField("prebuffer_ms") for chunk in others)
        assert answer.usage is not None
        report = next(stage for stage in answer.usage.stages if stage.kind == stage_pb2.STAGE_KIND_CODE2WAV)
        assert bool(report.audio_underruns) == bool(report.audio_starved.ToNanoseconds())


async def test_it_is_told_how_many_speak_in_real_time(house: Fleet) -> None:
    async with omni_stub(house.address("router")) as stub:
        replicas = (await stub.ListReplicas(omni_pb2.ListReplicasRequest())).replicas
    told = {replica.address: replica.settings["real_time_speakers"] for replica in replicas if replica.kind != stage_pb2.STAGE_KIND_THINKER}
    assert len(told) == 4 and all(float(each.split(",")[0]) > 0 for each in told.values()), told


def test_people_hear_it_by_every_door(house: Fleet, tmp_path: Path, seed: int) -> None:
    """The client, and the command with a picture, with words to say and with a voice: the same samples for the same question."""
    picture = tmp_path / "cat.png"
    picture.write_bytes(media_files.picture(seed))
    asked: dict[str, Any] = {"max_tokens": 12, "max_frames": 40, "seed": seed % (1 << 32), "temperature": 0.0}
    with Omni(address=house.address("router")) as omni:
        answer = omni.generate("What is this?", images=[picture], **asked)
        spoken = omni.say("Good morning.", voice="Ethan", max_frames=40, seed=asked["seed"])
    assert answer.text and answer.audio and spoken.audio
    assert 0 < len(answer.audio.samples) <= 40 * CODE_SAMPLES and 0 < len(spoken.audio.samples) <= 40 * CODE_SAMPLES
    options = ("--max-frames", "40", "--seed", str(asked["seed"]), "--address", house.address("router"))
    ask = ("ask", "What is this?", "--image", "cat.png", "--out", "a.wav", "--max-tokens", "12", "--temperature", "0")
    for command, heard in ((ask, answer), (("say", "Good morning.", "--voice", "Ethan", "--out", "a.wav"), spoken)):
        done = omnistage(*command, *options, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert heard.audio is not None
        written, rate_hz = soundfile.read(tmp_path / "a.wav", dtype="int16")
        assert rate_hz == 24_000 and np.array_equal(written, np.rint(heard.audio.samples * 32768).astype(np.int16))


async def test_eight_speak_at_once_as_each_does_alone(house: Fleet, seed: int) -> None:
    seen = stage_pb2.Part(media=stage_pb2.Media(data=media_files.picture(seed), media_type="image/png"))
    asked = [
        question(seed + n, *[seen] * (n % 2), stage_pb2.Part(text="What?"), tokens=20 + n, frames=40 + 9 * n, profile=profile)
        for n, profile in enumerate(["latency", "balanced", "quality", "offline"] * 2)
    ]
    async with omni_stub(house.address("router")) as stub:
        answers = await asyncio.gather(*(ask(stub, each) for each in asked))
        for each, answer in zip(asked, answers, strict=True):
            answer.check_whole()
            alone = await ask(stub, each)
            assert (alone.text(), alone.codes()) == (answer.text(), answer.codes())
            assert np.array_equal(alone.samples(), answer.samples()) and len(alone.samples()) == CODE_SAMPLES * len(alone.codes())
    await all_free([house.address(name) for name in house.stages])


@lengths.one_or_all("kind", KINDS)
@lengths.one_or_all("moment", MOMENTS)
async def test_one_of_them_is_killed(house: Fleet, kind: str, moment: str, seed: int) -> None:
    kind = lengths.draw(kind, KINDS, seed)
    strikes = MOMENTS[lengths.draw(moment, MOMENTS, seed)]

    async def kill() -> None:
        await killed_holder(house, kind)

    async with disturbed(house, alike=False, after=question(seed, frames=5)) as stub:
        answer = await ask_through(stub, question(seed), Step(strikes, kill))
        check_same(answer, await ask(stub, question(seed)))


async def test_the_event_loop_of_code2wav_hangs(house: Fleet, seed: int) -> None:
    hung = list[str]()

    async def hang() -> None:
        hung.append(await holder(house, "code2wav"))
        house.signal(hung[0], HANG)

    async with disturbed(house, alike=False, after=question(seed, frames=5)) as stub:
        try:
            answer = await ask_through(stub, question(seed), Step(audio_chunks(2), hang))
        finally:
            for name in hung:
                if house.server(name).alive:
                    house.signal(name, WAKE)
        await found(house, stub)
        check_same(answer, await ask(stub, question(seed)))


def check_same(disturbed: Answer, whole: Answer) -> None:
    disturbed.check_whole()
    assert len(disturbed.failovers) == 1
    assert (whole.text(), whole.codes()) == (disturbed.text(), disturbed.codes()) and len(whole.codes()) == FRAMES
    assert np.array_equal(whole.samples(), disturbed.samples()) and len(whole.samples()) == CODE_SAMPLES * FRAMES


async def test_what_has_no_speech_has_no_sound(house: Fleet, omni_checkpoint: Path, seed: int) -> None:
    """An answer whose only token is its end has nothing to be spoken; text alone asks neither Talker nor Code2Wav."""
    (end,) = tokenizer_of(omni_checkpoint, read_thinker_config(omni_checkpoint)).ends
    async with omni_stub(house.address("router")) as stub:
        silent = question(seed)
        silent.thinker.ignore_eos = False
        silent.thinker.sampling.logit_bias[end] = 100.0
        answer = await ask(stub, silent)
        answer.check_whole()
        assert answer.text() == "" and answer.codes() == [] and len(answer.samples()) == 0
        text = question(seed, tokens=10)
        text.outputs.append("text")
        answer = await ask(stub, text)
        assert len(answer.tokens()) == 10 and list(answer.chunks) == ["text"]
        assert answer.usage is not None and len(answer.usage.stages) == 1


async def test_what_cannot_be_is_told_and_the_next_good_request_works(house: Fleet, seed: int) -> None:
    async with omni_stub(house.address("router")) as stub:
        for field, change in (
            ("code2wav.voice", stage_pb2.Code2WavParams(voice="Nobody")),
            ("code2wav.profile", stage_pb2.Code2WavParams(profile="quick")),
        ):
            bad = question(seed)
            bad.code2wav.MergeFrom(change)
            refusal = await refused(stub, bad)
            assert (refusal.reason, refusal.metadata["field"]) == ("BAD_REQUEST", field)
        assert len((await ask(stub, question(seed, tokens=5, frames=15))).samples()) == CODE_SAMPLES * 15
