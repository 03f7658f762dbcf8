"""The line that a router logs for every request: `answer.done` for one that had a place, `request.refused` for one that never had."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import grpc.aio
import pytest
import structlog

from helpers.ask import GenerateCall, WholeAnswer, ask, read, refused, request
from helpers.chain import RouterAndStages, good, router_and_stages, toy_chain
from helpers.converse import ConverseStream, TurnFailed
from helpers.servers import Local, family_logic
from helpers.waiting import until
from omnistage.models.toy import formulas
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2

LONG = {"max_tokens": 20_000, "ignore_eos": True}
UUID = "322e3fe2cf6c4976a0f411505a32621c"
SECRETS = ("swordfish", "what is a kite?", "tell nobody", "STOP-HERE")
"""A key, and what people say: no log has it."""

COUNTS = {"tokens", "thought_tokens", "prompt_tokens", "cached_tokens", "pictures", "frames", "failovers", "unspoken"}
FIGURES = COUNTS | {"session_id", "finish_reason", "queued_s", "ttft_s", "ttfa_s", "audio_s", "replicas"}
OF_ALL = {"event", "log_level", "request_id", "pipeline", "client", "reason", "total_s"}

Line = MutableMapping[str, Any]


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    """The log lines of router and stages meanwhile, as they come."""
    with structlog.testing.capture_logs() as logged:
        yield logged
    text = repr(logged)
    assert [secret for secret in SECRETS if secret in text] == []


def ends(lines: Sequence[Line]) -> list[Line]:
    """The lines that end requests."""
    return [line for line in lines if line["event"] in ("answer.done", "request.refused")]


def the_end(lines: Sequence[Line], event: str, reason: str) -> Line:
    """The last line of the only request that there was."""
    (line,) = ends(lines)
    assert (line["event"], line["reason"], line["log_level"]) == (event, reason, "info")
    more = {"message", "field", "stage"} if reason != "OK" else set()
    assert (OF_ALL | FIGURES if event == "answer.done" else OF_ALL) <= line.keys() <= OF_ALL | FIGURES | more
    return line


def check_times(line: Line) -> None:
    assert 0 <= line["queued_s"] <= line["ttft_s"] <= line["ttfa_s"] <= line["total_s"]


def check_counted(router: Local, lines: Sequence[Line]) -> None:
    """There is a line for each request that was counted, with the same reason."""
    counted = {
        sample.labels["reason"]: sample.value
        for family in router.registry.collect()
        for sample in family.samples
        if sample.name == "omnistage_router_requests_total" and sample.value
    }
    assert counted == Counter(line["reason"] for line in ends(lines))


async def test_a_whole_answer(steady: RouterAndStages, lines: list[Line]) -> None:
    answer = await ask(steady.stub, request("what is a kite?", 3, request_id="r-1"), metadata=[("x-api-key", "swordfish")])
    answer.check_toy(3, "what is a kite?")
    line = the_end(lines, "answer.done", "OK")
    check_times(line)
    assert answer.started is not None and line["session_id"] == answer.started.session_id
    assert line["audio_s"] == pytest.approx(len(answer.samples()) / formulas.SAMPLE_RATE_HZ, abs=1e-4) and line["audio_s"] > 0
    assert [line[name] for name in ("request_id", "pipeline", "finish_reason")] == ["r-1", "toy", "stop"]
    assert [line[name] for name in ("tokens", "pictures", "frames", "failovers")] == [formulas.NATURAL_LENGTH, 0, 0, 0]
    assert line["replicas"] == {kind: [stage.address] for kind, stage in steady.stages.items()}
    assert line["client"] == f"key:{hashlib.sha256(b'swordfish').hexdigest()[:16]}"
    assert answer.usage is not None and answer.usage.stages[0].HasField("prompt_tokens")
    assert line["prompt_tokens"] == answer.usage.stages[0].prompt_tokens > 0 == line["cached_tokens"]
    check_counted(steady.router, lines)


async def test_text_alone_has_no_sound_and_needs_one_stage(steady: RouterAndStages, lines: list[Line]) -> None:
    await ask(steady.stub, request("what is a kite?", 3, outputs=["text"], thinker={"max_tokens": 5}))
    line = the_end(lines, "answer.done", "OK")
    assert (line["finish_reason"], line["tokens"], line["audio_s"], line["ttfa_s"]) == ("length", 5, 0, None)
    assert line["ttft_s"] > 0 and line["replicas"].keys() == {"thinker"}
    assert (line["client"], line["request_id"]) == ("127.0.0.1", None)


async def test_tokens_of_a_text_that_nobody_asked_for_are_counted(steady: RouterAndStages, lines: list[Line]) -> None:
    answer = await ask(steady.stub, request("what is a kite?", 3, outputs=["audio"]))
    assert set(answer.chunks) == {"audio"}
    sound = formulas.audio(3, "what is a kite?", formulas.NATURAL_LENGTH)[:, 0] * 32768
    assert answer.samples().tolist() == sound.tolist()
    line = the_end(lines, "answer.done", "OK")
    assert (line["tokens"], line["ttft_s"]) == (formulas.NATURAL_LENGTH, None) and line["ttfa_s"] > 0


async def test_pictures_and_frames_are_counted_and_previews_are_not(lines: list[Line]) -> None:
    async with router_and_stages([family_logic("toy-film", "diffusion")], load_pipeline("toy-film")) as stack:
        pictures = stage_pb2.DiffusionParams(prompt="tell nobody", results=2, previews=3)
        drawings = (pictures, stage_pb2.DiffusionParams(prompt="tell nobody", frames=8))
        answers = [await ask(stack.stub, omni_pb2.GenerateRequest(seed=1, diffusion=drawing)) for drawing in drawings]
        items = [[sum(chunk.count for chunk in answer.of(port)) for port in ("image", "video")] for answer in answers]
        told = [[line["pictures"], line["frames"]] for line in ends(lines)]
        assert told == items and told[0][0] == 2 and told[1][1] == 8
        assert any(chunk.image.HasField("preview_step") for chunk in answers[0].of("image"))


# Other ends ----------------------------------------------------------------------------------------------------------------------------


async def begin(stack: RouterAndStages, request_id: str = "") -> GenerateCall:
    """A long answer, which has begun."""
    call = stack.stub.Generate(request("tell nobody", 3, thinker=LONG, request_id=request_id), timeout=60)
    assert (await read(call)).HasField("started")
    return call


async def test_a_client_that_leaves(steady: RouterAndStages, lines: list[Line]) -> None:
    call, answer = await begin(steady), WholeAnswer(started=omni_pb2.Started())
    while not answer.of("audio"):
        answer.take(await read(call))
    call.cancel()
    await until(lambda: ends(lines))
    line = the_end(lines, "answer.done", "CANCELLED")
    check_times(line)
    assert line["tokens"] > 0 and line["audio_s"] > 0 and line["finish_reason"] is None
    assert line["replicas"]["thinker"] == [steady.stages["thinker"].address]


async def test_an_answer_that_takes_too_long(lines: list[Line]) -> None:
    async with router_and_stages(toy_chain({"interval_s": 0.002}), session_limit=0.4) as stack:
        refusal = await refused(stack.stub, request("tell nobody", thinker=LONG))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        assert the_end(lines, "answer.done", "DEADLINE")["message"]


async def test_a_request_that_is_asked_again(steady: RouterAndStages, lines: list[Line]) -> None:
    older = await begin(steady, UUID)
    await ask(steady.stub, request("tell nobody", 3, request_id=UUID))
    with pytest.raises(grpc.aio.AioRpcError):
        while True:
            await read(older)
    assert sorted(line["reason"] for line in ends(lines)) == ["OK", "SUPERSEDED"]
    assert {line["event"] for line in ends(lines)} == {"answer.done"}
    sessions = {line["session_id"] for line in ends(lines)}
    assert len(sessions) == 2 and None not in sessions
    check_counted(steady.router, lines)


async def test_what_a_stage_refuses_is_an_answer_that_failed(steady: RouterAndStages, lines: list[Line]) -> None:
    """Its message may quote the request: the log has the field alone, here and at the stage."""
    await refused(steady.stub, request("tell nobody", thinker={"stop": ["STOP-HERE" * 99]}))
    line = the_end(lines, "answer.done", "BAD_REQUEST")
    assert (line["field"], line["tokens"], line["replicas"], line["ttft_s"]) == ("thinker.stop", 0, {}, None)
    (told,) = [line for line in lines if line["event"] == "session.ended"]
    assert (told["reason"], told["field"]) == ("BAD_REQUEST", "thinker.stop")
    assert not any("message" in one for one in (line, told))


# Requests that never had a place ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "reason", "field"),
    [
        (request("tell nobody", model="gpt"), "UNKNOWN_MODEL", "model"),
        (request("tell nobody", outputs=["video"]), "BAD_REQUEST", "outputs"),
        (request(thinker={"messages": [stage_pb2.Message(role="user", parts=[stage_pb2.Part(port="x")])]}), "BAD_REQUEST", None),
    ],
)
async def test_what_the_router_itself_refuses(
    steady: RouterAndStages, lines: list[Line], asked: omni_pb2.GenerateRequest, reason: str, field: str | None
) -> None:
    await refused(steady.stub, asked)
    line = the_end(lines, "request.refused", reason)
    assert line["field"] == (field or "thinker.messages.parts.port")
    check_counted(steady.router, lines)


@pytest.mark.parametrize("stack", [{"max_sessions": 1, "client_share": 1}], indirect=True)
async def test_a_request_for_which_there_is_no_place(stack: RouterAndStages, lines: list[Line]) -> None:
    running = await begin(stack)
    await refused(stack.stub, good())
    line = the_end(lines, "request.refused", "OVERLOADED")
    assert (line["pipeline"], bool(line["message"])) == ("toy", True)
    running.cancel()
    await until(lambda: len(ends(lines)) == 2)
    assert (ends(lines)[1]["event"], ends(lines)[1]["reason"]) == ("answer.done", "CANCELLED")
    check_counted(stack.router, lines)


@pytest.mark.parametrize("stack", [{"max_sessions": 1}], indirect=True)
async def test_a_client_that_leaves_while_it_waits(stack: RouterAndStages, lines: list[Line]) -> None:
    running = await begin(stack)
    waiting = stack.stub.Generate(good(), timeout=60, metadata=[("x-api-key", "swordfish")])
    await until(lambda: stack.router.registry.get_sample_value("omnistage_router_waiting"))
    waiting.cancel()
    await until(lambda: ends(lines))
    the_end(lines, "request.refused", "CANCELLED")
    running.cancel()
    await until(lambda: len(ends(lines)) == 2)


# Conversations -------------------------------------------------------------------------------------------------------------------------


async def test_every_turn_of_a_conversation_has_its_line(steady: RouterAndStages, lines: list[Line]) -> None:
    conversation = ConverseStream(steady.stub)
    answers = [await conversation.turn(request("what is a kite?", seed)) for seed in (1, 2)]
    with pytest.raises(TurnFailed):
        await conversation.turn(request("tell nobody", model="gpt"))
    answers.append(await conversation.turn(request("what is a kite?", 3)))
    await conversation.call.done_writing()
    assert await conversation.call.code() == grpc.StatusCode.OK
    assert [line["reason"] for line in ends(lines)] == ["OK", "OK", "UNKNOWN_MODEL", "OK"]
    sessions = [line.get("session_id") for line in ends(lines)]
    one, two, three = (answer.started.session_id for answer in answers if answer.started)
    assert sessions == [one, two, None, three]
    check_counted(steady.router, lines)
    assert not [line for line in lines if line["event"] == "conversation.failed"]


async def test_an_error_of_the_call_within_a_turn_is_told_once(steady: RouterAndStages, lines: list[Line]) -> None:
    conversation = ConverseStream(steady.stub)
    for _ in range(2):
        await conversation.send(turn=request("tell nobody", thinker=LONG))
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        while True:
            await conversation.read()
    assert the_end(lines, "answer.done", "PROTOCOL")["message"]
    assert not [line for line in lines if line["event"] == "conversation.failed"]


async def test_an_error_of_the_call_between_turns_has_a_line_of_its_own(steady: RouterAndStages, lines: list[Line]) -> None:
    conversation = ConverseStream(steady.stub)
    await conversation.send(interrupt=stage_pb2.Interrupt())
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await conversation.read()
    (line,) = [line for line in lines if line["event"] == "conversation.failed"]
    assert (line["reason"], line["client"]) == ("PROTOCOL", "127.0.0.1") and line["message"]
    assert not ends(lines)


async def test_many_requests_at_once_have_a_line_each(steady: RouterAndStages, lines: list[Line]) -> None:
    """Each hears its own answer, and the figures in its line are those of that."""
    asked = [request(f"prompt {n}", n, request_id=f"r-{n}", thinker={"max_tokens": n + 1, "ignore_eos": True}) for n in range(12)]
    answers = await asyncio.gather(*(ask(steady.stub, one) for one in asked))
    told = {(line["request_id"], line["session_id"], line["tokens"]) for line in ends(lines)}
    for n, answer in enumerate(answers):
        answer.check_toy(n, f"prompt {n}", n + 1)
    assert len(ends(lines)) == len(asked)
    assert told == {(f"r-{n}", answer.started.session_id, n + 1) for n, answer in enumerate(answers) if answer.started}
