"""A request may be large: when its call is over, nothing of it is left, even while the garbage collector does not run."""

from __future__ import annotations

import asyncio
import gc
import random

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from helpers import lengths
from helpers.ask import GenerateCall, ask, read, refused, request
from helpers.chain import RouterAndStages, router_and_stages, toy_chain
from helpers.converse import ConverseStream, TurnFailed
from helpers.run import messages
from omnistage.v1 import omni_pb2, stage_pb2

pytestmark = pytest.mark.usefixtures("older_objects_set_aside", "collected_by_hand")

MARK = "a large prompt. "
LARGE = 1 << 19
PROMPT = MARK * (LARGE // len(MARK))
ENDLESS = {"max_tokens": 20_000, "ignore_eos": True}

TOO_MANY = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=[*messages(PROMPT), *messages("x") * 1024]))
REFUSED = [
    pytest.param(TOO_MANY, "thinker.messages", id="too much"),
    pytest.param(request(PROMPT, thinker={"stop": ["a"] * 5000}), "thinker.stop", id="in a thread"),
    pytest.param(request(PROMPT, outputs=["video"]), "outputs", id="router"),
    pytest.param(request(PROMPT, thinker={"max_tokens": 32769}), "thinker.max_tokens", id="thinker"),
    pytest.param(request(PROMPT, talker=stage_pb2.TalkerParams(voice="nobody")), "talker.voice", id="talker"),
]


@pytest.fixture(scope="module")
def older_objects_set_aside() -> None:
    """The collector leaves alone what earlier tests left in this process: `kept` would look through it for seconds, each time."""
    gc.collect()
    gc.freeze()


def kept(*own: object) -> list[str]:
    """The types of the objects that hold a large prompt now, without the test's own."""
    mine = {id(PROMPT), *map(id, own), *(id(each.values[0]) for each in REFUSED)}
    holders = [each for each in gc.get_objects() if not issubclass(type(each), Message)]
    # First the few that are found at all, in one go: there are millions, and hardly ever one is a prompt.
    held = gc.get_referents(*holders)
    carriers = {kind for kind in set(map(type, held)) if issubclass(kind, str | bytes | bytearray | Message)}
    found = {id(each) for each in held if type(each) in carriers and id(each) not in mine and _has_prompt(each)}
    if not found:
        return []
    return [
        f"{type(each).__name__} of {type(holder).__name__}" for holder in holders for each in gc.get_referents(holder) if id(each) in found
    ]


def _has_prompt(each: str | bytes | bytearray | Message) -> bool:
    if isinstance(each, str):
        return len(each) >= LARGE and MARK in each
    if isinstance(each, Message):
        return each.ByteSize() >= LARGE and MARK.encode() in each.SerializeToString()
    return len(each) >= LARGE and MARK.encode() in each


async def none_kept(*own: object) -> None:
    """A server learns a little later than its client that a call is over."""
    for pause_s in (0.1, 0.4, 1.5):
        await asyncio.sleep(pause_s)
        if not (left := kept(*own)):
            return
    raise AssertionError(f"still there: {left}")


async def begin(stack: RouterAndStages, asked: omni_pb2.GenerateRequest) -> GenerateCall:
    """An answer that has begun."""
    call = stack.stub.Generate(asked, timeout=60)
    assert (await read(call)).HasField("started")
    return call


@pytest.mark.parametrize(("asked", "field"), REFUSED)
async def test_a_refused_request(steady: RouterAndStages, asked: omni_pb2.GenerateRequest, field: str) -> None:
    assert (await refused(steady.stub, asked)).fields == [field]
    await none_kept(asked)


async def test_an_answered_request(steady: RouterAndStages) -> None:
    asked = request(PROMPT, 5)
    (await ask(steady.stub, asked)).check_toy(5, PROMPT)
    await none_kept(asked)


async def test_a_request_that_its_client_takes_back(steady: RouterAndStages) -> None:
    asked = request(PROMPT, thinker=ENDLESS)
    call = await begin(steady, asked)
    assert kept(asked), "while a request is answered, this sees it"
    call.cancel()
    await none_kept(asked)


@lengths.rounds(24, 60)
async def test_requests_that_are_taken_back_at_any_moment(steady: RouterAndStages, seed: int, rounds: int) -> None:
    """Also while each task of their sessions reads, writes or ends; every other one is asked twice, and its first call is superseded."""
    rng = random.Random(seed)
    for number in range(rounds):
        asked = request(PROMPT, thinker=ENDLESS, request_id=f"{number:032x}")
        calls = [await begin(steady, asked) for _ in range(1 + number % 2)]
        await asyncio.sleep(rng.random() * 0.02)
        for call in calls:
            call.cancel()
    del call, calls
    await none_kept(asked)


@lengths.long_form(
    "router/test_memory.py::test_requests_that_are_taken_back_at_any_moment",
    "router/test_front.py::test_the_clients_deadline_ends_the_work_everywhere",
    unkept="A request whose time is over leaves nothing in memory.",
)
@lengths.rounds(15, 60)
async def test_requests_whose_time_is_over_at_any_moment(steady: RouterAndStages, seed: int, rounds: int) -> None:
    """Also while their sessions are being opened, and some of them are taken back then; three at a time."""
    rng = random.Random(seed)
    asked = request(PROMPT, thinker=ENDLESS)

    async def hear() -> None:
        call = steady.stub.Generate(asked, timeout=0.003 + 0.6 * rng.random() ** 4)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    for number in range(rounds):
        hearing = [asyncio.create_task(hear()) for _ in range(3)]
        if number % 3 == 0:
            await asyncio.sleep(rng.random() * 0.05)
            for task in hearing:
                task.cancel()
        done, _ = await asyncio.wait(hearing)
        for task in done:
            if not task.cancelled():
                task.result()
    del hearing, done, task
    await none_kept(asked)


async def test_a_request_that_is_asked_again(steady: RouterAndStages) -> None:
    asked = request(PROMPT, thinker=ENDLESS, request_id="a" * 32)
    first, second = await begin(steady, asked), await begin(steady, asked)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        while await first.read():
            pass
    assert raised.value.code() == grpc.StatusCode.ABORTED
    second.cancel()
    await none_kept(asked)


async def test_a_request_whose_stage_is_lost() -> None:
    """In the middle of the answer, and before another one: no replica is left then."""
    async with router_and_stages(toy_chain({"interval_s": 0.01})) as stack:
        asked = request(PROMPT, thinker=ENDLESS)
        call = await begin(stack, asked)
        await stack.replicas["thinker"][0].end()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read():
                pass
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert (await refused(stack.stub, asked)).reason == "STAGE_LOST"
        await none_kept(asked)


async def test_turns_of_a_conversation_that_is_open(steady: RouterAndStages) -> None:
    asked, wrong = request(PROMPT, 5), request(PROMPT, outputs=["video"])
    conversation = ConverseStream(steady.stub)
    with pytest.raises(TurnFailed, match="BAD_REQUEST"):
        await conversation.turn(wrong)
    await none_kept(asked, wrong)
    (await conversation.turn(asked)).check_toy(5, PROMPT)
    await none_kept(asked, wrong)
    assert await conversation.end() == grpc.StatusCode.OK
