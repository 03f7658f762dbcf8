"""An answer during which something happens to the processes that give it, and what must be true afterwards."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from helpers.ask import TIMEOUT_S, WholeAnswer, ask, request
from helpers.fleet import Fleet
from helpers.run import PLENTY, params
from helpers.servers import all_free, omni_stub, stage_stub, until_serving
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

SLOW = {"interval_s": 0.01}
SLOWER_SOUND = {"code2wav": {"interval_s": 0.02}}
"""Options of toys: sound comes slower than text, and of an answer of 150 tokens there are two seconds to come after the last of `MOMENTS`.
Whoever strikes there first asks every replica which of them has the session, on a machine that may have other things to do."""


@dataclass(frozen=True, slots=True)
class DisturbanceStep:
    """An action that is done once, when the answer has come to a point. Nothing is read meanwhile."""

    when: Callable[[WholeAnswer], bool]
    act: Callable[[], Awaitable[object]]


class DisturbanceSteps:
    """To be taken one after the other, as an answer comes."""

    def __init__(self, *steps: DisturbanceStep) -> None:
        self._left = deque(steps)

    async def take(self, answer: WholeAnswer) -> None:
        """Those that are due."""
        while self._left and self._left[0].when(answer):
            await self._left.popleft().act()

    def check_taken(self, answer: WholeAnswer) -> None:
        """The answer is over: an assertion error if it was too early."""
        chunks = f"{len(answer.of('text'))} and {len(answer.of('audio'))} chunks"
        assert not self._left, f"the answer ended {len(self._left)} steps too early: {chunks}"


def begun(answer: WholeAnswer) -> bool:
    """Opened everywhere, and no output yet."""
    return answer.started is not None


def text_chunks(count: int) -> Callable[[WholeAnswer], bool]:
    return lambda answer: len(answer.of("text")) >= count


def audio_chunks(count: int) -> Callable[[WholeAnswer], bool]:
    return lambda answer: len(answer.of("audio")) >= count


def after_text(count: int) -> Callable[[WholeAnswer], bool]:
    """The text is whole, and so many chunks of sound have come."""
    return lambda answer: bool(answer.of("text")) and answer.of("text")[-1].last and len(answer.of("audio")) >= count


async def ask_through(
    stub: omni_pb2_grpc.OmniServiceAsyncStub, asked: omni_pb2.GenerateRequest, *steps: DisturbanceStep, timeout_s: float = TIMEOUT_S
) -> WholeAnswer:
    """The whole answer, each step taken in its turn. Raises AioRpcError, and AssertionError if the answer ends before the last step."""
    answer, planned = WholeAnswer(), DisturbanceSteps(*steps)
    async for event in stub.Generate(asked, timeout=timeout_s):
        answer.take(event)
        await planned.take(answer)
    assert answer.usage is not None
    planned.check_taken(answer)
    return answer


def opening(fleet: Fleet, seed: int, tokens: int, prompt: str = "hello", **fields: object) -> stage_pb2.Open:
    """A session at a Thinker whose caller does without a router: all replicas are candidates, the caller gets the codes too."""
    hops = [("talker", stage_pb2.STAGE_KIND_TALKER, "hidden"), ("code2wav", stage_pb2.STAGE_KIND_CODE2WAV, "codes")]
    request = stage_pb2.Open(
        session_id="disturbed",
        model="toy-thinker",
        seed=seed,
        params=params("thinker", prompt, max_tokens=tokens, ignore_eos=True),
        credits=[stage_pb2.Credit(port="audio", total=PLENTY)],
        checkpoints=["text"],
        route=[
            stage_pb2.Hop(
                kind=kind,
                model=f"toy-{name}",
                addresses=[fleet.address(replica) for replica in fleet.of(name)],
                takes=[port],
                params=params(name),
                checkpoints=["codes"] if name == "talker" else [],
            )
            for name, kind, port in hops
        ],
    )
    request.MergeFrom(stage_pb2.Open(**fields))  # type: ignore[arg-type]
    return request


def continued(asked: omni_pb2.GenerateRequest, answer: WholeAnswer) -> omni_pb2.GenerateRequest:
    """The request for the rest of an answer, of which so much has come."""
    assert answer.started is not None
    again = omni_pb2.GenerateRequest(seed=answer.started.seed, revisions=answer.started.revisions)
    again.MergeFrom(asked)
    again.resume.SetInParent()
    for port, chunks in answer.chunks.items():
        end = chunks[-1]
        again.resume.positions.add(port=port, seq=end.seq + 1, first=end.first + end.count, ended=end.last)
    again.resume.history.extend([*answer.of("text"), *answer.of("codes")])
    return again


def joined(begin: WholeAnswer, rest: WholeAnswer) -> WholeAnswer:
    """An answer and what came when it was continued."""
    ports = begin.chunks.keys() | rest.chunks.keys()
    return WholeAnswer(
        begin.started, {port: begin.of(port) + rest.of(port) for port in ports}, rest.usage, begin.failovers + rest.failovers
    )


async def report_of(address: str) -> stage_pb2.WatchResponse:
    """How a stage is now."""
    async with stage_stub(address) as stub:
        watch = stub.Watch(stage_pb2.WatchRequest(), timeout=TIMEOUT_S)
        report = await watch.read()
        watch.cancel()
    assert isinstance(report, stage_pb2.WatchResponse)
    return report


async def holder(fleet: Fleet, kind: str) -> str:
    """The replica that has a session, of those that are alive."""
    for name in alive(fleet, kind):
        if (await report_of(fleet.address(name))).sessions:
            return name
    raise AssertionError(f"no {kind} has a session")


def alive(fleet: Fleet, kind: str) -> list[str]:
    """The replicas whose process runs."""
    return [name for name in fleet.of(kind) if fleet.server(name).alive]


async def killed_holder(fleet: Fleet, kind: str) -> str:
    """Kill the replica that has the session; its name."""
    name = await holder(fleet, kind)
    fleet.kill(name)
    return name


def kill_when(when: Callable[[WholeAnswer], bool], fleet: Fleet, kind: str, lost: list[str] | None = None) -> DisturbanceStep:
    """A step that kills the replica of a kind that has the session. lost: gets its address."""

    async def kill() -> None:
        name = await killed_holder(fleet, kind)
        if lost is not None:
            lost.append(fleet.address(name))

    return DisturbanceStep(when, kill)


async def restore(fleet: Fleet, stub: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    """Start every killed process again; return when all serve and the router has found them."""
    dead = [name for name in fleet.names if not fleet.server(name).alive]
    for name in dead:
        fleet.begin(name)
    await asyncio.to_thread(fleet.ready, *dead)
    await found(fleet, stub)


async def found(fleet: Fleet, stub: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    """Return when the router gives sessions to every stage process as it is now."""
    await until_serving(stub, {fleet.server(name).pid for name in fleet.stages}, lambda one: one.pid)


async def nothing_left(fleet: Fleet) -> None:
    """No stage that is alive holds a session, a block of memory, a page."""
    await all_free([fleet.address(name) for name in fleet.stages if fleet.server(name).alive])


@asynccontextmanager
async def disturbed(
    fleet: Fleet, *, alike: bool = True, after: omni_pb2.GenerateRequest | None = None
) -> AsyncIterator[omni_pb2_grpc.OmniServiceAsyncStub]:
    """The router's stub, once it has found every replica, for a test with toys that may kill any stage. Afterwards everything is restored:
    nothing may be left over, and the next answer must be right; of replicas that are not alike, whole. after: what is asked then. A failure
    shows the logs."""
    try:
        async with omni_stub(fleet.address("router")) as stub:
            await found(fleet, stub)
            yield stub
            await restore(fleet, stub)
            await nothing_left(fleet)
            answer = await ask(stub, after or request("after", 99))
            if alike:
                answer.check_toy(99, "after")
            else:
                answer.check_whole()
    except BaseException as error:
        error.add_note(fleet.logs())
        raise


MOMENTS: dict[str, Callable[[WholeAnswer], bool]] = {
    "before the first output": begun,
    "in mid text": text_chunks(20),
    "in mid speech": after_text(10),
}
"""When to strike a long toy answer."""
