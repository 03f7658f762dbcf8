"""How errors and accounts of the client library are told over HTTP."""

from __future__ import annotations

import asyncio

import grpc
import httpx2
import openai
import pytest
from pydantic import BaseModel

from helpers.gateway import local_gateway
from helpers.peer import PlayingPeer, listening
from helpers.raw_http import connected, heard, post
from omnistage.client.errors import BY_CODE, BY_REASON, NotAvailableError, NotSpokenError, OmniError, RouterLostError
from omnistage.client.events import StageReport, Usage
from omnistage.gateway import audio, chat, door, pictures, responses
from omnistage.gateway.audio import SpeechBody
from omnistage.gateway.chat import ChatRequest
from omnistage.gateway.failure import of_omni
from omnistage.gateway.pictures import PictureRequest
from omnistage.gateway.report import audio_tokens, chat_usage, speech_usage
from omnistage.gateway.responses import ResponsesRequest
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import REASONS, StageError

KINDS: set[type[OmniError]] = {*BY_REASON.values(), *BY_CODE.values(), NotSpokenError, NotAvailableError, RouterLostError}

LIBRARY = ("`", "pipelines()", "outputs=", "timeout_s", "max_tokens", "--", "named field", "omnistage ")
"""Words for whoever calls the client library, or runs the stack."""


@pytest.mark.parametrize("kind", sorted(KINDS, key=str))
def test_hints_are_for_who_asks_over_http(kind: type[OmniError]) -> None:
    told = of_omni(kind("it failed")).body["error"]
    assert not [word for word in LIBRARY if word in (told["hint"] or "")]
    assert told["reason"]


ASKED = [
    (ChatRequest, chat.FIELDS, ("request", "conversation", "pipeline", "outputs", "thinker", "thinker.messages", "diffusion")),
    (
        ResponsesRequest,
        responses.FIELDS,
        ("request", "conversation", "pipeline", "outputs", "talker", "thinker.constraint", "seed", "top_p"),
    ),
    (SpeechBody, audio.SPEECH_FIELDS, ("request", "text", "pipeline", "outputs", "thinker", "talker", "code2wav", "thinker.verbatim")),
    (SpeechBody, audio.SPEECH_FIELDS, ("talker.voice", "talker.speed", "code2wav.profile", "code2wav.sample_rate_hz", "thinker.messages")),
    (PictureRequest, pictures.FIELDS, ("request", "prompt", "pipeline", "outputs", "diffusion", "width", "diffusion.height", "results")),
    (PictureRequest, pictures.FIELDS, ("diffusion.media_type", "diffusion.previews", "diffusion.steps", "diffusion.layers", "previews")),
]


@pytest.mark.parametrize(("body", "fields", "named"), ASKED)
def test_what_the_library_names_is_a_field_that_a_client_wrote(
    body: type[BaseModel], fields: dict[str, str], named: tuple[str, ...]
) -> None:
    assert [name for name in named if fields.get(name, name).partition(".")[0] not in body.model_fields] == []


@pytest.mark.parametrize(
    ("path", "body", "missing"),
    [
        ("/v1/chat/completions", {"model": "toy", "temperature": "warm"}, "messages"),
        ("/v1/responses", {"model": "toy", "temperature": "warm"}, "input"),
        ("/v1/images/generations", {"steps": "few"}, "prompt"),
        ("/v1/videos", {"steps": "few"}, "prompt"),
        ("/v1/audio/generate", {"steps": "few", "size": 3}, "prompt"),
    ],
)
def test_a_missing_field_is_told_before_a_wrong_one(path: str, body: dict[str, object], missing: str, url: str) -> None:
    error = httpx2.post(f"{url}{path}", json=body).json()["error"]
    assert (error["param"], error["code"], error["message"]) == (missing, "missing_required_parameter", f"{missing}: is missing")


@pytest.mark.parametrize("ports", [{"codes": 160}, {"features": 160}, {"features": 160, "alignment": 80}])
def test_frames_of_speech_count_whatever_they_are_made_of(ports: dict[str, int]) -> None:
    talker = StageReport("talker", "127.0.0.1:1", 0.0, 0.1, 0.2, {"text": 9}, ports, 0, 0)
    thinker = StageReport("thinker", "127.0.0.1:2", 0.0, 0.1, 0.2, {}, {"text": 80}, 0, 0)
    usage = Usage((thinker, talker), 0.0, 0.1, 0.2, 0.3, completion_tokens=80)
    assert audio_tokens(usage) == 160
    assert speech_usage(usage)["output_tokens"] == chat_usage([usage])["completion_tokens_details"]["audio_tokens"] == 160


# Asked again ---------------------------------------------------------------------------------------------------------------------------

PATHS = {
    "/v1/chat/completions": {"model": "peer", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": "peer", "input": "Hi", "store": False},
    "/v1/audio/speech": {"model": "peer", "input": "Hi", "voice": "alloy", "response_format": "wav"},
    "/v1/images/generations": {"model": "peer", "prompt": "Hi"},
}
PASSES = sorted(name for name, reason in REASONS.items() if reason.retry_delay_s is not None)


class Offering(PlayingPeer):
    """A router with one pipeline, which could do all of it."""

    async def ListModels(
        self, request: omni_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> omni_pb2.ListModelsResponse:
        stages = [stage_pb2.STAGE_KIND_THINKER, stage_pb2.STAGE_KIND_TALKER, stage_pb2.STAGE_KIND_CODE2WAV, stage_pb2.STAGE_KIND_DIFFUSION]
        model = omni_pb2.Model(name="peer", stages=stages, inputs=["text"], outputs=["text", "audio", "image"])
        return omni_pb2.ListModelsResponse(models=[model])


@pytest.mark.parametrize("path", PATHS)
async def test_the_router_is_asked_once_for_each_request(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it says when to ask again: it is who asked over HTTP that does, or a refusal would become nine."""
    monkeypatch.setattr(door, "START_PATIENCE_S", 0.0)  # Only a pipeline that starts is waited for.
    refusals = [StageError(reason, "not now", retry_delay_s=0.01) for reason in PASSES]
    peer = Offering(*refusals)
    async with listening(peer) as wire, local_gateway(wire.address) as (url, _):
        for number, refusal in enumerate(refusals, 1):
            with connected(url) as connection:
                connection.sendall(post(PATHS[path], path))
                told = await asyncio.to_thread(heard, connection)
            assert (told.status, told.error["reason"], told.header("retry-after")) == (503, refusal.reason, "1"), told.body
            assert len(peer.requests) == number


async def test_openais_client_asks_again_by_itself_when_it_was_told_to() -> None:
    peer = Offering(*[StageError("OVERLOADED", "not now", retry_delay_s=0.01) for _ in range(2)])
    async with (
        listening(peer) as wire,
        local_gateway(wire.address) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="test") as client,
    ):
        answer = await client.chat.completions.create(model="peer", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content and len(peer.requests) == 3
