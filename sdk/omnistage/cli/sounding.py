"""Carries out one sound of a prompt: asks for it, plays it while it comes, writes it to a file, and prints its figures."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from omnistage.cli.connect import connect_client
from omnistage.cli.drawing_screen import DrawingScreen, drawing_screen_for
from omnistage.cli.interruptible import Interruptible
from omnistage.cli.layout import Layout
from omnistage.cli.listening import Listening, listening
from omnistage.cli.orders import HeardOrder
from omnistage.cli.output import OutputFile
from omnistage.cli.picture_name import new_name
from omnistage.cli.steps import follow, report
from omnistage.cli.targets import Need
from omnistage.cli.where import Where
from omnistage.cli.words import words
from omnistage.client.answer import write_sound
from omnistage.client.errors import RequestError
from omnistage.client.events import AudioChunk, Event
from omnistage.client.files import FORMATS, Samples, format_of
from omnistage.client.request import Options, for_drawing, time_limit_s

EXAMPLE = "rain on a tin roof"
"""Example of a prompt."""


@dataclass(frozen=True, slots=True)
class SoundOrder(HeardOrder):
    """An order for the sound that a prompt describes. prompt: its words; - (standard input) until `checked` reads it. out: None: the sound
    is heard, or written to a file named after the prompt."""

    prompt: str
    out: Path | None
    options: Options
    as_json: bool = False
    play: bool | None = None

    @property
    def need(self) -> Need:
        return Need(["text"], ["audio"], "diffusion")

    def checked(self) -> SoundOrder:
        order = replace(self, prompt=words(self.prompt, EXAMPLE))
        if self.out is not None and not self.is_sound_piped:
            with ExitStack() as tried:
                open_sound_file(self.out, tried)
            format_of(self.out).check()
        for_drawing(order.prompt, (), self.options).complete()
        return order


@dataclass(slots=True)
class SoundSoFar:
    """The chunks of a sound that have come so far."""

    chunks: list[AudioChunk] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(chunk.duration_s for chunk in self.chunks)


def open_sound_file(path: Path, files: ExitStack) -> OutputFile:
    """Open a file for sound until `files` ends. Raises RequestError."""
    return files.enter_context(OutputFile(path, "--out", {ending: form.name for ending, form in FORMATS.items()}))


async def make_sound(work: Interruptible, order: SoundOrder, target: Where, verbose: bool) -> None:
    """Ask for a sound, show the progress, play the sound or write it, print the figures; a private stack ends after that.

    The JSON object, or the sound, goes to stdout and everything else to stderr.
    """
    if isinstance(target.at, Layout) and "diffusion" not in target.at.kinds:
        raise RequestError(f"{target.at.names} makes no sound of a prompt", hint="Give another --pipeline, or `omnistage say` for a text.")
    with ExitStack() as files:
        # Opened before anything is started or asked, because a sound that cannot be written would be lost.
        hearing = await listening(order, files)
        path = None if order.is_sound_piped else order.out
        if path is None and hearing.is_lost and not order.as_json:
            path = files.enter_context(new_name(order.prompt, ".wav", [Path()]))
        file = None if path is None else open_sound_file(path, files)
        async with connect_client(target, time_limit_s(order.options), verbose, is_quiet=order.as_json) as omni:
            screen, sound = drawing_screen_for(order.as_json), SoundSoFar()
            events = omni.stream_sound(order.prompt, **target.options(order.options))
            steps, done = await follow(events, screen, lambda event: _take(event, sound, hearing, screen))
            work.complete()
            if file is not None:
                file.write(lambda place: _write(place, sound, file.path.suffix))
            rate_hz = sound.chunks[0].sample_rate_hz
            facts = {"path": None if path is None else str(path), "audio_s": round(sound.seconds, 6), "sample_rate_hz": rate_hz}
            figures = ["" if path is None else f"wrote {path}", f"audio {sound.seconds:.2f} s", f"e2e {done.timing.e2e_s:.2f} s"]
            report(facts, figures, steps, done, as_json=order.as_json)
            await hearing.finish(work)


def _take(event: Event, sound: SoundSoFar, hearing: Listening, screen: DrawingScreen) -> None:
    """Play and keep a piece of sound, and show how much there is."""
    if isinstance(event, AudioChunk):
        sound.chunks.append(event)
        hearing.write(event)
        screen.came(f"{sound.seconds:.1f} s of sound")


def _write(place: Path, sound: SoundSoFar, kind: str) -> None:
    """Write a sound to a file. kind: the ending that decides the format. If the format cannot have the model's rate, the sound gets the
    next higher rate that it can have, or its highest."""
    samples = np.concatenate([chunk.samples for chunk in sound.chunks])
    rate_hz, possible = sound.chunks[0].sample_rate_hz, format_of(kind).rates_hz
    if possible and rate_hz not in possible:
        new_hz = min((one for one in possible if one > rate_hz), default=max(possible))
        samples, rate_hz = resample(samples, rate_hz, new_hz), new_hz
    write_sound(place, samples, rate_hz, "pcm16", kind)


def resample(samples: Samples, rate_hz: int, new_hz: int) -> Samples:
    """The same sound at another rate, both in Hz. samples: [n] or [n, channels]; returns float32 of the same form. All frequencies that
    both rates can have stay unchanged."""
    padding = [(0, -len(samples) % rate_hz + rate_hz), *[(0, 0)] * (samples.ndim - 1)]
    padded = np.pad(samples.astype(np.float64), padding)  # To whole seconds, of which the last one is silent.
    count = len(padded) * new_hz // rate_hz
    waveform = np.fft.irfft(np.fft.rfft(padded, axis=0)[: count // 2 + 1], count, axis=0) * (count / len(padded))
    resampled: Samples = waveform[: round(len(samples) * new_hz / rate_hz)].astype(np.float32)
    return resampled
