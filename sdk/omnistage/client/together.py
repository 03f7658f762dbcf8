"""Many texts asked beside each other: as many at once as there are places, which are counted as long as none is refused."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from omnistage.client.answer import Answer
from omnistage.client.errors import BadRequestError, OmniError, OverloadedError
from omnistage.client.options import Options

FIRST, MOST = 4, 64
"""How many are asked at once at first; one more with each answer, until one is refused for want of a place."""

DELAY_S = 1.0
"""Before the next question where others have all places, and nobody said when to ask again."""

Ask = Callable[[str], Coroutine[Any, Any, Answer]]


def checked_texts(prompts: Sequence[object], options: Options) -> list[str]:
    """The texts, if they are some. Raises BadRequestError."""
    if options.get("request_id") is not None:
        raise BadRequestError.of("request_id", "names a single answer; leave it out with a list of texts")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Mapping):
            raise BadRequestError.of(f"prompt[{i}]", "is a turn of a conversation, which chat takes; generate takes texts")
        if not isinstance(prompt, str):
            raise BadRequestError.of(f"prompt[{i}]", "must be text")
    return [prompt for prompt in prompts if isinstance(prompt, str)]


class Together:
    """One list. It ends with the caller: nothing of it goes on when that is cancelled."""

    def __init__(self, ask: Ask, patience_s: float, most: int | None = None) -> None:
        """ask: one text. patience_s: for others who have all the places. most: at once, where that is known."""
        self._ask, self._patience_s = ask, patience_s
        self._most = most or MOST
        self._room = most or FIRST
        self._running: dict[asyncio.Task[Answer], int] = {}
        self._until: float | None = None
        """When nobody is patient any longer; None: there are places."""

    async def answers(self, prompts: Sequence[str]) -> list[Answer]:
        """In the order of the texts. Raises the error of the first text that has one, when all have ended; its `answers` are the others."""
        waiting = deque(range(len(prompts)))
        answers: list[Answer | None] = [None] * len(prompts)
        errors: dict[int, OmniError] = {}
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._room:
                    number = waiting.popleft()
                    self._running[asyncio.create_task(self._ask(prompts[number]))] = number
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number = self._running.pop(task)
                    try:
                        answers[number] = task.result()
                        self._more()
                    except OverloadedError as error:
                        if await self._is_patient(error):
                            waiting.appendleft(number)
                        else:
                            errors[number] = error
                    except OmniError as error:
                        errors[number] = error
        finally:
            left = [*self._running]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if errors:
            raise _first(errors, answers)
        return [answer for answer in answers if answer is not None]

    def _more(self) -> None:
        self._until = None
        self._room = min(self._room + 1, self._most)

    async def _is_patient(self, error: OverloadedError) -> bool:
        """Whether to ask once more, now: one of ours that ends makes room; else others have all the places, for a while."""
        self._room = self._most = max(1, len(self._running))
        if self._running:
            return True
        delay_s = DELAY_S if error.retry_delay_s is None else error.retry_delay_s
        self._until = self._until or time.monotonic() + self._patience_s
        if time.monotonic() + delay_s > self._until:
            return False
        await asyncio.sleep(delay_s)
        return True


def _first(errors: Mapping[int, OmniError], answers: Sequence[Answer | None]) -> OmniError:
    number = min(errors)
    others = f", and {len(errors) - 1} more failed" if len(errors) > 1 else ""
    error = errors[number]
    error.answers = answers
    error.add_note(f"this is about prompt[{number}] of {len(answers)}{others}; error.answers has the answers that came")
    return error
