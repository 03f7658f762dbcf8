"""Records calls of the Python client: for each line of `calls.txt` the repr of its value, or the error with its fields.

It runs as a process of its own, whose PYTHONPATH has the recorded checkout: `python -m tools.recording.python_calls HOST:PORT`."""

from __future__ import annotations

import asyncio
import copy  # noqa: F401  # For calls, as io is.
import io  # noqa: F401
import json
import pickle
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from omnistage import client
from omnistage.client import AsyncOmni, AudioChunk, Event, Omni, TextDelta


def events(answered: Iterable[Event]) -> list[Any]:
    """The kinds of events in the order of their first, the joined text, and the number of samples: what does not depend on time."""
    received = [*answered]
    text = "".join(event.text for event in received if isinstance(event, TextDelta))
    samples = sum(len(event.samples) for event in received if isinstance(event, AudioChunk))
    return [*dict.fromkeys(type(event).__name__ for event in received), text, samples]


def fields(value: Any) -> dict[str, str]:
    """The reprs of a value's public attributes, by name, without those that hold times."""
    names = [name for name in dir(value) if not name.startswith("_") and name not in ("timing", "usage", "arrival_s")]
    return {name: repr(attribute) for name in names if not callable(attribute := getattr(value, name, None))}


def again(value: Any) -> Any:
    """The value, pickled and read back."""
    return pickle.loads(pickle.dumps(value))


def run(address: str, call: Callable[[AsyncOmni], Awaitable[Any]]) -> Any:
    """The result of a call of an AsyncOmni."""

    async def called() -> Any:
        async with AsyncOmni(address=address, max_retries=0) as omni:
            return await call(omni)

    return asyncio.run(called())


async def collected(stream: Any) -> list[Any]:
    """As `events`, of an asynchronous stream."""
    return events([event async for event in stream])


def outcome(line: str, names: dict[str, Any]) -> dict[str, Any]:
    """The result of one line: an expression."""
    try:
        return {"value": repr(eval(line, names))}
    except Exception as error:  # Whatever comes is what is recorded.
        fields = {name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in sorted(vars(error).items())}
        shown = {name: repr(value) for name, value in fields.items() if name != "__notes__"}
        notes = getattr(error, "__notes__", [])
        return {"type": [kind.__name__ for kind in type(error).__mro__], "text": str(error), "notes": notes, "fields": shown}


def main() -> int:
    """Print the results of all lines as JSON."""
    (address,) = sys.argv[1:]
    text = Path(__file__).with_name("calls.txt").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    results = {}
    with Omni(address=address, max_retries=0) as omni:
        for line in lines:
            results[line] = outcome(line, {**vars(client), **globals(), "omni": omni, "address": address})
    json.dump(results, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
