"""One spoken answer on the terminal: text as it comes, a line that shows the sound, and the figures."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from omnistage.cli.connect import connected
from omnistage.cli.layout import Layout
from omnistage.cli.rescue import sentence
from omnistage.cli.timeline import draw
from omnistage.client.async_omni import DEFAULT_TIMEOUT_S
from omnistage.client.errors import BadRequestError, ProtocolError
from omnistage.client.events import AudioChunk, Done, Event, Failover, TextDelta
from omnistage.client.request import Options
from omnistage.client.wav import write_wav


@dataclass(frozen=True, slots=True)
class Wish:
    """What was typed. verbatim: speak the text instead of answering it. out, timeline: files to write."""

    text: str
    verbatim: bool
    out: Path | None
    timeline: Path | None
    as_json: bool
    options: Options


async def speak(wish: Wish, target: str | Layout, verbose: bool) -> None:
    """Ask, show the answer while it comes, write the files, print the figures."""
    console = Console(highlight=False, soft_wrap=True)
    for path in (wish.out, wish.timeline):
        if path is not None and not path.parent.is_dir():
            raise BadRequestError.of(str(path), "its folder does not exist")
    async with connected(target, wish.options.get("timeout_s", DEFAULT_TIMEOUT_S), verbose) as omni:
        events = omni.stream_say(wish.text, **wish.options) if wish.verbatim else omni.stream(wish.text, **wish.options)
        spoken, done = await follow(events, screen_for(wish.as_json), keep_sound=wish.out is not None)
    files = []
    if wish.out is not None and save(spoken, wish.out):
        files.append(str(wish.out))
    if wish.timeline is not None:
        draw(wish.timeline, done, spoken.text or wish.text)
        files.append(str(wish.timeline))
    if wish.as_json:
        print(as_json(spoken, done))
        return
    for failover in done.failovers:
        console.print(sentence(failover, done.timing), style="dim", markup=False)
    console.print(figures(done), style="dim", markup=False)
    if files:
        console.print(f"wrote {', '.join(files)}", style="dim", markup=False)


@dataclass(slots=True)
class Spoken:
    """What has come so far. sounds is filled only if a file is wanted."""

    text: str = ""
    audio_s: float = 0.0
    sounds: list[AudioChunk] = field(default_factory=list)


class Screen(Protocol):
    """Where an answer is shown while it comes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def show(self, spoken: Spoken, new_text: str) -> None: ...


class Quiet:
    """Shows nothing: for --json."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def show(self, spoken: Spoken, new_text: str) -> None:
        return None


class Plain(Quiet):
    """Text and nothing else, each piece at once: for pipes and files."""

    def __init__(self) -> None:
        self._written = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._written:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def show(self, spoken: Spoken, new_text: str) -> None:
        self._written = True
        sys.stdout.write(new_text)
        sys.stdout.flush()


class Lively:
    """For a terminal: the text grows, and below it a line tells how much sound there is."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def show(self, spoken: Spoken, new_text: str) -> None:
        self._live.update(Group(Text(spoken.text), speaking_line(spoken)), refresh=True)

    def settle(self, spoken: Spoken) -> None:
        """Leave only the text."""
        self._live.update(Text(spoken.text), refresh=True)


def speaking_line(spoken: Spoken) -> Text:
    """Four notes a second of sound, the last twelve of them."""
    if not spoken.audio_s:
        return Text("thinking", style="dim")
    notes = "".join("▂▄▆█▆▄"[i % 6] for i in range(int(spoken.audio_s * 4)))[-12:]
    return Text.assemble(("speaking ", "dim"), (f"{notes:>12}", "cyan"), (f" {spoken.audio_s:.1f} s", "dim"))


def screen_for(as_json: bool) -> Screen:
    """The screen that fits where stdout goes."""
    if as_json:
        return Quiet()
    # A console of its own: one with soft_wrap would cut the answer at the first line.
    console = Console(highlight=False)
    return Lively(console) if console.is_terminal else Plain()


async def follow(events: AsyncGenerator[Event, None], screen: Screen, keep_sound: bool) -> tuple[Spoken, Done]:
    """Show an answer while it comes."""
    spoken = Spoken()
    async with aclosing(events):
        with screen:
            async for event in events:
                match event:
                    case TextDelta():
                        spoken.text += event.text
                        screen.show(spoken, event.text)
                    case AudioChunk():
                        spoken.audio_s += event.duration_s
                        if keep_sound:
                            spoken.sounds.append(event)
                        screen.show(spoken, "")
                    case Done():
                        if isinstance(screen, Lively):
                            screen.settle(spoken)
                        return spoken, event
    raise ProtocolError("the stream ended without its account")


def save(spoken: Spoken, path: Path) -> bool:
    """Write the sound to a WAV file; False if there was none."""
    if not spoken.sounds:
        return False
    write_wav(path, np.concatenate([sound.samples for sound in spoken.sounds]), spoken.sounds[0].sample_rate_hz)
    return True


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
            "model": done.model,
            "failovers": [_failover(failover) for failover in done.failovers],
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
        None if timing.is_continuous else f"gaps {timing.underrun_s:.2f} s",
        f"e2e {timing.e2e_s:.2f} s",
        f"model {done.model}",
        f"seed {done.seed}",
    ]
    return " · ".join(part for part in parts if part)


def _failover(failover: Failover) -> dict[str, str | float]:
    return {
        "stage": failover.stage,
        "lost": failover.lost,
        "replica": failover.replica,
        "reason": failover.reason,
        "at_s": round(failover.at_s, 6),
        "pause_s": round(failover.pause_s, 6),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
