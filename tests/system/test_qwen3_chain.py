"""Qwen3-Omni as real processes, two Talkers and two Code2Wavs for one Thinker: speakers who share them, and one talk over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from helpers import lengths, media_files
from helpers.ask import WholeAnswer, ask
from helpers.disturbed import DisturbanceStep, ask_through, audio_chunks, continued, joined, report_of
from helpers.fleet import Fleet, fleet
from helpers.gateway import gateway
from helpers.omni_family import FAMILIES, question
from helpers.servers import all_free, omni_stub
from omnistage.client import Omni
from omnistage.client.files import to_pcm16

pytestmark = [
    lengths.long_form(
        "router/test_placement.py::test_a_burst_between_two_reports_is_spread",
        "system/test_lost_router.py::test_the_rest_of_an_answer_comes_from_the_next_router",
        "gateway/test_chat.py::test_text_and_samples_are_those_over_grpc",
        "gateway/test_chat.py::test_what_an_earlier_sound_said_stands_for_its_id",
        "system/test_films_over_http.py::test_a_text_keeps_to_a_schema",
    )
]

FAMILY = FAMILIES["qwen3_omni"]
VOICES = {"ethan", "chelsie", "aiden"}
SPEAKERS = 4


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, qwen3_checkpoint: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("house")
    with fleet(
        folder,
        replicas={"thinker": 1, "talker": 2, "code2wav": 2},
        pipeline=FAMILY.pipeline(folder),
        family=FAMILY.name,
        stage_args=["--checkpoint", str(qwen3_checkpoint), "--dtype", "float32"],
    ) as running:
        yield running


async def test_speakers_are_spread_over_talkers_and_code2wavs(house: Fleet, seed: int) -> None:
    """Looked at while all of them speak."""
    speaking, looked = asyncio.Barrier(SPEAKERS + 1), asyncio.Event()

    async def wait() -> None:
        await speaking.wait()
        await looked.wait()

    async with omni_stub(house.address("router")) as stub:
        asked = [question(FAMILY, seed + n, tokens=20, frames=2000) for n in range(SPEAKERS)]
        calls = [asyncio.create_task(ask_through(stub, one, DisturbanceStep(audio_chunks(1), wait))) for one in asked]
        await asyncio.wait_for(speaking.wait(), 60)
        sessions = {name: (await report_of(house.address(name))).sessions for name in house.stages}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert sessions == {"thinker-0": 4, "talker-0": 2, "talker-1": 2, "code2wav-0": 2, "code2wav-1": 2}
    await all_free([house.address(name) for name in house.stages])


async def test_a_client_goes_on_with_what_it_has(house: Fleet, seed: int) -> None:
    """In text and in speech, after some sound; with codes, and without them as most clients have it."""
    asked = question(FAMILY, seed, tokens=20, frames=40)
    async with omni_stub(house.address("router")) as stub:
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


def test_a_talk_over_http(house: Fleet, tmp_path: Path, seed: int) -> None:
    """A picture is spoken of, whole and as it comes, then the talk goes on; text that is given is spoken; a text keeps to a schema. Over
    gRPC the samples are the same."""
    picture = media_files.picture(seed)
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    turns: list[Any] = [{"role": "user", "content": content}]
    drawn: dict[str, Any] = {"seed": seed % (1 << 31), "max_tokens": 12, "temperature": 1}
    with Omni(address=house.address("router")) as omni:
        same = omni.chat(turns, voice="Aiden", ignore_eos=True, **drawn)
        said = omni.say("Good morning.", voice="Ethan", seed=drawn["seed"])
    assert same.audio is not None and said.audio is not None and len(same.audio.samples) and len(said.audio.samples)
    spoken: Any = {"modalities": ["text", "audio"], "audio": {"voice": "Aiden", "format": "pcm16"}, "extra_body": {"ignore_eos": True}}
    with (
        gateway(house.address("router"), tmp_path) as door,
        openai.OpenAI(base_url=f"http://{door.address}/v1", api_key="test", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == [FAMILY.name]
        assert set(httpx2.get(f"http://{door.address}/v1/audio/voices").json()["voices"]) == VOICES
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
