"""The requests that clients may send to a router, and the refusals of all others."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.samples import Sample

from helpers import lengths
from helpers.ask import ask, refused, request
from helpers.chain import RouterAndStages, good, router_and_stages, toy_chain
from helpers.run import messages
from helpers.servers import CHAIN, Local, all_free, family_logic, toy_logic
from omnistage.router.pipeline import PipelineFile, StageSpec, load_pipeline
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN, INF = math.nan, math.inf

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


async def test_text_and_sound_and_the_account(stack: RouterAndStages, seed: int):
    answer = await ask(stack.stub, request("What now?", seed))
    answer.check_toy(seed, "What now?")
    assert answer.started is not None and answer.usage is not None
    assert (answer.started.model, answer.started.seed) == ("toy", seed) and answer.started.session_id
    usage = answer.usage
    assert [report.kind for report in usage.stages] == [1, 2, 3]
    assert usage.finish_reason == chunk_pb2.FINISH_REASON_STOP
    seconds = {name: getattr(usage, name).ToTimedelta().total_seconds() for name in ("first_text", "first_audio", "total")}
    assert 0 < seconds["first_text"] <= seconds["total"] and 0 < seconds["first_audio"] <= seconds["total"]
    assert dict(usage.stages[2].output_items) == {"audio": len(answer.samples())}


async def test_without_a_seed_each_answer_draws_its_own_and_says_which(stack: RouterAndStages):
    answers = [await ask(stack.stub, request("hm", None)) for _ in range(2)]
    seeds = [answer.started.seed for answer in answers if answer.started]
    assert seeds[0] != seeds[1]
    for answer, seed in zip(answers, seeds, strict=True):
        answer.check_toy(seed, "hm")


async def test_text_alone_uses_the_thinker_alone(stack: RouterAndStages):
    before = {kind: _sessions_ended(stage) for kind, stage in stack.stages.items()}
    answer = await ask(stack.stub, request("hm", 3, outputs=["text"]))
    answer.check_toy(3, "hm")
    assert set(answer.chunks) == {"text"} and answer.usage is not None
    assert [report.kind for report in answer.usage.stages] == [stage_pb2.STAGE_KIND_THINKER]
    await all_free(stack.addresses)
    after = {kind: _sessions_ended(stage) for kind, stage in stack.stages.items()}
    assert {kind: after[kind] - before[kind] for kind in after} == {"thinker": 1, "talker": 0, "code2wav": 0}


def _samples(server: Local) -> list[Sample]:
    return [sample for family in server.registry.collect() for sample in family.samples]


def _sessions_ended(stage: Local) -> float:
    return sum(sample.value for sample in _samples(stage) if sample.name == "omnistage_stage_sessions_total")


@pytest.mark.parametrize(
    "prompt",
    ["x" * 20_000, "\N{GRINNING FACE}" * 40, "\N{ZERO WIDTH JOINER}", "a\x00b", "\N{RIGHT-TO-LEFT OVERRIDE}"],
    ids=["20000", "emoji", "joiner", "nul", "bidi"],
)
async def test_odd_texts_get_an_answer(stack: RouterAndStages, prompt: str):
    (await ask(stack.stub, request(prompt, 7))).check_toy(7, prompt)


async def test_times_to_the_first_text_and_sound_are_measured(stack: RouterAndStages):
    await ask(stack.stub, request("hm", 3))
    await ask(stack.stub, request("hm", 3, outputs=["text"]))
    counts = {sample.name: sample.value for sample in _samples(stack.router) if sample.name.endswith("_count")}
    times = {"ttft_seconds": 2, "ttfa_seconds": 1, "rtf": 1, "queue_seconds": 2, "request_seconds": 2}
    assert counts == {f"omnistage_router_{name}_count": count for name, count in times.items()}


async def test_metrics_tell_which_pipeline_has_which_models(stack: RouterAndStages):
    """So a dashboard finds the stages' own metrics, which have labels `stage` and `model`, from those of a pipeline."""
    await ask(stack.stub, request("hm", 3))
    labels = ("pipeline", "stage", "model", "state")
    counted = [sample for sample in _samples(stack.router) if sample.name == "omnistage_router_replicas"]
    replicas = {tuple(map(sample.labels.get, labels)): sample.value for sample in counted}
    states = {"serving": 1, "draining": 0, "lost": 0, "starting": 0, "unloaded": 0}
    assert replicas == {("toy", kind, f"toy-{kind}", state): count for kind in CHAIN for state, count in states.items()}
    ended = {"pipeline": "toy", "reason": "OK"}
    assert (stack.router.registry.get_sample_value("omnistage_router_requests_total", ended) or 0) >= 1


