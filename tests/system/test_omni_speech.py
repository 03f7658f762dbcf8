"""Omni models as real processes, from words and pictures to sound: what Transformers makes one after the other, and the same samples
whoever is lost on the way."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import pytest_asyncio
import soundfile

from helpers import lengths, media_files
from helpers.ask import WholeAnswer, ask
from helpers.command import omnistage
from helpers.disturbed import (
    after_text,
    ask_through,
    audio_chunks,
    begun,
    continued,
    disturbed,
    joined,
    kill_when,
    text_chunks,
)
from helpers.fleet import Fleet, fleet
from helpers.gateway import gateway
from helpers.omni_answers import ANSWERS, CASES
from helpers.omni_family import FAMILIES, OmniFamily, question, seen
from helpers.servers import all_free, omni_stub
from omnistage.client import Omni
from omnistage.client.files import to_pcm16
from omnistage.v1 import omni_pb2, stage_pb2

KINDS = ("thinker", "talker", "code2wav")
TOKENS = 60
MOMENTS = {"as it begins": begun, "in text": text_chunks(20), "in speech": audio_chunks(3), "late": after_text(4)}
PROFILES = ("latency", "balanced", "quality", "offline")


def omni_fleet(logs: Path, family: OmniFamily, checkpoint: Path, *, replicas: int) -> AbstractContextManager[Fleet]:
    """The chain of a family."""
    return fleet(
        logs,
        replicas=replicas,
        kinds=KINDS,
        pipeline=family.pipeline(logs),
        family=family.name,
        options_of=family.options_of,
        # A page of rows is above the limit, however few a step takes on a busy machine; a row of an answer is not.
        stage_args=["--checkpoint", str(checkpoint), "--dtype", "float32", "--inline-limit", "8192"],
        args_of=family.args_of,
    )


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, omni_family: OmniFamily, omni_folder: Path) -> Iterator[Fleet]:
    """One of each kind."""
    with omni_fleet(tmp_path_factory.mktemp("chain"), omni_family, omni_folder, replicas=1) as running:
        yield running


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, omni_family: OmniFamily, omni_folder: Path) -> Iterator[Fleet]:
    """Two of each kind."""
    with omni_fleet(tmp_path_factory.mktemp("house"), omni_family, omni_folder, replicas=2) as running:
        yield running


@dataclass(frozen=True)
class WholeSpeech:
    """A long answer about a picture, a sound and a film to which nothing happened, and what was asked."""

    family: OmniFamily
    asked: omni_pb2.GenerateRequest
    answer: WholeAnswer

    def check_same(self, answer: WholeAnswer) -> None:
        assert len(answer.failovers) == 1
        assert (self.answer.text(), self.answer.codes()) == (answer.text(), answer.codes())
        assert len(answer.codes()) == self.family.groups * self.family.frames[0]
        check_sound(self.family, answer, self.answer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(house: Fleet, omni_family: OmniFamily) -> WholeSpeech:
    seed = random.getrandbits(32)
    asked = question(omni_family, seed, *seen(seed), tokens=TOKENS, frames=omni_family.frames[0])
    async with omni_stub(house.address("router")) as stub:
        return WholeSpeech(omni_family, asked, await ask(stub, asked))


def brief(omni_family: OmniFamily, seed: int) -> omni_pb2.GenerateRequest:
    return question(omni_family, seed, tokens=5, frames=5)


@lengths.rounds(1, len(CASES))
async def test_text_codes_and_sound_are_those_of_transformers(
    chain: Fleet, omni_family: OmniFamily, omni_folder: Path, seed: int, rounds: int
) -> None:
    source, answers = random.Random(seed), ANSWERS[omni_family.name](omni_folder)
    async with omni_stub(chain.address("router")) as stub:
        for case in source.sample(list(CASES), rounds):
            print(case)
            expected = await answers.expected(case, omni_family.frames[1], source)
            await expected.check(stub, omni_family)


async def test_the_first_sound_comes_while_text_is_being_written(chain: Fleet, omni_family: OmniFamily, seed: int) -> None:
    async with omni_stub(chain.address("router")) as stub:
        answer, heard_at = WholeAnswer(), None
        async for event in stub.Generate(question(omni_family, seed, tokens=400, frames=60), timeout=60):
            answer.take(event)
            if heard_at is None and answer.of("audio"):
                heard_at = len(answer.tokens())
        answer.check_whole()
        assert heard_at is not None and heard_at < 400 == len(answer.tokens())
        assert len(answer.of("audio")[0].audio.data) == 2 * omni_family.samples(omni_family.first)
        assert len(answer.samples()) == omni_family.samples(60)


@lengths.long_form(
    "models/speech/test_schedule.py::test_every_form_of_a_speech_has_its_seconds_and_no_more_are_together_than_asked",
    "stage/test_settings.py::test_the_router_carries_what_its_stages_chose",
    unkept="Talkers and Code2Wavs of an omni model tell how many of them speak in real time.",
)
async def test_it_is_told_how_many_speak_in_real_time(house: Fleet) -> None:
    async with omni_stub(house.address("router")) as stub:
        replicas = (await stub.ListReplicas(omni_pb2.ListReplicasRequest())).replicas
    told = {replica.address: replica.settings["real_time_speakers"] for replica in replicas if replica.kind != stage_pb2.STAGE_KIND_THINKER}
    assert len(told) == 4 and all(float(each.split(",")[0]) > 0 for each in told.values()), told


@lengths.long_form(
    "system/test_omni_speech.py::test_text_codes_and_sound_are_those_of_transformers",
    "cli/test_commands.py::test_files",
    "cli/test_attached.py::test_media_stand_before_the_words_in_the_order_given",
    "models/qwen2_5_omni/test_code2wav.py::test_voices_differ_and_the_seed_counts",
)
def test_people_hear_it_by_every_door(house: Fleet, omni_family: OmniFamily, tmp_path: Path, seed: int) -> None:
    """The client, and the command with a picture, with words to say and with a voice: the same samples for the same question."""
    picture = tmp_path / "cat.png"
    picture.write_bytes(media_files.picture(seed))
    asked: dict[str, Any] = {"max_tokens": 12, "max_frames": 40, "seed": seed % (1 << 32), "temperature": 0.0}
    with Omni(address=house.address("router")) as omni:
        answer = omni.generate("What is this?", images=[picture], **asked)
        spoken = omni.say("Good morning.", voice="Ethan", max_frames=40, seed=asked["seed"])
    assert answer.text and answer.audio and spoken.audio
    assert max(len(answer.audio.samples), len(spoken.audio.samples)) <= omni_family.samples(40)
    options = ("--max-frames", "40", "--seed", str(asked["seed"]), "--address", house.address("router"))
    ask = ("ask", "What is this?", "--image", "cat.png", "--out", "a.wav", "--max-tokens", "12", "--temperature", "0")
    for command, heard in ((ask, answer), (("say", "Good morning.", "--voice", "Ethan", "--out", "a.wav"), spoken)):
        done = omnistage(*command, *options, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert heard.audio is not None
        written, rate_hz = soundfile.read(tmp_path / "a.wav", dtype="int16")
        assert rate_hz == 24_000 and np.array_equal(written, np.rint(heard.audio.samples * 32768).astype(np.int16))


@lengths.long_form(
    "engine/test_engine.py::test_answers_do_not_depend_on_company_order_or_a_break",
    unkept="A whole chain in bfloat16 says at once what it says one after the other.",
)
async def test_eight_speak_at_once_in_bfloat16(omni_family: OmniFamily, omni_folder: Path, tmp_path: Path, seed: int) -> None:
    """With other media, voices, seeds, lengths and profiles. Code2Wav computes in float32 alone."""
    asked = list[omni_pb2.GenerateRequest]()
    for n in range(8):
        one = question(omni_family, seed + n, *seen(seed + n)[: n % 4], tokens=20 + n, frames=(4 + n) * omni_family.frames[1] // 4)
        one.talker.voice, one.code2wav.profile = ("Ethan", "Chelsie", "")[n % 3], PROFILES[(n + n // 4) % 4]
        asked.append(one)
    halves = dict.fromkeys(("thinker", "talker"), ("--dtype", "bfloat16"))
    with fleet(
        tmp_path,
        replicas=1,
        kinds=KINDS,
        pipeline=omni_family.pipeline(tmp_path),
        family=omni_family.name,
        options_of=omni_family.options_of,
        stage_args=["--checkpoint", str(omni_folder)],
        args_of={**halves, **omni_family.args_of},
    ) as chain:
        async with omni_stub(chain.address("router")) as stub:
            answers = await asyncio.gather(*(ask(stub, each) for each in asked))
            for each, answer in zip(asked, answers, strict=True):
                alone = await ask(stub, each)
                assert (alone.text(), alone.codes()) == (answer.text(), answer.codes()) and len(alone.codes()) >= omni_family.groups
                check_sound(omni_family, answer, alone)
        await all_free([chain.address(name) for name in chain.stages])
    assert len({answer.samples().tobytes() for answer in answers}) == 8


@lengths.long_form(
    "router/test_chain.py::test_a_stage_that_is_lost_in_mid_speech_leaves_no_gap",
    "models/qwen2_5_omni/test_thinker.py::test_it_goes_on_after_any_token",
    "models/omni/test_talkers.py::test_it_goes_on_after_any_frame",
    "models/qwen2_5_omni/test_code2wav.py::test_sound_goes_on_in_what_would_be_the_next_window",
    "models/qwen3_omni/test_thinker.py::test_an_answer_goes_on_from_any_place",
    "models/omni/test_code2wav.py::test_sound_goes_on_at_any_sample_with_the_same_bits",
)
@lengths.one_or_all("kind", KINDS)
@lengths.one_or_all("moment", MOMENTS)
async def test_one_of_them_is_killed(house: Fleet, omni_family: OmniFamily, whole: WholeSpeech, kind: str, moment: str, seed: int) -> None:
    kind = lengths.draw(kind, KINDS, seed)
    strikes = MOMENTS[lengths.draw(moment, MOMENTS, seed)]

    async with disturbed(house, alike=False, after=brief(omni_family, seed)) as stub:
        answer = await ask_through(stub, whole.asked, kill_when(strikes, house, kind))
        whole.check_same(answer)


def check_sound(omni_family: OmniFamily, answer: WholeAnswer, same: WholeAnswer) -> None:
    answer.check_whole()
    assert np.array_equal(same.samples(), answer.samples())
    assert len(same.samples()) == omni_family.samples(len(same.codes()) // omni_family.groups)


QWEN3_LONG = lengths.long_form(
    "system/test_lost_router.py::test_the_rest_of_an_answer_comes_from_the_next_router",
    "gateway/test_chat.py::test_text_and_samples_are_those_over_grpc",
    "gateway/test_chat.py::test_what_an_earlier_sound_said_stands_for_its_id",
    "system/test_films_over_http.py::test_a_text_keeps_to_a_schema",
)

FAMILY = FAMILIES["qwen3_omni"]
VOICES = {"ethan", "chelsie", "aiden"}


@pytest.fixture(scope="module")
def qwen3_house(tmp_path_factory: pytest.TempPathFactory, qwen3_checkpoint: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("qwen3_house")
    with fleet(
        folder,
        replicas=1,
        pipeline=FAMILY.pipeline(folder),
        family=FAMILY.name,
        stage_args=["--checkpoint", str(qwen3_checkpoint), "--dtype", "float32"],
    ) as running:
        yield running


@QWEN3_LONG
async def test_a_client_goes_on_with_what_it_has(qwen3_house: Fleet, seed: int) -> None:
    """In text and in speech, after some sound; with codes, and without them as most clients have it."""
    asked = question(FAMILY, seed, tokens=20, frames=40)
    async with omni_stub(qwen3_house.address("router")) as stub:
        whole = await ask(stub, asked)
        assert len(whole.codes()) == 40 * FAMILY.groups and len(whole.samples()) == FAMILY.samples(40)
        for outputs in (["text", "audio"], ["text", "codes", "audio"]):
            asked.outputs[:] = outputs
            begin, call = WholeAnswer(), stub.Generate(asked, timeout=60)
            async for event in call:
                begin.take(event)
                if audio_chunks(2)(begin):
                    break
            call.cancel()
            both = joined(begin, await ask(stub, continued(asked, begin)))
            both.check_whole()
            assert set(both.chunks) == set(outputs)
            assert both.text() == whole.text() and both.codes() == (whole.codes() if "codes" in outputs else [])
            assert np.array_equal(both.samples(), whole.samples())


@QWEN3_LONG
def test_a_talk_over_http(qwen3_house: Fleet, tmp_path: Path, seed: int) -> None:
    """A picture is spoken of, whole and as it comes, then the talk goes on; text that is given is spoken; a text keeps to a schema. Over
    gRPC the samples are the same."""
    picture = media_files.picture(seed)
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    turns: list[Any] = [{"role": "user", "content": content}]
    drawn: dict[str, Any] = {"seed": seed % (1 << 31), "max_tokens": 12, "temperature": 1}
    with Omni(address=qwen3_house.address("router")) as omni:
        same = omni.chat(turns, voice="Aiden", ignore_eos=True, **drawn)
        said = omni.say("Good morning.", voice="Ethan", seed=drawn["seed"])
    assert same.audio is not None and said.audio is not None and len(same.audio.samples) and len(said.audio.samples)
    spoken: Any = {"modalities": ["text", "audio"], "audio": {"voice": "Aiden", "format": "pcm16"}, "extra_body": {"ignore_eos": True}}
    with (
        gateway(qwen3_house.address("router"), tmp_path) as door,
        openai.OpenAI(base_url=f"http://{door.address}/v1", api_key="test", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == [FAMILY.name]
        assert set(httpx2.get(f"http://{door.address}/v1/audio/voices").json()["names"]) == VOICES
        heard = client.chat.completions.create(model=FAMILY.name, messages=turns, **drawn, **spoken).choices[0].message.audio
        assert heard is not None
        assert (heard.transcript, base64.b64decode(heard.data)) == (same.text, to_pcm16(same.audio.samples))
        chunks = client.chat.completions.create(model=FAMILY.name, messages=turns, stream=True, **drawn, **spoken)
        pieces: list[Any] = [getattr(chunk.choices[0].delta, "audio", None) for chunk in chunks if chunk.choices]
        streamed = [piece if isinstance(piece, dict) else piece.model_dump() for piece in pieces if piece]
        assert "".join(piece.get("transcript") or "" for piece in streamed) == same.text
        assert b"".join(base64.b64decode(piece.get("data") or "") for piece in streamed) == to_pcm16(same.audio.samples)
        turns += [{"role": "assistant", "audio": {"id": heard.id}}, {"role": "user", "content": "And?"}]
        flag: Any = {"type": "json_schema", "json_schema": {"name": "flag", "strict": True, "schema": {"type": "boolean"}}}
        kept = client.chat.completions.create(model=FAMILY.name, messages=turns, response_format=flag, modalities=["text"], **drawn)
        assert isinstance(json.loads(kept.choices[0].message.content or ""), bool)
        speech = client.audio.speech.create(
            model=FAMILY.name, voice="Ethan", input="Good morning.", response_format="pcm", extra_body={"seed": drawn["seed"]}
        )
        assert speech.content == to_pcm16(said.audio.samples)
