"""Asks until an answer is there. `Call` sends one request, again if needed, until its answer is whole or an error is final.

`Together` asks many texts, as many at the same time as the router has places; the number of places is found by trying."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from omnistage.client import threads
from omnistage.client.answer import Answer
from omnistage.client.connection import Connection
from omnistage.client.conversation import checked_text
from omnistage.client.errors import (
    BadRequestError,
    OmniError,
    OverloadedError,
    RouterLostError,
    StartingError,
    UnavailableError,
    is_broken,
    says_when,
)
from omnistage.client.events import Event, Failover, Progress
from omnistage.client.limits import Limit, Retries
from omnistage.client.options import Options
from omnistage.client.reader import Reader
from omnistage.client.request import due
from omnistage.client.routers import ApiKey, Router
from omnistage.client.upload import Conversing, Uploads
from omnistage.v1 import omni_pb2

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 0.4
"""Seconds to pause between attempts to go on, doubled each time: a router that has just come back may break the first attempts."""

NOT_YET = ("DRAINING", "OVERLOADED", "STARTING")
"""Reasons for which a router refuses to go on with an answer for now: it is not ready or has no place. These refusals carry a delay
after which it may take the answer."""

NO_OUTPUT = (Failover, Progress)
"""Events that are no part of the answer itself: the answer may begin anew although the caller has them."""

GenerateCall = grpc.aio.UnaryStreamCall[omni_pb2.GenerateRequest, omni_pb2.GenerateResponse]

ROUTER_LOST = "its router was lost on the way"


class Call:
    """Sends one request and reads its answer. It asks again, under the same request id and within the one time limit, for three reasons:

    - The connection broke. It asks a router for the rest, and the caller gets the further events; a second loss is an error.
    - The pipeline is still starting. It waits until the pipeline serves.
    - The router gives a delay, and the caller has no part of the answer yet. The answer begins anew, up to `retries` times."""

    def __init__(
        self,
        connection: Connection,
        key: ApiKey | None,
        request: omni_pb2.GenerateRequest,
        uploads: Uploads,
        limit: Limit,
        resume_s: float,
        retries: Retries,
        is_whole: bool,
    ) -> None:
        """key: the caller's key. uploads: media that are streamed; each attempt sends them from the beginning. limit: for the whole answer.
        resume_s: seconds to look for a router that goes on after a loss; 0: do not look. is_whole: the caller gets no event before all have
        come; until then the answer may begin anew."""
        self._connection = connection
        self._key = key
        self._request = request
        self._uploads = uploads
        self._request.request_id = request.request_id or uuid.uuid4().hex
        self._request.batches = True
        self._limit = limit
        self._resume_s = resume_s
        self._retries = retries
        self._reader = self._new_reader()
        self._pending_events: list[Event] | None = [] if is_whole else None
        """If `is_whole`: the events so far, which the caller gets when all have come. None: events are yielded at once."""
        self.has_asked = False
        """Whether a router was asked, so that its log may have a line about the request."""
        self._has_output = False
        """Whether the caller has got a part of the answer, so that the answer must not begin anew."""
        self._has_begun = False
        """Whether the private stack was asked to start the pipeline. If its router still refuses, the call only pauses."""
        self._patience: Limit | None = None
        """The time limit of the wait for a pipeline that is starting; it runs from the first refusal on. None: no refusal yet."""
        self._search: Limit | None = None
        """The time limit of the search for a router that goes on; it runs from the loss of the first router on. None: no loss."""
        self._lost_address = ""
        """HOST:PORT of the router that was lost last; empty: none was lost."""
        self._wait_s = FIRST_WAIT_S  # the next pause in the search

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields every event of the answer; `Done` is the last. Raises OmniError."""
        while True:
            router = await self._connect()
            if not self._reader.is_lost:
                self._reader = self._new_reader()
            try:
                async with aclosing(self._read(router)) as events:
                    async for event in events:
                        if self._pending_events is None:
                            self._has_output = self._has_output or not isinstance(event, NO_OUTPUT)
                            yield event
                        else:
                            self._pending_events.append(event)
                for event in self._pending_events or ():
                    yield event
                return
            except grpc.aio.AioRpcError as error:
                ready = self._ready_again(router, error)
            await ready

    def _ready_again(self, router: Router, error: grpc.aio.AioRpcError) -> Awaitable[None]:
        """Return a wait until a router can be asked again. error: of the last attempt; if it is final, its exception is raised."""
        if is_broken(error):
            return self._ready_to_go_on(router, error)
        refusal = self._limit.explain(error)
        pause = self._pause_in_search(refusal) if self._reader.is_lost and refusal.reason in NOT_YET else None
        if pause is not None:
            return pause
        if not self._reader.is_lost and isinstance(refusal, StartingError):
            ready = self._ready_pipeline(refusal)
        else:
            ready = self._pause_for_retry(router, refusal) if says_when(error) else None
        if ready is None:
            if self._retries.retry_count:
                refusal.say_more(f"asked {self._retries.retry_count + 1} times")
            raise refusal from error
        return ready

    # The connection broke ------------------------------------------------------------------------------------------------------------

    def _ready_to_go_on(self, router: Router, error: grpc.aio.AioRpcError) -> Awaitable[None]:
        """Note the loss of the router, and return the pause (an awaitable) before a router is asked for the rest. Raises RouterLostError
        for a second loss in the middle of the answer, and if no time is left for the search; DeadlineError if the time limit has passed."""
        if self._search is None:
            if self._limit.is_over:
                raise self._limit.passed() from error
            self._lose(router, error)
            if not self._resume_s:
                raise self._router_lost(router, error) from error
            self._search = Limit(self._resume_s)
            return self._connection.pause(0.0)
        is_second = not self._reader.is_lost
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, LONGEST_WAIT_S)
        if is_second or self._search.ends_within(wait_s):
            raise self._router_lost(router, error) from error
        self._lose(router, error)
        return self._connection.pause(min(wait_s, self._left_s))

    def _pause_in_search(self, refusal: OmniError) -> Awaitable[None] | None:
        """The pause (an awaitable) after a router refused for now to go on with the answer. None: do not try again, because the refusal
        gave no delay, or the search would end within it."""
        delay_s = refusal.retry_delay_s if isinstance(refusal, UnavailableError) else None
        if self._search is None or delay_s is None or self._search.ends_within(delay_s):
            return None
        return self._connection.pause(min(delay_s, self._left_s))

    def _lose(self, router: Router, error: grpc.aio.AioRpcError) -> None:
        """Note that the connection to the router broke: the next connection goes to the next address, and the reader expects the rest of
        the answer."""
        self._lost_address = self._lost_address or router.address
        self._connection.note_loss(router.address)
        self._reader.lose(router.address, error.details() or error.code().name)

    def _router_lost(self, router: Router, error: grpc.aio.AioRpcError) -> RouterLostError:
        details = error.details() or error.code().name
        return RouterLostError(f"the connection to the router at {router.address} broke: {details}", code=error.code())

    # The pipeline starts -------------------------------------------------------------------------------------------------------------

    def _ready_pipeline(self, refusal: StartingError) -> Awaitable[None] | None:
        """The wait (an awaitable) for a pipeline that is starting: until the private stack has started it, or a pause before the router is
        asked again. None: do not wait, because the pause would be longer than START_PATIENCE_S or the time limit allows."""
        if self._connection.is_private and not self._has_begun:
            self._has_begun = True
            return self._connection.begin(refusal.pipeline, self._limit)
        is_first, patience_s = self._patience is None, self._connection.start_patience_s
        self._patience = self._patience or Limit(patience_s)
        delay_s = refusal.retry_delay_s or LONGEST_WAIT_S
        if self._patience.ends_within(delay_s) or self._limit.ends_within(delay_s):
            return None
        if is_first:
            self._connection.tell(f"{refusal.pipeline} is still starting; waiting up to {min(patience_s, self._limit.left_s):.0f} s")
        return self._connection.pause(delay_s)

    # The router says when ------------------------------------------------------------------------------------------------------------

    def _pause_for_retry(self, router: Router, refusal: OmniError) -> Awaitable[None] | None:
        """Get ready to begin the answer anew, and return the pause (an awaitable) before that. None: it may not begin anew, no retry is
        left, or the time limit would end within the pause."""
        if not isinstance(refusal, UnavailableError) or refusal.retry_delay_s is None or self._has_output:
            return None
        pause_s = self._retries.pause_s(refusal.retry_delay_s)
        if self._retries.retry_count == self._retries.max_retries or self._limit.ends_within(pause_s):
            return None
        if refusal.reason == "DRAINING":
            self._connection.note_loss(router.address)  # The router is ending, so the next attempt goes to another one, if there is one.
        self._reader = self._new_reader()
        if self._pending_events is not None:
            self._pending_events.clear()
        self._connection.tell(self._retries.count(refusal, pause_s))
        return self._connection.pause(pause_s)

    # Asking --------------------------------------------------------------------------------------------------------------------------

    def _new_reader(self) -> Reader:
        return Reader(time.perf_counter(), due(self._request))

    async def _connect(self) -> Router:
        """Return the first router that can be connected, to begin the answer or to go on with it. Raises UnavailableError, RouterLostError
        or DeadlineError."""
        search = self._search if self._reader.is_lost else None
        left_s = self._left_s
        # The search may be over: then its `left_s` would raise an error of another kind than this.
        patience_s = self._connection.connect_timeout_s if search is None else search.seconds - search.spent_s
        try:
            return await self._connection.connect(min(left_s, patience_s), self._key)
        except UnavailableError as error:
            if search is None and self._limit.is_over:
                raise self._limit.passed(error.message) from error
            if search is None:
                raise
            if left_s < patience_s:  # The time limit of the call ended the search.
                raise self._limit.passed(ROUTER_LOST) from error
            message = f"the connection to the router at {self._lost_address} broke, and none was there to go on within {self._resume_s:g} s"
            raise RouterLostError(message, code=error.code) from error

    async def _read(self, router: Router) -> AsyncGenerator[Event, None]:
        """Ask a router for the answer, or for the rest of it, and yield the events that come."""
        self.has_asked = True
        call: GenerateCall | Conversing
        request = self._reader.request(self._request)
        if self._uploads:
            conversing = router.stub.Converse(timeout=self._left_s, metadata=router.metadata)
            threads.leave_to_parent(conversing)
            call = Conversing(conversing, request, self._uploads)
        else:
            call = router.stub.Generate(request, timeout=self._left_s, metadata=router.metadata)
            threads.leave_to_parent(call)
        try:
            async with aclosing(self._reader.read(call, router.address)) as events:
                async for event in events:
                    yield event
        finally:
            if not threads.is_child_of_grpc_user():
                call.cancel()

    @property
    def _left_s(self) -> float:
        """The seconds that are left of the time limit. Raises DeadlineError when none are."""
        if self._limit.is_over and self._reader.is_lost:
            raise self._limit.passed(ROUTER_LOST)
        return self._limit.left_s


