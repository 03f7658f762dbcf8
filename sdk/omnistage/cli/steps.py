"""Follows a drawing, a film or a sound of a prompt: shows its progress while it comes, and reports at its end."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from omnistage.cli.drawing_screen import DrawingScreen
from omnistage.cli.figures import SEPARATOR, remarks, seed_told, server_facts, tell
from omnistage.cli.rescue import as_object, sentence
from omnistage.client.errors import ProtocolError
from omnistage.client.events import Done, Event, Progress


async def follow(events: AsyncGenerator[Event, None], screen: DrawingScreen, take: Callable[[Event], None]) -> tuple[int, Done]:
    """Show the progress; returns how many steps were done, and the last event, `Done`. take: called with every other event. Raises
    ProtocolError if `Done` does not come."""
    steps = 0
    async with aclosing(events):
        with screen:
            async for event in events:
                match event:
                    case Progress():
                        steps = event.done
                        screen.progress(event.done, event.total)
                    case Done():
                        return steps, event
                    case _:
                        take(event)
    raise ProtocolError("the stream ended without its account")


def report(facts: Mapping[str, object], figures: Sequence[str], steps: int, done: Done, *, as_json: bool) -> None:
    """Print the result: with `as_json` one object for scripts, which begins with `facts`; else lines for people: the servers that were
    lost, a line that begins with `figures`, and the servers' remarks. steps: how many were done."""
    if as_json:
        losses = [as_object(failover) for failover in done.failovers]
        end = {"e2e_s": round(done.timing.e2e_s, 6), "steps": steps or None, "seed": done.seed, "pipeline": done.pipeline}
        print(json.dumps({**facts, **end, "failovers": losses, **server_facts(done)}, ensure_ascii=False), flush=True)
        return
    parts = (*figures, f"{steps} steps" if steps else "", f"pipeline {done.pipeline}", seed_told(done))
    tell(*(sentence(failover, done.timing) for failover in done.failovers), SEPARATOR.join(filter(None, parts)), *remarks(done))
