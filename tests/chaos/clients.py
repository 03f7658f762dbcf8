"""The load: clients of many kinds that ask one question after another, or stream media in conversations of two turns, and what became of
each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from chaos.house import House
from chaos.questions import LIVE, SIDE, Collected, DrawingQuestion, EventsOfAnswer, LookingQuestion, Question, SpeechQuestion, expect
from helpers.ask import GenerateCall, refusal
from helpers.converse import ConverseStream, Pause, TurnFailed
from helpers.peer import Wire
from helpers.servers import CLIENT_OPTIONS, omni_stub
from omnistage.client import AsyncOmni, OmniError, RouterLostError, UnavailableError
from omnistage.client.request import Options
from omnistage.client.upload import MIN_BYTES
from omnistage.v1 import omni_pb2, omni_pb2_grpc

SECOND = 1 << 20
"""Added to the seed of the first turn."""

Turn = tuple[LookingQuestion, Pause | None]
"""A question, and what is waited for before every piece of its media."""


async def two_turns(stub: omni_pb2_grpc.OmniServiceAsyncStub, question: LookingQuestion, timeout_s: float) -> int:
    """Failovers that were told. Raises WrongAnswer, AioRpcError for the call, and TurnFailed for a turn."""
    return await _converse(stub, [(question, None), (_second(question), None)], timeout_s)


async def stopped_streaming(stub: omni_pb2_grpc.OmniServiceAsyncStub, question: LookingQuestion, timeout_s: float) -> None:
    """One piece, if that is not all, and then nothing more for ever, though there is room: the turn has to fail, and the next one is asked
    in the same call. Raises as `two_turns`."""
    pieces = sum(1 for cut in question.pieces().values() for _ in cut)
    room = iter([True] * (pieces > 1))

    async def once() -> None:
        if not next(room, False):
            await asyncio.Event().wait()

    await _converse(stub, [(question, once), (_second(question), None)], timeout_s)
    expect(False, "an answer to media that were not sent")


def _second(question: LookingQuestion) -> LookingQuestion:
    return replace(question, seed=question.seed + SECOND)


async def _converse(stub: omni_pb2_grpc.OmniServiceAsyncStub, turns: Sequence[Turn], timeout_s: float) -> int:
    """A turn that failed is followed by the next one all the same, when it said that: its error is raised at the end."""
    conversation = ConverseStream(stub, timeout_s)
    failovers, failure = 0, None
    try:
        for question, pause in turns:
            try:
                failovers += await _turn(conversation, question, pause)
            except TurnFailed as error:
                if failure is not None:
                    raise
                failure = error
                await asyncio.sleep(error.failed.retry_delay.ToTimedelta().total_seconds())
        status = await conversation.end()
        expect(status is grpc.StatusCode.OK, f"a conversation ended with {status}")
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        raise await conversation.failure() from None
    finally:
        conversation.call.cancel()
    if failure is not None:
        raise failure
    return failovers


async def _turn(conversation: ConverseStream, question: LookingQuestion, pause: Pause | None) -> int:
    heard = EventsOfAnswer(question)
    conversation.room.clear()
    await conversation.send(turn=question.request())
    async with conversation.streaming(question.pieces(), pause):
        async for event in conversation.events():
            heard.take(event)
    heard.check_whole()
    return heard.failovers


TIMEOUT_S = 60.0
RETRY_DELAY_S = 1.0
"""The delay that the servers name in a refusal, or a little more."""

RETRYABLE = frozenset({"STAGE_LOST", "OVERLOADED", "DRAINING", "STARTING"})
BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
NARROW = [*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)]
"""The options of a client that does not read: the window of its connection stays as small as it begins."""

LARGE = "library, a large film"
IN_REQUEST = "stub, media in the request"
CONVERSING = ("conversation", "stops streaming", "vanishes while it streams")
FILM_BYTES = (10, 100_000, 3_000_000, 12_000_000)
"""The last one is more than a router keeps for a replay. The first two go in requests too."""

ANSWERED, CANCELLED, ROUTER_LOST, WRONG = "answered", "left by its client", "router lost", "WRONG"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fate of one request. result: ANSWERED, CANCELLED, ROUTER_LOST, a reason of the contract, or WRONG with what is wrong."""

    client: str
    result: str
    seconds: float
    failovers: int = 0
    router_losses: int = 0
    wrong: str = ""
    retry_delay_s: float = 0.0


