"""Pipelines, voices and errors, as HTTP tells of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, get_args, get_origin

import grpc
import httpx2
import openai
import pytest
from pydantic import BaseModel, ValidationError

from helpers import servers
from helpers.chain import addresses_of
from helpers.gateway import local_gateway, router_of
from helpers.openai_document import document
from helpers.peer import PlayingPeer, listening
from helpers.ports import take_address
from helpers.raw_http import answer, connected, head, heard, post
from helpers.servers import family_logic, local_chain, local_router, local_stage
from omnistage.client.connection import Pipeline
from omnistage.client.errors import BY_CODE, BY_REASON, NotAvailableError, NotSpokenError, OmniError, RouterLostError
from omnistage.client.events import StageReport, Usage
from omnistage.gateway import audio, chat, completions, door, films, ollama, pictures, responses
from omnistage.gateway.audio import SpeechBody
from omnistage.gateway.body import Body
from omnistage.gateway.chat import ChatRequest
from omnistage.gateway.failure import of_omni
from omnistage.gateway.pictures import PictureRequest
from omnistage.gateway.report import audio_tokens, chat_usage, speech_usage
from omnistage.gateway.responses import ResponsesRequest
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import REASONS, StageError

TOY, PICTURE = load_pipeline("toy"), load_pipeline("toy-picture")

PATHS = ("/ready", "/v1/models", "/v1/models/toy", "/v1/audio/voices", "/v1/audio/models", "/ready")
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
            os.kill(router_of(stack).pid, signal.SIGSTOP)
            try:
                for _ in range(20):
                    with connected(url) as leaving:
                        leaving.sendall(request)
                told = await asyncio.gather(*(asyncio.to_thread(answer, url, head("GET", path, {"Host": "localhost"})) for path in PATHS))
            finally:
                os.kill(router_of(stack).pid, signal.SIGCONT)
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
        speech = {"input": "Hello", "response_format": "pcm"}
        spoken = [await client.post("/v1/audio/speech", json={"model": model, "voice": voice, **speech}) for model, voice in asked]
        assert [answer.status_code for answer in spoken] == [200, 200, 200, 404, 400, 404]
        question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        names_asked = ("mine", "toy", "tts-1", "")
        answered = [await client.post("/v1/chat/completions", json={"model": model, **question}) for model in names_asked]
        assert [answer.status_code for answer in answered] == [200, 200, 404, 404]


async def test_a_model_is_asked_by_each_of_its_names() -> None:
    """One with a slash too. The router knows the same names; a name of two is refused with both."""
    toy = load_pipeline("toy").with_names(["Owner/Toy", "both"])
    picture = PICTURE.with_names(["Owner/Picture", "Both"])
    async with (
        local_chain() as chain,
        local_stage(family_logic("toy", "diffusion")) as painter,
        local_router({**addresses_of(chain), "toy-picture/diffusion": painter.address}, toy, picture) as router,
        local_gateway(router.address, model_names="mine=owner/toy") as (url, _),
        httpx2.AsyncClient(base_url=f"{url}/v1", timeout=60) as client,
    ):
        question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        for model in ("toy", "Toy", "Owner/Toy", "OWNER/toy", "mine"):
            answered = await client.post("/chat/completions", json={"model": model, **question})
            assert (answered.status_code, answered.json()["model"]) == (200, model), "programs compare it with what they asked"
        for path in ("/models/toy", "/models/Owner/Toy", "/models/owner%2Ftoy"):
            model_facts = (await client.get(path)).json()
            assert (model_facts["id"], model_facts["names"]) == ("toy", ["Owner/Toy", "both", "toy-thinker"])
        for path, body in (
            ("/images/generations", {"model": "Owner/Picture", "prompt": "a walk"}),
            ("/audio/speech", {"model": "Owner/Toy", "input": "Hello", "response_format": "pcm"}),
            ("/responses", {"model": "Owner/Toy", "input": "Hello", "max_output_tokens": 16}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
        errors = {}
        for model in ("both", "Owner/Toi"):
            refused = await client.post("/chat/completions", json={"model": model, **question})
            errors[model] = (refused.status_code, refused.json()["error"]["code"], refused.json()["error"]["message"])
    assert errors == {
        "both": (400, "ambiguous_model", "The model 'both' is another name of toy and toy-picture; give one of these"),
        "Owner/Toi": (
            404,
            "model_not_found",
            "The model 'Owner/Toi' does not exist here; there are: toy (Owner/Toy), toy-picture (Owner/Picture); did you mean Owner/Toy?",
        ),
    }


def test_voices_have_the_models_that_speak_with_them(url: str) -> None:
    answer = httpx2.get(f"{url}/v1/audio/voices").json()
    (voice,) = answer["data"]
    assert (voice["id"], voice["name"], voice["object"], voice["models"]) == ("toy", "toy", "audio.voice", ["toy"])
    assert (answer["voices"], answer["names"]) == (answer["data"], ["toy"])


def test_open_webui_finds_voices_and_models(url: str, film_url: str) -> None:
    """By the expressions of `get_available_voices` and `get_available_models` in its routers/audio.py, which it asks at its base URL for
    speech. If they fail, it shows OpenAI's voices and models."""
    data = httpx2.get(f"{url}/v1/audio/voices").json()
    assert {voice["id"]: voice["name"] for voice in data.get("voices", [])} == {"toy": "toy"}
    data = httpx2.get(f"{url}/v1/audio/models").json()
    assert [model["id"] for model in data.get("models", [])] == ["toy"] and data["data"] == data["models"]
    assert httpx2.get(f"{film_url}/v1/audio/models").json()["models"] == [], "a pipeline that draws sound speaks no text"


