"""The places of a router: a client that finds them all taken is told at once, clients have shares, and no client waits for ever. Converse:
a client says itself how much sound it has room for; memory for what clients stream is bounded."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from helpers.ask import GenerateCall, WholeAnswer, ask, read, read_all, refused, request
from helpers.ask import refusal as refusal_of
from helpers.chain import RouterAndStages, addresses_of, good, router_and_stages, toy_chain
from helpers.converse import ConverseStream
from helpers.link import link_by, opening, route_to
from helpers.servers import CHAIN, all_free, local_router, local_stage, omni_stub, toy_logic
from helpers.waiting import until, until_collected
from omnistage.router.conversation import WINDOW, Intake
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token

LONG = {"max_tokens": 20_000, "ignore_eos": True}


@pytest.mark.parametrize("stack", [{"max_sessions": 2, "client_share": 1}], indirect=True)
async def test_a_router_whose_places_are_taken_says_so_at_once_and_when_to_come_again(stack: RouterAndStages):
    running = [await started(stack) for _ in range(2)]
    for _ in range(3):
        refusal = await refused(stack.stub, good(), timeout_s=10)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert refusal.retry_delay_s is not None and refusal.retry_delay_s > 0
    await leave(stack, *running)


async def test_a_full_stage_is_told_like_a_full_router():
    async with router_and_stages(toy_chain(), stage={"max_sessions": 1}, max_sessions=4) as stack:
        running = await started(stack)
        refusal = await refused(stack.stub, good())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert refusal.retry_delay_s
        await leave(stack, running)
        (await ask(stack.stub, good())).check_toy(5, "good")


def by(key: str) -> list[tuple[str, str]]:
    """Metadata of a client with this API key."""
    return [("x-api-key", key)]


async def started(stack: RouterAndStages, key: str = "", request_id: str = "") -> GenerateCall:
    """A long answer that runs, of a client with this key."""
    call = stack.stub.Generate(request("long", 1, thinker=LONG, request_id=request_id), timeout=60, metadata=by(key) if key else ())
    assert (await read(call)).HasField("started")
    return call


async def leave(stack: RouterAndStages, *running: GenerateCall) -> None:
    """Cancel these answers, and see that nothing is left of them."""
    for call in running:
        call.cancel()
    await all_free(stack.addresses)


OF_STACK = Token("s" * 32)
PROOF = OF_STACK.for_gateway().secret


def behind(host: str, key: str = "", proof: str = PROOF) -> list[tuple[str, str]]:
    """Metadata of a gateway's call for a client of this host."""
    return [*(by(key) if key else ()), (GATEWAY_KEY, proof), (GATEWAY_HOST, host)]


@pytest.mark.parametrize("stack", [{"max_sessions": 4, "token": OF_STACK}], indirect=True)
async def test_one_host_cannot_hold_all_places_whatever_keys_it_invents(stack: RouterAndStages):
    running = [await started(stack, f"greedy-{number}") for number in range(3)]
    forged = [by("greedy-0"), by("greedy-3"), behind("other", proof=OF_STACK.secret), behind("other", "key", "guessed" * 4)]
    for refusal in await asyncio.gather(*(refused(stack.stub, good(), metadata=metadata) for metadata in forged)):
        assert refusal.reason == "OVERLOADED" and refusal.retry_delay_s
    for metadata in (behind("other"), behind("third", "greedy-0"), behind("fourth", "mine")):
        (await ask(stack.stub, good(), metadata=metadata)).check_toy(5, "good")
    await leave(stack, *running)