class ClientLoad:
    """Clients by name; `ask` is one request of one of them."""

    def __init__(self, house: House, rng: random.Random) -> None:
        self._house = house
        self._rng = rng
        self._number = 0
        self.outcomes: list[Outcome] = []
        self.clients: dict[str, tuple[int, Callable[[Question], Awaitable[tuple[int, int]]]]] = {
            "stub, text and sound": (4, self._stub),
            "stub, text only": (1, self._stub),
            "stub, sound only": (1, self._stub),
            "stub, pictures": (1, self._stub),
            "library, text and sound": (4, self._library),
            "library, pictures": (1, self._library),
            IN_REQUEST: (2, self._stub),
            LARGE: (1, self._library),
            CONVERSING[0]: (3, self._converses),
            CONVERSING[1]: (1, self._stops_streaming),
            CONVERSING[2]: (1, self._vanishes_streaming),
            "slow": (1, self._slow),
            "stops reading": (1, self._stops_reading),
            "vanishes": (1, self._vanishes),
            "goes silent": (1, self._goes_silent),
            "cancels": (2, self._cancels),
        }

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """With the connections that clients share."""
        async with omni_stub(self._house.router) as self._shared, AsyncOmni(address=self._house.router, max_retries=0) as self._omni:
            yield

    async def go_on(self, stopped: asyncio.Event) -> None:
        """One client after another, until told to stop. Whoever is told to ask again later does so."""
        names = list(self.clients)
        weights = [weight for weight, _ in self.clients.values()]
        while not stopped.is_set():
            outcome = await self.ask(self._rng.choices(names, weights)[0])
            await asyncio.sleep(self._rng.expovariate(1 / 0.1) + outcome.retry_delay_s)

    async def ask(self, client: str) -> Outcome:
        """One request; whatever becomes of it is an outcome."""
        begun = time.monotonic()
        result, wrong, failovers, router_losses, delay_s = ANSWERED, "", 0, 0, 0.0
        question = self._question(client)
        try:
            failovers, router_losses = await self.clients[client][1](question)
        except _Left:
            result = CANCELLED
        except AssertionError as error:
            result, wrong = WRONG, f"{question}: {error}"
        except (TurnFailed, grpc.aio.AioRpcError, OmniError) as error:
            result, wrong = self._judge(error, client, begun)
            delay_s = RETRY_DELAY_S
        outcome = Outcome(client, result, time.monotonic() - begun, failovers, router_losses, wrong, delay_s)
        self.outcomes.append(outcome)
        return outcome

    def _question(self, client: str) -> Question:
        self._number += 1
        if client == LARGE:
            return LookingQuestion(self._number, 40, ("video",), True, MIN_BYTES)
        if client in (IN_REQUEST, *CONVERSING):
            kinds = self._rng.sample(("image", "audio", "video", *[LIVE] * (client != IN_REQUEST)), self._rng.randint(1, 3))
            film_bytes = self._rng.choice(FILM_BYTES if client != IN_REQUEST else FILM_BYTES[:2])
            return LookingQuestion(self._number, self._rng.choice((1, 10, 40, 100)), tuple(kinds), client != IN_REQUEST, film_bytes)
        if "pictures" in client:
            return DrawingQuestion(self._number, self._rng.randint(1, 4), self._rng.randint(0, 3), self._rng.randint(2, 40))
        outputs = {"stub, text only": ("text",), "stub, sound only": ("audio",)}.get(client, ("text", "audio"))
        length = 400 if client == "stops reading" else self._rng.choice((1, 10, 40, 100, 200))
        return SpeechQuestion(f"question {self._number}", self._rng.randrange(1 << 32), length, outputs)

    # Judging -------------------------------------------------------------------------------------------------------------------------

    def _judge(self, error: TurnFailed | grpc.aio.AioRpcError | OmniError, client: str, begun: float) -> tuple[str, str]:
        match error:
            case TurnFailed():
                return self._judge_turn(error, client, begun)
            case grpc.aio.AioRpcError():
                return self._judge_stub(error, client, begun)
        return self._judge_library(error, begun)

    def _judge_stub(self, error: grpc.aio.AioRpcError, client: str, begun: float) -> tuple[str, str]:
        try:
            told = refusal(error)
        except AssertionError:
            router = self._house.in_trouble("router", begun, time.monotonic())
            if error.code() in BROKEN and router:
                return ROUTER_LOST, ""
            return WRONG, f"{error.code().name} without a reason, the router had no trouble: {error.details()}"
        if told.reason == "CLIENT_STALLED" and client == "stops reading":
            return told.reason, ""
        return self._judge_reason(told.reason, told.retry_delay_s, told.message, begun)

    def _judge_turn(self, error: TurnFailed, client: str, begun: float) -> tuple[str, str]:
        failed = error.failed
        if failed.reason == "CLIENT_STALLED" and client == CONVERSING[1]:
            return failed.reason, ""
        delay_s = failed.retry_delay.ToTimedelta().total_seconds() if failed.HasField("retry_delay") else None
        return self._judge_reason(failed.reason, delay_s, failed.message, begun)

    def _judge_library(self, error: OmniError, begun: float) -> tuple[str, str]:
        router = self._house.in_trouble("router", begun, time.monotonic())
        if isinstance(error, UnavailableError):
            if error.reason:
                return self._judge_reason(error.reason, error.retry_delay_s, error.message, begun)
            # It goes on once by itself, so that two troubles are needed; one is enough before the first connection.
            if router >= 2 or (router and not isinstance(error, RouterLostError)):
                return ROUTER_LOST, ""
        return WRONG, f"{type(error).__name__} with {router} troubles of the router: {error.message}"

    def _judge_reason(self, reason: str, retry_delay_s: float | None, message: str, begun: float) -> tuple[str, str]:
        now = time.monotonic()
        if reason not in RETRYABLE or retry_delay_s is None:
            return WRONG, f"{reason or 'INTERNAL'}, which says nothing of trying again: {message}"
        full = reason == "OVERLOADED" and self._house.was_full(begun, now)  # Streamed media are put aside on that mount.
        if not (full or self._house.any_stage_in_trouble(begun, now) or self._house.in_trouble("router", begun, now)):
            return WRONG, f"{reason} although nothing was disturbed: {message}"
        return reason, ""

    # Clients. Each returns the failovers it was told of, and the routers it lost --------------------------------------------------------

    async def _read_all(
        self, stub: omni_pb2_grpc.OmniServiceAsyncStub, question: Question, pause_s: Callable[[int], float] = lambda number: 0.0
    ) -> tuple[int, int]:
        """pause_s: after the event with this number."""
        heard, number = EventsOfAnswer(question), 0
        async for event in stub.Generate(question.request(), timeout=TIMEOUT_S):
            heard.take(event)
            number += 1
            await asyncio.sleep(pause_s(number))
        heard.check_whole()
        return heard.failovers, 0

    async def _stub(self, question: Question) -> tuple[int, int]:
        return await self._read_all(self._shared, question)

    async def _library(self, question: Question) -> tuple[int, int]:
        collected = Collected(question)
        options = Options(seed=question.seed, timeout_s=TIMEOUT_S)
        if isinstance(question, SpeechQuestion):
            options.update({"outputs": question.outputs, "max_tokens": question.length, "ignore_eos": True})
            events = self._omni.stream(question.prompt, **options)
        elif isinstance(question, LookingQuestion):
            options.update({"pipeline": "toy-media", "max_tokens": question.length, "ignore_eos": True})
            events = self._omni.stream("?", videos=[medium.data for medium in question.media], **options)
        else:
            options.update({"pipeline": "toy-picture", "outputs": ["image"], "width": SIDE, "height": SIDE})
            options.update({"results": question.results, "previews": question.previews, "steps": question.steps})
            events = self._omni.stream_draw("a slope", **options)
        async for event in events:
            collected.take(event)
        collected.check_whole()
        return collected.failovers, collected.router_losses

    async def _slow(self, question: Question) -> tuple[int, int]:
        return await self._read_all(self._shared, question, lambda number: self._rng.uniform(0, 0.05))

    async def _stops_reading(self, question: Question) -> tuple[int, int]:
        last = self._rng.randrange(60)
        async with grpc.aio.insecure_channel(self._house.router, options=NARROW) as channel:
            stub = omni_pb2_grpc.OmniServiceStub(channel)
            return await self._read_all(stub, question, lambda number: self._rng.uniform(1, 8) if number == last else 0.0)

    async def _cancels(self, question: Question) -> tuple[int, int]:
        call = self._shared.Generate(question.request(), timeout=TIMEOUT_S)
        return await self._read_for_a_while(call, EventsOfAnswer(question), lambda: None)

    async def _vanishes(self, question: Question) -> tuple[int, int]:
        """The connection breaks without a word."""
        async with self._behind_a_wire() as (stub, wire):
            return await self._read_for_a_while(stub.Generate(question.request(), timeout=TIMEOUT_S), EventsOfAnswer(question), wire.cut)

    async def _goes_silent(self, question: Question) -> tuple[int, int]:
        """The connection stands and nothing comes any more, as behind a cable that was pulled."""
        async with self._behind_a_wire() as (stub, wire):
            heard = EventsOfAnswer(question)
            try:
                return await self._read_for_a_while(stub.Generate(question.request(), timeout=TIMEOUT_S), heard, wire.mute)
            except _Left:
                await asyncio.sleep(self._rng.uniform(0, 4))
                raise

    async def _converses(self, question: Question) -> tuple[int, int]:
        assert isinstance(question, LookingQuestion)
        return await two_turns(self._shared, question, TIMEOUT_S), 0

    async def _stops_streaming(self, question: Question) -> tuple[int, int]:
        assert isinstance(question, LookingQuestion)
        await stopped_streaming(self._shared, question, TIMEOUT_S)
        return 0, 0

    async def _vanishes_streaming(self, question: Question) -> tuple[int, int]:
        assert isinstance(question, LookingQuestion)
        async with self._behind_a_wire() as (stub, wire):
            talking = asyncio.create_task(two_turns(stub, question, TIMEOUT_S))
            await asyncio.wait({talking}, timeout=self._rng.expovariate(1 / 0.3))
            if talking.done():
                return talking.result(), 0
            wire.cut()
            talking.cancel()
            await asyncio.wait({talking})
            raise _Left

    async def _read_for_a_while(self, call: GenerateCall, heard: EventsOfAnswer, leave: Callable[[], None]) -> tuple[int, int]:
        """Read an answer, leave it at a random moment. Raises _Left; returns if it was over before."""
        try:
            async with asyncio.timeout(self._rng.expovariate(1 / 0.7)):
                while isinstance(event := await call.read(), omni_pb2.GenerateResponse):
                    heard.take(event)
        except TimeoutError:
            leave()
            raise _Left from None
        finally:
            call.cancel()
        if await call.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        heard.check_whole()
        return heard.failovers, 0

    @asynccontextmanager
    async def _behind_a_wire(self) -> AsyncIterator[tuple[omni_pb2_grpc.OmniServiceAsyncStub, Wire]]:
        wire = Wire(self._house.router)
        wire.connect()
        try:
            # Without keepalive: the wire is in this very process, and slower than a cable when the machine is busy.
            async with grpc.aio.insecure_channel(wire.address) as channel:
                yield omni_pb2_grpc.OmniServiceStub(channel), wire
        finally:
            await wire.disconnect()


class _Left(Exception):
    """The client had enough."""
