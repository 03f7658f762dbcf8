"""Asks many texts, as many at the same time as the router has places; the number of places is found by trying."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from omnistage.client.answer import Answer
from omnistage.client.conversation import checked_text
from omnistage.client.errors import BadRequestError, OmniError, OverloadedError
from omnistage.client.options import Options

FIRST, MOST = 4, 64
"""How many texts are asked at once: FIRST at the beginning, then more and more as answers come, up to MOST; fewer after a refusal because
no place is free."""

DELAY_S = 1.0
"""Seconds to pause before the next question if other clients have all places and the router gave no delay."""

CALM, CALMER = FIRST, 4
"""If a text is refused because no place is free, so many answers must come before the room grows again: none after the first refusal,
because one refusal says little; CALM after the second; CALMER times as many after each further one, up to MOST."""

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
        ask at once; None: not known, so MOST. pause: waits for some seconds."""
        self._ask, self._patience_s, self._pause = ask, patience_s, pause
        self._most = max_texts or MOST
        self._room = max_texts or FIRST
        """How many texts may be asked at once now."""
        self._calm = self._next_calm = 0
        """_calm: how many answers must still come before the room may grow. _next_calm: the same number after the next refusal."""
        self._step = FIRST
        """By how many texts the room grows next; it doubles after each growth."""
        self._turn = self._refused = 0
        """_turn: how often the room has changed; a text asked before the last change says nothing about the places now. _refused: number of
        the turn that began with the last refusal."""
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
            raise _first(errors, answers)
        return [answer for answer in answers if answer is not None]

    def _note_answer(self, turn: int) -> None:
        """Note an answer. turn: in which its text was asked. The room grows if that is the present turn and `_calm` is 0."""
        self._until = None
        if self._calm:
            self._calm -= 1
        elif turn == self._turn and self._room < self._most:
            self._room = min(self._room + self._step, self._most)
            self._step *= 2
            self._turn += 1

    def _note_refusal(self, turn: int) -> None:
        """Note a refusal. turn: in which its text was asked. The room shrinks to the number of texts that are running."""
        self._room, self._step = max(1, len(self._running)), 1
        self._turn += 1
        if turn >= self._refused:  # Refusals of questions that were asked at about the same time count as one.
            self._calm = self._next_calm
            self._next_calm = min(max(CALM, CALMER * self._calm), MOST)
        self._refused = self._turn

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


def _first(errors: Mapping[int, OmniError], answers: Sequence[Answer | None]) -> OmniError:
    """The error of the first text that failed, with `answers` set: for each text its answer, or None if it failed. errors: by number."""
    number = min(errors)
    others = f", and {len(errors) - 1} more failed" if len(errors) > 1 else ""
    error = errors[number]
    error.answers = answers
    error.add_note(f"this is about prompt[{number}] of {len(answers)}{others}; error.answers has the answers that came")
    return error