@pytest.mark.parametrize(
    ("stack", "count"), [({"max_sessions": 4}, 3), ({"max_sessions": 2, "client_share": 1}, 2)], indirect=["stack"], ids=["half", "all"]
)
async def test_who_shares_a_host_with_a_greedy_client_gets_its_next_place(stack: RouterAndStages, count: int):
    """Whether the greedy one may have half of all places or all of them."""
    running = [await started(stack, "greedy") for _ in range(count)]
    waiting = asyncio.create_task(ask(stack.stub, good(), metadata=by("other")))
    await until(lambda: stack.router.registry.get_sample_value("omnistage_router_waiting") == 1)
    running.pop().cancel()
    answer = await waiting
    answer.check_toy(5, "good")
    assert answer.usage is not None and answer.usage.queued.ToTimedelta().total_seconds() > 0
    await leave(stack, *running)


async def test_a_client_that_does_not_read_loses_its_place_to_one_that_waits():
    """Long before its stall limit, and only then."""
    chain = toy_chain({"samples_per_frame": 24_000, "max_chunk": 1})
    async with router_and_stages(chain, max_sessions=1, stall_limit=600) as stack, omni_stub(stack.router.address) as other:
        call = await started(stack, "deaf")
        answer = None
        async with asyncio.timeout(60):
            while answer is None:
                try:
                    answer = await ask(other, request("hm", 3), metadata=by("other"))
                except grpc.aio.AioRpcError as error:
                    assert refusal_of(error).reason == "OVERLOADED"
        answer.check_toy(3, "hm", samples_per_frame=24_000)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in read_all(call):
                pass
        told = refusal_of(raised.value)
        assert (told.code, told.reason) == (grpc.StatusCode.CANCELLED, "CLIENT_STALLED")


async def test_two_clients_with_one_request_id_do_not_end_each_other(stack: RouterAndStages):
    async with omni_stub(stack.router.address) as another_connection:
        running = [await started(stack, key, "1") for key in ("one", "two", "")]
        running.append(await started(replace(stack, stub=another_connection), "", "1"))
        for call in running:
            for _ in range(5):
                assert (await read(call)).HasField("chunk")
        await leave(stack, *running)


@pytest.mark.parametrize(("key", "request_id"), [("mine", "1"), ("", "0123456789abcdef0123456789abcdef")], ids=["key", "long id"])
async def test_a_client_that_comes_back_over_another_connection_takes_its_request_over(stack: RouterAndStages, key: str, request_id: str):
    async with omni_stub(stack.router.address) as another_connection:
        older = await started(stack, key, request_id)
        newer = await started(replace(stack, stub=another_connection), key, request_id)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in read_all(older):
                pass
        assert refusal_of(raised.value).reason == "SUPERSEDED"
        assert (await read(newer)).HasField("chunk")
        await leave(stack, newer)


async def test_the_places_are_those_of_the_scarcest_stage_with_all_its_replicas():
    async with (
        local_stage(toy_logic("thinker"), max_sessions=7) as thinker,
        local_stage(toy_logic("talker"), max_sessions=2) as talker,
        local_stage(toy_logic("talker"), max_sessions=3) as second,
        local_stage(toy_logic("code2wav"), max_sessions=6) as code2wav,
    ):
        stages = [("thinker", thinker.address), ("talker", talker.address), ("talker", second.address), ("code2wav", code2wav.address)]
        async with local_router(stages) as router, omni_stub(router.address) as stub:
            # The second Talker may be seen a moment after the router is ready.
            await until(lambda: router.registry.get_sample_value("omnistage_router_places") == 5)
            (await ask(stub, good())).check_toy(5, "good")
        async with local_router(stages, max_sessions=9) as router:
            assert router.registry.get_sample_value("omnistage_router_places") == 9


async def test_a_draining_router_finishes_and_refuses(stack: RouterAndStages):
    running = await started(stack)
    async with local_router(addresses_of(stack.stages)) as other, omni_stub(other.address) as stub:
        call = stub.Generate(request("run", 2, thinker={"max_tokens": 600, "ignore_eos": True}), timeout=60)
        assert (await read(call)).HasField("started")
        draining = asyncio.create_task(other.service.drain(30))
        await asyncio.sleep(0)
        refusal = await refused(stub, good())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not draining.done()
        events = [event async for event in read_all(call)]
        assert events[-1].HasField("usage")
        async with asyncio.timeout(10):
            await draining
    running.cancel()


