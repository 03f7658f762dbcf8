"""A Thinker that sees and a Talker that starves, as a family on the real engine that a test can serve: those of arithmetic_models.py, with
a Talker that takes the rows of the prompt too. `Reply` and `speech` work out by hand what these models say."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from helpers.arithmetic import GIVEN, IDS, SPEC, START, TAPS, CountingDecoder, CountingHead, answer, prompt_items
from helpers.arithmetic_models import SESSIONS, ArithmeticThinker, OnEngine
from omnistage.engine.adapter import Attention, Hidden, StepRows
from omnistage.engine.engine import Engine
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.models.family import Family, ModelEntry
from omnistage.models.interface import Array, BadRequest, Content, FinishReason, Frames, ModelInfo, Piece, PortSpec, SpeechRequest, Wanted
from omnistage.models.options import LoadOptions, with_resumed
from omnistage.models.requests import refuse_unfit
from omnistage.models.speech.talker import PortFeed, next_rows
from omnistage.models.toy import formulas
from omnistage.models.toy.omni import OmniOptions

OPTIONS = "omnistage.models.toy.omni:OmniOptions"

FAMILY = Family(
    models={
        "thinker": ModelEntry("helpers.engine_family:load_thinker", options=OPTIONS),
        "talker": ModelEntry("helpers.engine_family:load_talker", options=OPTIONS),
        "code2wav": ModelEntry("omnistage.models.toy.omni:load_code2wav", options=OPTIONS),
    },
    needs=("torch",),
)

PROMPT = PortSpec("prompt", Content.TENSOR, width=TAPS)
HIDDEN = PortSpec("hidden", Content.TENSOR, width=TAPS)
PAGES = 400
VOICES = ("low", "high")
TAIL = 5
"""Frames after the frame that the last reply row was for."""


@dataclass(frozen=True)
class Reply:
    """The text that the Thinker says to a prompt, and all rows that it gives."""

    text: str
    prompt: NDArray[np.float32]
    hidden: NDArray[np.float32]

    @classmethod
    def to(cls, seen: Sequence[formulas.Seen], seed: int, most: int) -> Reply:
        places, given, first = formulas.items(seen), [], 0
        for one in seen:
            last = first + len(formulas.items([one]))
            if isinstance(one, np.ndarray):
                values = places[first:last, 0]
                given.append(Given(first, torch.from_numpy(np.stack([values % 20, values // 20 % 20], axis=1)).float()))
            first = last
        items = prompt_items((places[:, 0] % IDS).tolist())
        prompt = Prompt(items, tuple(given), places[:, 1:].T, delta=formulas.next_place(places) - len(places))
        frames, taps = answer(prompt, seed, most + 1)
        rows = np.array(taps, np.float32)
        text = "".join(f"{first * IDS + second} " for first, second in frames[:most])
        return cls(text, rows[: len(prompt)], rows[len(prompt) :])


def speech(prompt_rows: Array, rows: Array, *, voice: int = 0) -> NDArray[np.uint32]:
    """All frames of a speech, [1 + rows + TAIL, 2]: the first one follows from the prompt alone."""
    frames, _ = answer(_spoken_prompt(prompt_rows, voice), 0, 1 + len(rows) + TAIL, rows.tolist() or [[0.0] * GIVEN])
    return np.array(frames, np.uint32)


def _spoken_prompt(rows: Array, voice: int, scope: str = "") -> Prompt:
    vectors = np.array(rows, np.float32)  # A copy: what came in is overwritten by what comes next.
    items = np.concatenate([[[voice, START]], np.zeros((len(vectors), 2), np.int64)])
    given = (Given(1, torch.from_numpy(vectors), hashlib.sha256(vectors.tobytes()).digest()),) if len(vectors) else ()
    return Prompt(items, given, scope=scope.encode())


class _SlowDecoder(CountingDecoder):
    """Takes interval_s for a step, as one with weights would."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        time.sleep(self._interval_s)
        return super().hidden(rows, attention)


