"""Collects the text of an answer in `omnistage chat`, and notices that the conversation is too long for the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from omnistage.client.errors import BadRequestError
from omnistage.client.events import Event, TextDelta

TOO_LONG = (["thinker.messages"], ["request"])
"""Fields that a refusal names if the conversation no longer fits into the model's context, or with its media into a request."""


class Said:
    """Collects the text of an answer while it comes; `text` has what came even if the answer is broken off."""

    def __init__(self) -> None:
        self.text = ""

    async def heard(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer, and collect its text."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    self.text += event.text
                yield event


class TooLong(Exception):
    """The conversation no longer fits into the model's context, or into a request."""


async def until_too_long(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yield events. Raises TooLong in place of the refusal of a conversation that is too long."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except BadRequestError as error:
        if [violation.field for violation in error.fields] in TOO_LONG:
            raise TooLong from error
        raise