async def test_two_keys_share_no_prompts_that_were_computed_and_no_key_is_told() -> None:
    """The scope of the prefix cache that a stage gets: one for each key, in a call and in a conversation, and none without a key."""
    scopes: list[str] = []
    logic = toy_logic("thinker")
    prepare = logic.prepare

    async def noting(opened: stage_pb2.Open, *rest: Any) -> Any:
        scopes.append(opened.scope)
        return await prepare(opened, *rest)

    logic.prepare = noting  # type: ignore[assignment, method-assign]
    asked = request("good", 5, outputs=["text"], conversation_id="same", request_id="same")
    async with router_and_stages(toy_chain(None, logic)) as stack:
        for key in ("one", "two", ""):
            for _ in range(2):
                (await ask(stack.stub, asked, metadata=by(key) if key else ())).check_toy(5, "good")
            conversation = ConverseStream(stack.stub, key=key)
            (await conversation.turn(asked)).check_toy(5, "good")
            assert await conversation.end() == grpc.StatusCode.OK
    one, two, nobody = scopes[:3], scopes[3:6], scopes[6:]
    assert (len(set(one)), len(set(two)), nobody) == (1, 1, ["", "", ""])
    assert one[0] and two[0] and one[0] != two[0] and not {"one", "two"} & set(scopes)


LENGTH = 40


def house(replicas: int = 1, **settings: Any) -> AbstractAsyncContextManager[RouterAndStages]:
    """The toy chain behind a router. settings: of the router."""
    return router_and_stages([toy_logic(kind, {"max_chunk": 1}) for kind in CHAIN for _ in range(replicas)], **settings)


def question(seed: int) -> omni_pb2.GenerateRequest:
    return request("How?", seed, thinker={"max_tokens": LENGTH, "ignore_eos": True})


def sound(total: int) -> stage_pb2.Credit:
    return stage_pb2.Credit(port="audio", total=total)


def is_whole(answer: WholeAnswer, port: str) -> bool:
    return bool(answer.of(port)) and answer.of(port)[-1].last


async def heard(conversation: ConverseStream, given: int) -> WholeAnswer:
    """A whole answer. given: chunks in earlier turns, all that there was room for. There is one more whenever all is used up and the text
    is whole, and nothing may come without room."""
    answer, room = WholeAnswer(), 0
    async for event in conversation.events():
        answer.take(event)
        assert len(answer.of("audio")) <= room
        if is_whole(answer, "text") and not is_whole(answer, "audio") and len(answer.of("audio")) == room:
            room += 1
            await conversation.send(credit=sound(given + room))
    return answer


async def test_sound_comes_as_there_is_room_and_text_does_not_wait_for_it():
    """Two turns: room is counted over the whole conversation."""
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(0))
        given = 0
        for seed in (1, 2):
            await conversation.send(turn=question(seed))
            answer = await heard(conversation, given)
            answer.check_toy(seed, "How?", LENGTH)
            given += len(answer.of("audio"))
            assert len(answer.of("audio")) > LENGTH
        assert await conversation.end() is grpc.StatusCode.OK


async def test_without_any_room_said_the_router_grants_as_it_writes():
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(turn=question(1))
        (await conversation.answer()).check_toy(1, "How?", LENGTH)
        await conversation.send(credit=sound(1 << 40))
        await conversation.send(credit=stage_pb2.Credit(port="text", total=1))  # A checkpoint is outside of credit.
        await conversation.send(turn=question(2))
        (await conversation.answer()).check_toy(2, "How?", LENGTH)


