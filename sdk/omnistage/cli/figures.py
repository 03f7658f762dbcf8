"""What there is to say of an answer in numbers: a line for people, an object for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator

from omnistage.cli.rescue import as_object
from omnistage.cli.screen import Spoken
from omnistage.client.events import Done
from omnistage.client.playback import CONTINUITY_LIMIT_S

SEPARATOR = " · "
"""Between two figures."""


def as_json(spoken: Spoken, done: Done) -> str:
    """The one object that scripts read."""
    timing = done.timing
    return json.dumps(
        {
            "text": spoken.text,
            "ttft_s": _rounded(timing.ttft_s),
            "ttfa_s": _rounded(timing.ttfa_s),
            "e2e_s": _rounded(timing.e2e_s),
            "audio_s": _rounded(timing.audio_s),
            "rtf": _rounded(timing.rtf),
            "finish_reason": done.finish_reason,
            "seed": done.seed,
            "pipeline": done.pipeline,
            "failovers": [as_object(failover) for failover in done.failovers],
        },
        ensure_ascii=False,
    )


def figures(done: Done) -> str:
    """One line for people."""
    timing = done.timing
    parts = [
        None if timing.ttft_s is None else f"ttft {timing.ttft_s * 1000:.0f} ms",
        None if timing.ttfa_s is None else f"ttfa {timing.ttfa_s * 1000:.0f} ms",
        f"audio {timing.audio_s:.2f} s" if timing.audio_s else "no audio",
        None if timing.rtf is None else f"rtf {timing.rtf:.2f}",
        f"play after {timing.prebuffer_s:.2f} s" if timing.prebuffer_s else None,
        None if timing.starved_s <= CONTINUITY_LIMIT_S else f"gaps {timing.starved_s:.2f} s",
        f"e2e {timing.e2e_s:.2f} s",
        f"pipeline {done.pipeline}",
        f"seed {done.seed}",
    ]
    return SEPARATOR.join(part for part in parts if part)


def brief_figures(done: Done) -> str:
    """The same for a conversation."""
    timing = done.timing
    parts = [
        None if timing.ttft_s is None else f"ttft {timing.ttft_s * 1000:.0f} ms",
        None if timing.ttfa_s is None else f"ttfa {timing.ttfa_s * 1000:.0f} ms",
        f"audio {timing.audio_s:.1f} s" if timing.audio_s else None,
        f"seed {done.seed}",
    ]
    return SEPARATOR.join(part for part in parts if part)


def folded(line: str, columns: int | None) -> Iterator[str]:
    """A line of figures as lines of a terminal, broken between two figures. columns: None where it has no width."""
    first, *others = line.split(SEPARATOR)
    for part in others:
        if columns is not None and len(first) + len(SEPARATOR) + len(part) >= columns:
            yield first
            first = part
        else:
            first += SEPARATOR + part
    yield first


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
