"""Writes a product in numbers, as a line for people and as an object for scripts, and says which servers were lost in the middle of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from rich.markup import escape

from omnistage.cli.console import Notices
from omnistage.cli.make.screen import Spoken
from omnistage.client.events import CONTINUITY_LIMIT_S, START_BUFFER_S, Done, Failover, Timing, play
from omnistage.client.remarks import unspoken_text

SEPARATOR = " · "
"""Stands between two figures."""


def print_object(facts: Mapping[str, object], done: Done, more_facts: Mapping[str, object] | None = None) -> None:
    """Print the JSON object about a product, for scripts. facts, more_facts: what stands before and after the facts of all products; a
    number of seconds is rounded."""
    names = ("stage", "lost", "replica", "reason", "at_s", "pause_s")
    failovers = [_rounded({name: getattr(failover, name) for name in names}) for failover in done.failovers]
    common = {"seed": done.seed, "pipeline": done.pipeline, "failovers": failovers, "drew": done.drew, "notes": list(done.usage.notes)}
    print(json.dumps({**_rounded(facts), **common, **(more_facts or {})}, ensure_ascii=False), flush=True)


def _rounded(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in facts.items()}


def answer_facts(answer: Spoken, done: Done) -> dict[str, object]:
    """The facts of an answer that stand first in its JSON object."""
    timing = done.timing
    names = ("ttft_s", "ttfa_s", "e2e_s", "audio_s", "rtf")
    thought = {"thought": answer.thought} if answer.thought else {}
    return {"text": answer.text, **thought, **{name: getattr(timing, name) for name in names}, "finish_reason": done.finish_reason}


def remarks(done: Done) -> Iterator[str]:
    """Yields lines for people with the server's remarks."""
    yield from done.usage.notes
    if unspoken := unspoken_text(done.unspoken, done.unspoken_words):
        yield f"not spoken: {unspoken}"


def seed_text(done: Done) -> list[str]:
    """The seed in words; empty if it is not needed, because every other seed would have given the same answer."""
    return [] if done.drew is False else [f"seed {done.seed}"]


def figures(done: Done, *, is_brief: bool = False) -> str:
    """The figures of an answer, in one line for people. is_brief: only the few that a conversation shows."""
    timing = done.timing
    parts = [f"{name} {at_s * 1000:.0f} ms" for name, at_s in (("ttft", timing.ttft_s), ("ttfa", timing.ttfa_s)) if at_s is not None]
    if is_brief:
        parts += [f"audio {timing.audio_s:.1f} s"] if timing.audio_s else []
    else:
        parts.append(f"audio {timing.audio_s:.2f} s" if timing.audio_s else "no audio")
        parts += [f"rtf {timing.rtf:.2f}"] if timing.rtf is not None else []
        parts += [f"play after {timing.prebuffer_s:.2f} s"] if timing.prebuffer_s else []
        parts += [f"gaps {timing.starved_s:.2f} s"] if timing.starved_s > CONTINUITY_LIMIT_S else []
        parts += [f"e2e {timing.e2e_s:.2f} s", f"pipeline {done.pipeline}"]
    return SEPARATOR.join([*parts, *seed_text(done)])


def tell(*lines: str) -> None:
    """Print lines for people at once: the end of a private stack, which comes next, takes a while."""
    notices = Notices()
    for line in lines:
        for row in _fold_line(line, notices.width) if notices.is_terminal else [line]:
            notices.tell(f"[dim]{escape(row)}[/]")


def _fold_line(line: str, columns: int) -> list[str]:
    """The rows into which a line of figures is broken for a terminal, between figures."""
    rows = list[str]()
    for part in line.split(SEPARATOR):
        if rows and len(rows[-1]) + len(SEPARATOR) + len(part) < columns:
            rows[-1] += SEPARATOR + part
        else:
            rows.append(part)
    return rows


def sentence(failover: Failover, timing: Timing) -> str:
    """A sentence about a loss: which server was lost, how the answer went on, and what the listener noticed."""
    went_on = "it was back" if failover.replica == failover.lost else "another went on"
    return f"{failover.stage} lost at {failover.at_s:.2f} s, {went_on} after {pause(failover)}; {_effect_text(failover, timing)}"


def pause(failover: Failover) -> str:
    """The pause after a loss in words: 35 ms, or 1.24 s."""
    return f"{failover.pause_s * 1000:.0f} ms" if failover.pause_s < 1 else f"{failover.pause_s:.2f} s"


def waited_s(failover: Failover, timing: Timing) -> float:
    """Seconds of silence after a loss, because sound came late, for a listener with a buffer of START_BUFFER_S."""
    return sum(chunk.gap_s for chunk in play(timing.audio, START_BUFFER_S) if chunk.start_s >= failover.at_s)


def _effect_text(failover: Failover, timing: Timing) -> str:
    """The effect of a loss on the listener, in words."""
    if not timing.audio:
        return "nothing is missing"
    silence_s = waited_s(failover, timing)
    # Less than 0.005 s would be written as 0.00 s.
    return "the listener noticed nothing" if silence_s < 0.005 else f"the listener waited {silence_s:.2f} s for sound after it"