@pytest.mark.parametrize("lost", CHAIN)
async def test_a_stage_that_is_lost_while_sound_waits_for_room_leaves_no_gap(lost: str):
    async with house(2) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(3))
        await conversation.send(turn=question(1))
        answer = WholeAnswer()
        async for event in conversation.events():
            answer.take(event)
            if len(answer.of("audio")) == 3 and is_whole(answer, "text") and not answer.failovers:
                await stack.end_busy(lost)
                await conversation.send(credit=sound(1000))
        answer.check_toy(1, "How?", LENGTH)
        assert [failover.kind for failover in answer.failovers] == [getattr(stage_pb2, f"STAGE_KIND_{lost.upper()}")]


@pytest.mark.parametrize(("given", "reason"), [(5, "HALF_CLOSED"), (1000, "OK")])
async def test_who_half_closes_gives_no_more(given: int, reason: str):
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(given))
        await conversation.send(turn=question(1))
        await conversation.call.done_writing()
        if reason == "OK":
            (await conversation.answer()).check_toy(1, "How?", LENGTH)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await conversation.answer()
            assert refusal_of(told.value).reason == reason and "too little room for audio" in refusal_of(told.value).message


async def test_what_the_client_has_whole_needs_no_room():
    """It asks for the rest of an answer, of which it has all sound."""
    async with house() as stack:
        answer = await ConverseStream(stack.stub).turn(question(1))
        ends = {port: chunks[-1] for port, chunks in answer.chunks.items()}
        rest = question(1)
        rest.resume.positions.extend(
            stage_pb2.Position(port=port, seq=end.seq + 1, first=end.first + end.count, ended=True) for port, end in ends.items()
        )
        rest.resume.history.extend(answer.of("text"))
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(0))
        await conversation.send(turn=rest)
        await conversation.call.done_writing()
        assert not [event async for event in conversation.events() if event.HasField("chunk")]


async def test_who_gives_no_room_loses_its_place_to_one_who_waits():
    async with house(max_sessions=1) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(1))
        await conversation.send(turn=question(1))
        answer = WholeAnswer()
        events = conversation.events()
        while not answer.of("audio"):
            answer.take(await anext(events))
        (await ConverseStream(stack.stub, key="another").turn(question(2))).check_toy(2, "How?", LENGTH)
        with pytest.raises(Exception, match="CLIENT_STALLED"):
            async for event in events:
                answer.take(event)
        await conversation.send(credit=sound(1000))
        await conversation.send(turn=question(3))
        (await conversation.answer()).check_toy(3, "How?", LENGTH)


def test_ports_share_the_window_of_a_turn() -> None:
    async def tell(credit: stage_pb2.Credit) -> None:
        raise AssertionError("no answer runs yet")

    for count, each in ((0, WINDOW), (1, WINDOW), (3, WINDOW // 3), (8, WINDOW // 8), (9, 2)):
        ports = [stage_pb2.Port(name=f"media{n}", payload=stage_pb2.PAYLOAD_MEDIA) for n in range(count)]
        intake = Intake(ports, tell, stall_s=1, replay_bytes=0)
        assert intake.window == each
        assert intake.waits_for == [port.name for port in ports]


async def test_a_client_that_leaves_while_it_is_given_room_is_no_error_that_nobody_looks_at() -> None:
    """The write goes on when its turn is over, and fails with the call."""
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    writing, gone = asyncio.Event(), asyncio.Event()

    async def tell(credit: stage_pb2.Credit) -> None:
        writing.set()
        await gone.wait()
        raise ConnectionError("the call is over")

    intake = Intake([stage_pb2.Port(name="media0", payload=stage_pb2.PAYLOAD_MEDIA)], tell, stall_s=1, replay_bytes=0)
    async with link_by(route_to("127.0.0.1:1"), opening()) as link:
        async with intake.passed_on(link):
            await writing.wait()
            tasks = [weakref.ref(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        gone.set()
        # asyncio complains when it forgets a task.
        await until_collected(lambda: complaints or not any(task() for task in tasks))
    assert tasks and not complaints