def _engine(options: LoadOptions) -> Engine:
    decoder = _SlowDecoder(OmniOptions.from_settings(dict(options.family)).interval_s)
    limits = SchedulerLimits(max_sequences=SESSIONS, max_waiting=with_resumed(SESSIONS))
    return Engine(decoder, CountingHead(), pages=PAGES, limits=limits, poison=True)


def load_thinker(folder: Path | None, options: LoadOptions) -> ArithmeticThinker:
    return ArithmeticThinker(_engine(options))


class StarvingTalker(OnEngine):
    def __init__(self, own: Engine | None = None) -> None:
        rate = formulas.SAMPLE_RATE_HZ / formulas.SAMPLES_PER_FRAME
        codes = PortSpec("codes", Content.CODES, rate_hz=rate, width=SPEC.codebooks, compact=True)
        super().__init__(ModelInfo("engine-talker", "1", (PROMPT, HIDDEN), (codes,), SESSIONS, voices=VOICES), own)

    async def prepare(self, request: SpeechRequest) -> SpeechRequest:
        if request.voice not in ("", *VOICES):
            raise BadRequest("talker.voice", f"no voice {request.voice!r}; there are {', '.join(VOICES)}")
        known = 0 if request.history is None else len(request.history)
        if request.max_frames and known >= request.max_frames:
            raise BadRequest("resume.history", f"{known} frames are there and talker.max_frames is {request.max_frames}")
        with refuse_unfit("talker"):
            self.engine.check(self._asked(request, _spoken_prompt(np.empty((0, TAPS)), 0)))
        return request

    async def speak(self, prepared: SpeechRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Frames, None]:
        """The engine starves it until the next row comes; it ends TAIL frames after the frame of the last one."""
        history = np.empty((0, SPEC.codebooks), np.uint32) if prepared.history is None else prepared.history
        prompt, early, ended = await _prompt_and_early(inputs)
        voice = VOICES.index(prepared.voice or VOICES[0])
        with refuse_unfit("talker"):
            asked = self._asked(prepared, _spoken_prompt(prompt, voice, prepared.scope))
        async with aclosing(self.engine.submit(asked)) as stream:
            feed = PortFeed(stream, inputs, HIDDEN.name)
            feed.give(torch.from_numpy(early), last=ended)
            made = len(history)
            async with feed.feeding():
                while True:
                    events = await feed.take()
                    items = [event.item for event in events if event.item is not None]
                    whole = feed.rows + 1 + TAIL if feed.has_ended else 1 << 30
                    if made > whole:
                        raise BadRequest("resume.history", f"the speech has {whole} frames, fewer than the {made} that are there")
                    items = items[: whole - made]
                    made += len(items)
                    reason = FinishReason.STOP if made == whole else events[-1].finish_reason if events else None
                    if items or reason is not None:
                        yield Frames(np.array(items, np.uint32).reshape(-1, SPEC.codebooks), reason)
                    if reason is not None:
                        return

    def _asked(self, request: SpeechRequest, prompt: Prompt) -> SequenceRequest:
        room = SPEC.context - len(prompt) + 1
        return SequenceRequest(
            prompt,
            seed=0,
            max_items=min(request.max_frames or room, room),
            sampling=request.sampling,
            history=request.history_items,
            appended=True,
            client=request.client,
        )


async def _prompt_and_early(inputs: AsyncIterator[Piece]) -> tuple[NDArray[np.float32], NDArray[np.float32], bool]:
    """All prompt rows, the reply rows that came before their end, and whether these are all."""
    parts: dict[str, list[NDArray[np.float32]]] = {PROMPT.name: [], HIDDEN.name: []}
    last = {PROMPT.name: False, HIDDEN.name: False}
    while not last[PROMPT.name]:
        piece = await next_rows(inputs)
        parts[piece.port].append(np.array(piece.content, np.float32))
        last[piece.port] = piece.last
    empty = np.empty((0, TAPS), np.float32)
    return np.concatenate([empty, *parts[PROMPT.name]]), np.concatenate([empty, *parts[HIDDEN.name]]), last[HIDDEN.name]


def load_talker(folder: Path | None, options: LoadOptions) -> StarvingTalker:
    return StarvingTalker(_engine(options))