FIRST_ROOM, LARGEST_ROOM = 4, 64
"""How many texts are asked at once: FIRST_ROOM at the beginning, then more and more as answers come, up to LARGEST_ROOM; fewer after a
refusal because no place is free."""

DELAY_S = 1.0
"""Seconds to pause before the next question if other clients have all places and the router gave no delay."""

CALM, CALMER = FIRST_ROOM, 4
"""If a text is refused because no place is free, so many answers must come before the room grows again: none after the first refusal,
because one refusal says little; CALM after the second; CALMER times as many after each further one, up to LARGEST_ROOM."""

Ask = Callable[[str], Coroutine[Any, Any, Answer]]
Pause = Callable[[float], Coroutine[Any, Any, None]]


def checked_texts(prompts: Sequence[object], options: Options, *, has_media: bool) -> list[str]:
    """The prompts as texts, all checked before the first one is asked. has_media: whether a text may be empty. Raises BadRequestError."""
    if options.get("request_id") is not None:
        raise BadRequestError.of("request_id", "names a single answer; leave it out with a list of texts")
    texts = list[str]()
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Mapping):
            raise BadRequestError.of(f"prompt[{i}]", "is a turn of a conversation, which chat takes; generate takes texts")
        texts.append(checked_text(f"prompt[{i}]", prompt))
        if not texts[-1].strip() and not has_media:
            raise BadRequestError.of(f"prompt[{i}]", "is empty; give the words to answer")
    return texts