async def test_list_models(stack: RouterAndStages):
    (model,) = (await stack.stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)).models
    assert (model.name, list(model.stages), list(model.inputs)) == ("toy", [1, 2, 3], ["text"])
    assert (list(model.outputs), list(model.voices)) == (["text", "audio"], ["toy"]) and model.description


async def test_list_replicas(stack: RouterAndStages):
    replicas = (await stack.stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)).replicas
    expected = [("toy", number, f"toy-{kind}") for number, kind in enumerate(CHAIN, 1)]
    assert [(replica.pipeline, replica.kind, replica.model) for replica in replicas] == expected
    assert [replica.address for replica in replicas] == stack.addresses
    assert all(replica.state == omni_pb2.REPLICA_STATE_SERVING and replica.pid for replica in replicas)


# Refusals ------------------------------------------------------------------------------------------------------------------------------


def _thinker(**fields: object) -> omni_pb2.GenerateRequest:
    return request(thinker=fields)


def _said(role: str, part: stage_pb2.Part) -> omni_pb2.GenerateRequest:
    return _thinker(messages=[stage_pb2.Message(role=role, parts=[part])])


def _sampling(**fields: object) -> omni_pb2.GenerateRequest:
    return request(thinker={"sampling": stage_pb2.Sampling(**fields)})  # type: ignore[arg-type]


def _other(kind: str, **fields: object) -> omni_pb2.GenerateRequest:
    types = {"talker": stage_pb2.TalkerParams, "code2wav": stage_pb2.Code2WavParams}
    return request(**{kind: types[kind](**fields)})


def _resume(outputs: Sequence[str] = (), **position: object) -> omni_pb2.GenerateRequest:
    resume = stage_pb2.Resume(positions=[stage_pb2.Position(**position)])  # type: ignore[arg-type]
    return request(outputs=outputs, resume=resume)


BAD_REQUESTS = [
    (omni_pb2.GenerateRequest(), "thinker.messages"),
    (request(""), "thinker.messages"),
    (request(" \n\t "), "thinker.messages"),
    (_thinker(messages=[]), "thinker.messages"),
    (_said("robot", stage_pb2.Part(text="x")), "thinker.messages.role"),
    (_said("system", stage_pb2.Part(text="x")), "thinker.messages"),
    (_said("user", stage_pb2.Part(port="x")), "thinker.messages.parts.port"),
    (_said("user", stage_pb2.Part(media=stage_pb2.Media())), "thinker.messages.parts.media.media_type"),
    (_thinker(messages=messages("x") * 1025), "thinker.messages"),
    (request("x" * ((1 << 20) + 1)), "thinker.messages"),
    (_thinker(max_tokens=32769), "thinker.max_tokens"),
    (_thinker(max_tokens=(1 << 32) - 1), "thinker.max_tokens"),
    (_thinker(max_tokens=5, min_tokens=6), "thinker.min_tokens"),
    (_thinker(stop=["a"] * 17), "thinker.stop"),
    (_thinker(stop=[""]), "thinker.stop"),
    (_thinker(stop=["a" * 257]), "thinker.stop"),
    (_thinker(constraint=stage_pb2.Constraint(regex="a")), "thinker.constraint"),
    *[(_sampling(temperature=value), "thinker.sampling.temperature") for value in (NAN, INF, -INF, -0.1, 2.1)],
    *[(_sampling(top_p=value), "thinker.sampling.top_p") for value in (NAN, INF, 0, -1, 1.1)],
    *[(_sampling(min_p=value), "thinker.sampling.min_p") for value in (NAN, INF, -0.1, 1, 1.1)],
    *[(_sampling(repetition_penalty=value), "thinker.sampling.repetition_penalty") for value in (NAN, INF, 0, -1, 101)],
    *[(_sampling(presence_penalty=value), "thinker.sampling.presence_penalty") for value in (NAN, INF, -2.1, 2.1)],
    *[(_sampling(frequency_penalty=value), "thinker.sampling.frequency_penalty") for value in (NAN, INF, -2.1, 2.1)],
    *[(_sampling(logit_bias={3: value}), "thinker.sampling.logit_bias") for value in (NAN, INF, 101, -101)],
    (_sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "thinker.sampling.logit_bias"),
    (_other("talker", voice="nobody"), "talker.voice"),
    *[(_other("talker", speed=value), "talker.speed") for value in (NAN, INF, 0, 0.4, 2.1, -1)],
    (_other("talker", max_frames=(1 << 20) + 1), "talker.max_frames"),
    (_other("talker", sampling=stage_pb2.Sampling(temperature=NAN)), "talker.sampling.temperature"),
    (_other("code2wav", profile="best"), "code2wav.profile"),
    (_other("code2wav", sample_rate_hz=11), "code2wav.sample_rate_hz"),
    (_other("code2wav", encoding=77), "code2wav.encoding"),
    (request(diffusion=stage_pb2.DiffusionParams(prompt="x")), "diffusion"),
    (request(outputs=["video"]), "outputs"),
    (request(outputs=["text", "hidden"]), "outputs"),
    (request(outputs=[""]), "outputs"),
    (request(request_id="a b"), "request_id"),
    (request(request_id="a" * 65), "request_id"),
    (request(conversation_id="\N{SNOWMAN}"), "conversation_id"),
    (request(seed=None, resume=stage_pb2.Resume()), "seed"),
    (request(revisions=["1"]), "revisions"),
    (request(revisions=["1"] * 4, resume=stage_pb2.Resume()), "revisions"),
    (_resume(["text"], port="audio", seq=1, first=1), "resume"),
    (_resume(port="codes", seq=1, first=1), "resume"),
    (_resume(port="hidden"), "resume"),
    (_resume(port="text", seq=1, first=1), "resume.history"),
    (_resume(port="audio", seq=0, first=7), "resume.positions"),
    (_resume(port="audio", seq=0, ended=True), "resume.positions"),
    (request(resume=stage_pb2.Resume(history=[chunk_pb2.Chunk(port="codes")])), "resume"),
]


