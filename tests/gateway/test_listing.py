"""The pipelines and voices, over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from helpers import servers
from helpers.gateway import local_gateway
from helpers.openai_document import document
from helpers.raw_http import answer, connected, head
from omnistage.client.connection import Pipeline

PATHS = ("/ready", "/v1/models", "/v1/models/toy", "/v1/audio/voices", "/ready")
"""Paths that ask the router."""


def test_models_are_pipelines_with_what_they_take_and_give(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("toy", "model", "omnistage")
    told = model.model_dump()
    assert (told["inputs"], told["outputs"], told["voices"], told["state"]) == (["text"], ["text", "audio"], ["toy"], "ready")
    assert client.models.retrieve("toy") == model


async def test_a_router_that_hangs_keeps_nobody_waiting_behind_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All who ask share one call, also those who come while it is out, and its failure. Nobody hears what was before."""
    monkeypatch.setattr("omnistage.gateway.offer.FRESH_S", 0.0)
    asked: list[float] = []
    with servers.stack(tmp_path) as stack:
        async with local_gateway(stack.address) as (url, door):
            ask = door.omni.pipelines

            async def counted(*, timeout_s: float | None = None) -> list[Pipeline]:
                asked.append(time.monotonic())
                return await ask(timeout_s=0.5)

            monkeypatch.setattr(door.omni, "pipelines", counted)
            request = head("GET", "/v1/models", {"Host": "localhost"})
            assert (await asyncio.to_thread(answer, url, request)).status == 200
            monkeypatch.setattr("omnistage.gateway.offer.FRESH_S", 600.0)
            door.offer._asked_at = -600.0
            assert stack.router is not None
            os.kill(stack.router.pid, signal.SIGSTOP)
            try:
                for _ in range(20):
                    with connected(url) as leaving:
                        leaving.sendall(request)
                told = await asyncio.gather(*(asyncio.to_thread(answer, url, head("GET", path, {"Host": "localhost"})) for path in PATHS))
            finally:
                os.kill(stack.router.pid, signal.SIGCONT)
            assert {each.status for each in told} == {503}
            assert len(asked) == 2, "once before, once for all of them"
            door.offer._asked_at = -600.0
            assert (await asyncio.to_thread(answer, url, request)).status == 200


def test_a_model_that_is_not_there_is_told_which_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="toy") as refused:
        client.models.retrieve("gpt-9")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


async def test_names_that_are_given_add_to_those_that_are_known(toy: servers.ServerProcesses) -> None:
    """And a pipeline's own name is always its own."""
    asked = [("tts-1", "alloy"), ("mine", "bob"), ("toy", "bob"), ("tts-1-hd", "alloy"), ("tts-1", "ash"), ("elsewhere", "alloy")]
    names: dict[str, Any] = {"model_names": "mine=toy, toy=none, elsewhere=none, tts-1-hd=-", "voice_names": "bob=toy,ash=-"}
    async with local_gateway(toy.address, **names) as (url, _), httpx2.AsyncClient(base_url=url, timeout=60) as client:
        spoken = [
            await client.post("/v1/audio/speech", json={"model": model, "voice": voice, "input": "Hello", "response_format": "pcm"})
            for model, voice in asked
        ]
        assert [answer.status_code for answer in spoken] == [200, 200, 200, 404, 400, 404]
        question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        answered = [
            (await client.post("/v1/chat/completions", json={"model": model, **question})).status_code
            for model in ("mine", "toy", "tts-1", "")
        ]
        assert answered == [200, 200, 404, 404]


def test_voices_have_the_models_that_speak_with_them(url: str) -> None:
    answer = httpx2.get(f"{url}/v1/audio/voices", verify=False).json()
    (voice,) = answer["data"]
    assert (voice["id"], voice["name"], voice["object"], voice["models"]) == ("toy", "toy", "audio.voice", ["toy"])
    assert answer["voices"] == ["toy"]


def test_lists_are_as_the_document_has_them(url: str) -> None:
    document().check_answer(httpx2.get(f"{url}/v1/models", verify=False).json(), "/models", "get")
    document().check(httpx2.get(f"{url}/v1/models/toy", verify=False).json(), "Model")
    for voice in httpx2.get(f"{url}/v1/audio/voices", verify=False).json()["data"]:
        # It has no list of voices, only one that was made.
        document().check({name: value for name, value in voice.items() if name != "models"}, "VoiceResource")
