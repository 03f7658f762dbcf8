"""The places of a router: a client that finds them all taken is told at once, clients have shares, and no client ends the request of
another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from helpers.ask import GenerateCall, ask, read, read_all, refused, request
from helpers.ask import refusal as refusal_of
from helpers.chain import RouterAndStages, addresses_of, good, router_and_stages, toy_chain
from helpers.converse import ConverseStream
from helpers.servers import all_free, local_router, local_stage, omni_stub, toy_logic
from helpers.waiting import until
from omnistage.v1 import stage_pb2
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
