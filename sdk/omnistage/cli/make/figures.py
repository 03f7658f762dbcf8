"""Writes an answer in numbers, as a line for people and as an object for scripts, and says which servers were lost in the middle of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.cells import cell_len
from rich.markup import escape

from omnistage.cli.console import Notices
from omnistage.cli.make.screen import Spoken, Wrap
from omnistage.client.events import CONTINUITY_LIMIT_S, START_BUFFER_S, Done, Failover, Timing, play, unspoken_text

SEPARATOR = " · "
"""Stands between two figures."""


def as_json(answer: Spoken, done: Done) -> str:
    """The JSON object about an answer, for scripts."""
    timing = done.timing
    return json.dumps(
        {
            "text": answer.text,
            **({"thought": answer.thought} if answer.thought else {}),
            "ttft_s": _round_figure(timing.ttft_s),
            "ttfa_s": _round_figure(timing.ttfa_s),
            "e2e_s": _round_figure(timing.e2e_s),
            "audio_s": _round_figure(timing.audio_s),
            "rtf": _round_figure(timing.rtf),
            "finish_reason": done.finish_reason,
            "seed": done.seed,
            "pipeline": done.pipeline,
            "failovers": [loss_as_object(failover) for failover in done.failovers],
            **server_facts(done),
            "unspoken": done.unspoken,
            "unspoken_words": done.unspoken_words,
        },
        ensure_ascii=False,
    )


def server_facts(done: Done) -> dict[str, object]:
    """The facts that the server states about every answer, by their keys in the JSON object."""
    return {"drew": done.drew, "notes": list(done.notes)}


def cut_note(answer: Spoken, done: Done, option: str) -> Iterator[str]:
    """Yields a line if the limit of tokens cut the answer, or if the answer ended while the model was thinking. option: the option to type
    for a higher limit."""
    is_cut = done.finish_reason == "length"
    line = f"cut at {answer.tokens} tokens" if is_cut else ""
    if answer.thought and not answer.text:
        line = f"{line or 'ended'} while it was still thinking: there is no answer yet"
    if line:
        yield f"{line}; {option} N lets it say more" if is_cut else line


def remarks(done: Done) -> Iterator[str]:
    """Yields lines for people with the server's remarks."""
    yield from done.notes
    if unspoken := unspoken_text(done.usage):
        yield f"not spoken: {unspoken}"


def seed_told(done: Done) -> str | None:
    """The seed in words; None if it is not needed, because every other seed would have given the same answer."""
    return None if done.drew is False else f"seed {done.seed}"


def figures(done: Done) -> str:
    """All figures of an answer, in one line for people."""
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
        seed_told(done),
    ]
    return SEPARATOR.join(part for part in parts if part)


def brief_figures(done: Done) -> str:
    """The few figures that a conversation shows, in one line for people."""
    timing = done.timing
    parts = [
        None if timing.ttft_s is None else f"ttft {timing.ttft_s * 1000:.0f} ms",
        None if timing.ttfa_s is None else f"ttfa {timing.ttfa_s * 1000:.0f} ms",
        f"audio {timing.audio_s:.1f} s" if timing.audio_s else None,
        seed_told(done),
    ]
    return SEPARATOR.join(part for part in parts if part)


def tell(*lines: str) -> None:
    """Print lines for people at once: the end of a private stack, which comes next, takes a while."""
    notices = Notices()
    for line in lines:
        for part in fold_line(line, notices.width if notices.is_terminal else None):
            notices.say(f"[dim]{escape(part)}[/]")


def fold_line(line: str, columns: int | None) -> Iterator[str]:
    """Yield the lines into which a line of figures is broken for a terminal. It is broken between figures; a figure that is longer than a
    line is broken between words. columns: width of the terminal; None: no terminal, so the line stays whole."""
    row, *parts = line.split(SEPARATOR)
    for part in parts:
        if columns is not None and len(row) + len(SEPARATOR) + len(part) >= columns:
            yield from _break_line(row, columns)
            row = part
        else:
            row += SEPARATOR + part
    yield from _break_line(row, columns)


def _break_line(line: str, columns: int | None) -> Iterator[str]:
    """Break a line between words so that it fits into the columns."""
    if columns is None or cell_len(line) < columns:
        yield line
        return
    wrap = Wrap()
    yield from (wrap.add(line, columns) + wrap.finish(columns)).splitlines()


def _round_figure(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def sentence(failover: Failover, timing: Timing) -> str:
    """A sentence about a loss: which server was lost, how the answer went on, and what the listener noticed."""
    went_on = "it was back" if failover.replica == failover.lost else "another went on"
    return f"{failover.stage} lost at {failover.at_s:.2f} s, {went_on} after {pause(failover)}; {_effect_text(failover, timing)}"


def pause(failover: Failover) -> str:
    """The pause after a loss in words: 35 ms, or 1.24 s."""
    return f"{failover.pause_s * 1000:.0f} ms" if failover.pause_s < 1 else f"{failover.pause_s:.2f} s"


def loss_as_object(failover: Failover) -> dict[str, str | float]:
    """The loss of a server as a JSON object, for scripts."""
    return {
        "stage": failover.stage,
        "lost": failover.lost,
        "replica": failover.replica,
        "reason": failover.reason,
        "at_s": round(failover.at_s, 6),
        "pause_s": round(failover.pause_s, 6),
    }


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