def test_lists_are_as_the_document_has_them(url: str) -> None:
    document().check_answer(httpx2.get(f"{url}/v1/models").json(), "/models", "get")
    document().check(httpx2.get(f"{url}/v1/models/toy").json(), "Model")
    for voice in httpx2.get(f"{url}/v1/audio/voices").json()["data"]:
        # It has no list of voices, only one that was made.
        document().check({name: value for name, value in voice.items() if name != "models"}, "VoiceResource")


# While a pipeline starts


async def test_the_first_picture_of_openais_client_comes_when_its_pipeline_has_started() -> None:
    address = take_address()
    async with (
        local_chain() as chain,
        local_router({**addresses_of(chain), "toy-picture/diffusion": address}, TOY, PICTURE) as router,
        local_gateway(router.address) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="ann", max_retries=0) as client,
    ):
        picture = asyncio.create_task(client.images.generate(model="toy-picture", prompt="a walk", size="256x256"))
        answer = await client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content and not picture.done()
        async with local_stage(family_logic("toy", "diffusion"), address=address):
            pictures = await picture
    assert pictures.data and pictures.data[0].b64_json


async def test_one_that_does_not_start_is_told_with_when_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "START_PATIENCE_S", 1.5)
    async with (
        local_chain() as chain,
        local_router({**addresses_of(chain), "toy-picture/diffusion": take_address()}, TOY, PICTURE) as router,
        local_gateway(router.address) as (url, _),
        httpx2.AsyncClient() as client,
    ):
        refused = await client.post(f"{url}/v1/images/generations", json={"model": "toy-picture", "prompt": "a walk"}, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
    assert float(refused.headers["retry-after"]) > 0


# Errors and accounts


KINDS: set[type[OmniError]] = {*BY_REASON.values(), *BY_CODE.values(), NotSpokenError, NotAvailableError, RouterLostError}

LIBRARY = ("`", "pipelines()", "outputs=", "timeout_s", "max_tokens", "--", "named field", "omnistage ")
"""Words for whoever calls the client library, or runs the stack."""


@pytest.mark.parametrize("kind", sorted(KINDS, key=str))
def test_hints_are_for_who_asks_over_http(kind: type[OmniError]) -> None:
    told = of_omni(kind("it failed")).body["error"]
    assert not [word for word in LIBRARY if word in (told["hint"] or "")] and told["reason"]


ASKED = [
    (ChatRequest, chat.FIELDS, ("request", "conversation", "pipeline", "outputs", "thinker", "thinker.messages", "diffusion")),
    (ResponsesRequest, responses.FIELDS, ("request", "conversation", "pipeline", "outputs", "talker")),
    (ResponsesRequest, responses.FIELDS, ("thinker.constraint", "seed", "top_p")),
    (SpeechBody, audio.SPEECH_FIELDS, ("request", "text", "pipeline", "outputs", "thinker", "talker", "code2wav", "thinker.verbatim")),
    (SpeechBody, audio.SPEECH_FIELDS, ("talker.voice", "talker.speed", "code2wav.profile", "code2wav.sample_rate_hz", "thinker.messages")),
    (PictureRequest, pictures.FIELDS, ("request", "prompt", "pipeline", "outputs", "diffusion", "width", "diffusion.height", "results")),
    (PictureRequest, pictures.FIELDS, ("diffusion.media_type", "diffusion.previews", "diffusion.steps", "diffusion.layers", "previews")),
]


@pytest.mark.parametrize(("body", "fields", "named"), ASKED)
def test_what_the_library_names_is_a_field_of_a_client(body: type[BaseModel], fields: dict[str, str], named: tuple[str, ...]) -> None:
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
    assert speech_usage(usage)["output_tokens"] == chat_usage([usage], 1)["completion_tokens_details"]["audio_tokens"] == 160


# Asked again ---------------------------------------------------------------------------------------------------------------------------

BODIES = {
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


@pytest.mark.parametrize("path", BODIES)
async def test_the_router_is_asked_once_for_each_request(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it says when to ask again: it is who asked over HTTP that does, or a refusal would become nine."""
    monkeypatch.setattr(door, "START_PATIENCE_S", 0.0)  # Only a pipeline that starts is waited for.
    refusals = [StageError(reason, "not now", retry_delay_s=0.01) for reason in PASSES]
    peer = Offering(*refusals)
    async with listening(peer) as wire, local_gateway(wire.address) as (url, _):
        for number, refusal in enumerate(refusals, 1):
            with connected(url) as connection:
                connection.sendall(post(BODIES[path], path))
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


# Fields that are null


MODULES = (audio, chat, completions, films, ollama, pictures, responses)
VALUES: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "Hello"}],
    "input": "Hello",
    "prompt": "Hello",
    "name": "answer",
    "type": "text",
    "voice": "toy",
    "images": [{"image_url": "data:image/png;base64,"}],
}
"""Good values for required fields."""


def bodies() -> list[type[Body]]:
    """The bodies of all endpoints, and the objects within them."""
    found = [one for module in MODULES for one in vars(module).values() if isinstance(one, type) and issubclass(one, Body)]
    return sorted({one for one in found if one.__module__ != Body.__module__}, key=lambda one: one.__name__)


@pytest.mark.parametrize("body", bodies())
def test_null_is_not_given(body: type[Body]) -> None:
    """So it is no value of a field that must be given, and it makes no field known."""
    required = {name: VALUES[name] for name, field in body.model_fields.items() if field.is_required()}
    expected = body.model_validate(required)
    optional = [field.alias or name for name, field in body.model_fields.items() if not field.is_required()]
    assert optional
    for name in optional:
        assert body.model_validate({**required, name: None}) == expected, name
    assert body.model_validate({**required, **dict.fromkeys(optional)}) == expected
    for name in required:
        with pytest.raises(ValidationError, match="Field required"):
            body.model_validate({**required, name: None})
    with pytest.raises(ValidationError, match="Extra inputs"):
        body.model_validate({**required, "no_such_field": None})


def numbers() -> list[tuple[type[Body], str, bool]]:
    """Fields that are numbers: the body, the name, whether it is a whole number."""
    kinds = [(body, name, field.annotation) for body in bodies() for name, field in body.model_fields.items()]
    leaves = [(body, name, leaves_of(annotation)) for body, name, annotation in kinds]
    return [(body, name, float not in types) for body, name, types in leaves if types & {int, float} and not types & {bool, list, dict}]


def leaves_of(annotation: Any) -> set[Any]:
    """The types within an annotation; of a value of a Literal its type."""
    kind = annotation if isinstance(annotation, type) else get_origin(annotation) or type(annotation)
    return {kind}.union(*map(leaves_of, get_args(annotation)))


def test_a_number_is_what_json_says(subtests: pytest.Subtests) -> None:
    """12.0 is a whole number; 12.5 and true are none, and true is no number at all. A whole number that is too large is refused."""
    seen = set[str]()
    for body, name, is_whole in numbers():
        required = {name: VALUES[name] for name, field in body.model_fields.items() if field.is_required()}
        # Raw samples have few rates, and `min_p` is below 1.
        number = {"sample_rate_hz": 8000, "min_p": 0}.get(name, 1)
        with subtests.test(body=body.__name__, field=name):
            seen.add(name)
            value = getattr(body.model_validate({**required, name: float(number)}), name)
            assert value == number and type(value) is (int if is_whole else float)
            for wrong in (True, False, *([number + 0.5] if is_whole else [])):
                with pytest.raises(ValidationError, match=name):
                    body.model_validate({**required, name: wrong})
    assert {"n", "max_tokens", "seed", "top_k", "steps", "frames", "sample_rate_hz", "temperature", "seconds"} <= seen


NULLS = {
    "/v1/chat/completions": {"messages": VALUES["messages"]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
}


def test_every_field_of_our_document_may_be_null(url: str) -> None:
    """All at once, asked over HTTP; but for those that must be given."""
    document = httpx2.get(f"{url}/openapi.json").json()
    bodies = {
        path: each["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, each in document["paths"].items()
        if "post" in each
    }
    assert NULLS.keys() < bodies.keys()
    for path, required in (*NULLS.items(), ("/v1/audio/speech", {"input": "Hello"})):
        schema = document["components"]["schemas"][bodies[path]["$ref"].rpartition("/")[2]]
        body = {"model": "toy", **required}
        nulls = dict.fromkeys(schema["properties"].keys() - body.keys())
        assert len(nulls) > 5 and httpx2.post(f"{url}{path}", json={**nulls, **body}).status_code == 200, path


def test_a_speech_with_nulls_is_the_speech_without(client: openai.OpenAI) -> None:
    asked = {"model": "toy", "voice": "toy", "input": "Hello", "extra_body": {"seed": 7}}
    nulls = {"response_format": None, "stream_format": None, "speed": None, "instructions": None}
    one = client.audio.speech.create(**asked)  # type: ignore[arg-type]
    other = client.audio.speech.create(**{**asked, "extra_body": {"seed": 7, **nulls}})  # type: ignore[arg-type]
    assert one.content == other.content