class Together:
    """Asks one list of texts. If the caller is cancelled, all running questions are cancelled."""

    def __init__(self, ask: Ask, patience_s: float, max_texts: int | None = None, pause: Pause = asyncio.sleep) -> None:
        """ask: asks one text. patience_s: seconds to wait while other clients have all places. max_texts: the largest number of texts to
        ask at once; None: not known, so LARGEST_ROOM. pause: waits for some seconds."""
        self._ask, self._patience_s, self._pause = ask, patience_s, pause
        self._max_room = max_texts or LARGEST_ROOM
        self._room = max_texts or FIRST_ROOM
        """How many texts may be asked at once now."""
        self._answers_to_growth = self._next_answers_to_growth = 0
        """How many answers must still come before the room may grow; and the same number after the next refusal."""
        self._growth = FIRST_ROOM
        """By how many texts the room grows next; it doubles after each growth."""
        self._turn = self._refusal_turn = 0
        """_turn: how often the room has changed; a text asked before the last change says nothing about the places now. _refusal_turn: the
        turn that began with the last refusal."""
        self._running: dict[asyncio.Task[Answer], tuple[int, int]] = {}
        """By task: the text's number, and the turn in which it was asked."""
        self._until: float | None = None
        """time.monotonic() at which the wait for places ends; None: there are places."""

    async def answers(self, prompts: Sequence[str]) -> list[Answer]:
        """The answers in the order of the texts. If texts failed, raises the error of the first of them when all texts have ended; its
        `answers` has the answers to the others."""
        waiting = deque(range(len(prompts)))
        answers: list[Answer | None] = [None] * len(prompts)
        errors: dict[int, OmniError] = {}
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._room:
                    number = waiting.popleft()
                    self._running[asyncio.create_task(self._ask(prompts[number]))] = number, self._turn
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                # Refusals first: they begin a new turn, so that answers which came with them do not let the room grow.
                for task in sorted(done, key=_is_refused, reverse=True):
                    number, turn = self._running.pop(task)
                    try:
                        answers[number] = task.result()
                        self._note_answer(turn)
                    except OverloadedError as error:
                        self._note_refusal(turn)
                        if await self._is_patient(error):
                            waiting.appendleft(number)
                        else:
                            errors[number] = error
                    except OmniError as error:
                        errors[number] = error
        finally:
            running = [*self._running]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if errors:
            raise _first_error(errors, answers)
        return [answer for answer in answers if answer is not None]

    def _note_answer(self, turn: int) -> None:
        """Note an answer. turn: in which its text was asked. The room grows if that is the present turn and no further answer must
        come first."""
        self._until = None
        if self._answers_to_growth:
            self._answers_to_growth -= 1
        elif turn == self._turn and self._room < self._max_room:
            self._room = min(self._room + self._growth, self._max_room)
            self._growth *= 2
            self._turn += 1

    def _note_refusal(self, turn: int) -> None:
        """Note a refusal. turn: in which its text was asked. The room shrinks to the number of texts that are running."""
        self._room, self._growth = max(1, len(self._running)), 1
        self._turn += 1
        if turn >= self._refusal_turn:  # Refusals of questions that were asked at about the same time count as one.
            self._answers_to_growth = self._next_answers_to_growth
            self._next_answers_to_growth = min(max(CALM, CALMER * self._answers_to_growth), LARGEST_ROOM)
        self._refusal_turn = self._turn

    async def _is_patient(self, error: OverloadedError) -> bool:
        """Returns whether to ask a refused text again: at once if other texts of this list are running, because the end of one makes room.
        Otherwise other clients have all places: first pause, and return False if `patience_s` would be over."""
        if self._running:
            return True
        delay_s = DELAY_S if error.retry_delay_s is None else error.retry_delay_s
        self._until = self._until or time.monotonic() + self._patience_s
        if time.monotonic() + delay_s > self._until:
            return False
        await self._pause(delay_s)
        return True


def _is_refused(task: asyncio.Task[Answer]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), OverloadedError)


def _first_error(errors: Mapping[int, OmniError], answers: Sequence[Answer | None]) -> OmniError:
    """The error of the first text that failed, with `answers` set: for each text its answer, or None if it failed. errors: by number."""
    number = min(errors)
    others = f", and {len(errors) - 1} more failed" if len(errors) > 1 else ""
    error = errors[number]
    error.answers = answers
    error.add_note(f"this is about prompt[{number}] of {len(answers)}{others}; error.answers has the answers that came")
    return error