@lengths.drawn_cells(25, ("asked", "field"), BAD_REQUESTS, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_bad_field_is_named(steady: RouterAndStages, asked: omni_pb2.GenerateRequest, field: str):
    refusal = await refused(steady.stub, asked)
    assert (refusal.code, refusal.reason, refusal.fields) == (INVALID, "BAD_REQUEST", [field])
    assert refusal.message and refusal.retry_delay_s is None
    (await ask(steady.stub, good())).check_toy(5, "good")


async def test_an_unknown_model(stack: RouterAndStages):
    refusal = await refused(stack.stub, request(model="gpt"))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
    assert "toy" in refusal.message


@pytest.mark.parametrize("stack", [{"max_message_bytes": 1 << 20}], indirect=True)
async def test_a_request_above_the_size_limit(stack: RouterAndStages):
    """gRPC refuses it before our code sees it, so there are no details."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(stack.stub, request("x" * (2 << 20)))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert re.search(r"larger than max \(\d+ vs\. 1048576\)", raised.value.details() or "")


SEEING = PipelineFile(
    name="seeing",
    description="A Thinker that takes pictures.",
    inputs=("text", "image"),
    outputs=("text",),
    stages=(StageSpec(kind="thinker", family="toy-omni"),),
    defaults={"thinker": {"max_tokens": 16}},
)


@pytest.mark.parametrize("most", [1 << 20, 64 << 20])
async def test_the_largest_request_that_a_router_takes_reaches_the_stage(most: int):
    """The hop has room for what the router adds to a request: the Thinker itself says that it reads no such picture."""
    asked = request()
    part = asked.thinker.messages[0].parts.add()
    part.media.media_type = "image/png"
    part.media.data = bytes(most - 256)
    part.media.data += bytes(most - asked.ByteSize())
    assert asked.ByteSize() == most
    room = {"max_message_bytes": most}
    async with router_and_stages([family_logic("toy-omni", "thinker")], SEEING, stage=room, **room) as stack:
        refusal = await refused(stack.stub, asked)
        assert (refusal.reason, refusal.fields) == ("BAD_REQUEST", ["thinker.messages.parts.media"])
        answer = await ask(stack.stub, good())
        answer.check_whole()
        assert answer.text()


# Fields that are passed on -------------------------------------------------------------------------------------------------------------


async def test_the_clients_deadline_ends_the_work_everywhere(stack: RouterAndStages):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(stack.stub, request(thinker={"max_tokens": 20_000, "ignore_eos": True}), timeout_s=0.4)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await all_free(stack.addresses)


class NotedRuns(grpc.aio.ServerInterceptor):
    """Notes down with how much time and what metadata each `Run` came in."""

    def __init__(self) -> None:
        self.runs: list[tuple[float | None, dict[str, str]]] = []

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if not details.method.endswith("/Run"):
            return handler

        async def run(requests: object, context: grpc.aio.ServicerContext[stage_pb2.RunRequest, stage_pb2.RunResponse]) -> None:
            self.runs.append((context.time_remaining(), {key: str(value) for key, value in context.invocation_metadata() or ()}))
            await handler.stream_stream(requests, context)

        return grpc.stream_stream_rpc_method_handler(run, handler.request_deserializer, handler.response_serializer)


async def test_deadline_and_trace_reach_every_stage():
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    seen = NotedRuns()
    async with router_and_stages(toy_chain(), stage={"interceptors": [seen]}) as stack:
        context = [("traceparent", trace), ("tracestate", "a=b"), ("authorization", "secret")]
        await ask(stack.stub, good(), timeout_s=17, metadata=context)
        assert len(seen.runs) == len(CHAIN)
        for remaining_s, metadata in seen.runs:
            assert remaining_s is not None and 0 < remaining_s <= 17 * 1.05  # gRPC rounds it up on the wire
            assert (metadata["traceparent"], metadata["tracestate"]) == (trace, "a=b")
            assert "authorization" not in metadata
        await ask(stack.stub, good())
        (new,) = {metadata["traceparent"] for _, metadata in seen.runs[len(CHAIN) :]}
        assert new != trace and re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", new)


# Drawing -------------------------------------------------------------------------------------------------------------------------------


PICTURES = [
    ({"prompt": ""}, "diffusion.prompt"),
    ({"prompt": " "}, "diffusion.prompt"),
    ({"prompt": "x" * 32_001}, "diffusion.prompt"),
    ({"prompt": "x", "results": 9}, "diffusion.results"),
    ({"prompt": "x", "previews": 17}, "diffusion.previews"),
    ({"prompt": "x", "steps": 1001}, "diffusion.steps"),
    ({"prompt": "x", "width": 1 << 31}, "diffusion.width"),
    ({"prompt": "x", "height": 1025}, "diffusion.height"),
    ({"prompt": "x", "images": [stage_pb2.Media()]}, "diffusion.images.media_type"),
    *[({"prompt": "x", "sigmas": value}, "diffusion.sigmas") for value in ([NAN], [INF], [0.0], [-1.0], [0.5, 0.5], [1.0, 0.5])],
    *[({"prompt": "x", "strength": value}, "diffusion.strength") for value in (NAN, INF, 0, -1, 1.1, 0.5)],
    *[({"prompt": "x", "options": value}, "diffusion.options") for value in ({"": "1"}, {"a b": "1"}, {"a": "x" * 20_001}, {"a": "1"})],
    ({"prompt": "x", "mask_image": stage_pb2.Media(media_type="image/png")}, "diffusion.mask_image.data"),
    ({"prompt": "x", "control_image": stage_pb2.Media(media_type="image/png", data=b"-")}, "diffusion.control_image"),
    *[({"prompt": "x", "guidance_scale": value}, "diffusion.guidance_scale") for value in (NAN, INF, -1, 101)],
    *[({"prompt": "x", "duration_s": value}, "diffusion.duration_s") for value in (NAN, INF, -1, 5)],
    ({"prompt": "x", "frames": 10}, "diffusion.frames"),
    ({"prompt": "x", "layers": 2}, "diffusion.layers"),
    ({"prompt": "x", "media_type": "text/html"}, "diffusion.media_type"),
]


@pytest.fixture
async def painter() -> AsyncIterator[omni_pb2_grpc.OmniServiceAsyncStub]:
    async with router_and_stages([toy_logic("diffusion")], load_pipeline("toy-picture")) as stack:
        yield stack.stub
        answer = await ask(stack.stub, omni_pb2.GenerateRequest(seed=1, diffusion=stage_pb2.DiffusionParams(prompt="a hill")))
        assert [chunk.count for chunk in answer.of("image")] == [1, 0]


@pytest.mark.parametrize(("fields", "field"), PICTURES, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_bad_field_of_a_drawing_request_is_named(
    painter: omni_pb2_grpc.OmniServiceAsyncStub, fields: dict[str, object], field: str
):
    refusal = await refused(painter, omni_pb2.GenerateRequest(diffusion=stage_pb2.DiffusionParams(**fields)))  # type: ignore[arg-type]
    assert (refusal.code, refusal.reason, refusal.fields) == (INVALID, "BAD_REQUEST", [field])


async def test_a_picture_of_20000_characters(painter: omni_pb2_grpc.OmniServiceAsyncStub):
    asked = omni_pb2.GenerateRequest(seed=1, diffusion=stage_pb2.DiffusionParams(prompt="x" * 20_000, steps=3))
    answer = await ask(painter, asked)
    assert set(answer.chunks) == {"image", "progress"}
