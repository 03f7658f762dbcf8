"""The default Talker: text in, feature rows out, a phrase at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.models.common.checkpoint import read_config
from omnistage.models.common.revision import computed, revision
from omnistage.models.common.weights import load_weights
from omnistage.models.common.worker import Worker
from omnistage.models.interface import (
    Activity,
    BadRequest,
    Content,
    FinishReason,
    Frames,
    Load,
    ModelInfo,
    Piece,
    PortSpec,
    SpeechRequest,
    TextPiece,
    Wanted,
)
from omnistage.models.options import LoadOptions
from omnistage.models.smol.g2p import Phonemizer
from omnistage.models.smol.phrase import Pause, Phrase, PhraseCutter
from omnistage.models.smol.prosody import FEATURE_WIDTH, FRAME_RATE_HZ, FeatureNet, Silence

Rows = NDArray[np.float32]

CODE_REVISION = "1"
"""To be raised whenever a change of the code changes the rows."""
VOICE = "heart"
FEATURES = "features"
MAX_SESSIONS = 64
SILENCE = {
    Pause.NONE: Silence(before=2, after=2),
    Pause.CLAUSE: Silence(before=2, after=4),
    Pause.SENTENCE: Silence(before=2, after=10),
    Pause.PARAGRAPH: Silence(before=2, after=16),
}
"""Rows of 25 ms. The net pads a phrase as if it stood alone; these are the rests of running speech."""
FIRST_PHRASE = Phrase("This is a zorbling, and that was the first of all the sentences that are spoken here.", Pause.SENTENCE)
"""Spoken to warm up, and for the revision; a word of it is in no lexicon, which loads the net for such words."""


class SmolTalker:
    """TalkerModel over the converted folder `talker`."""

    def __init__(self, net: FeatureNet, phonemizer: Phonemizer, info: ModelInfo, threads: int) -> None:
        self._net = net
        self._phonemizer = phonemizer
        self._info = info
        self._worker = Worker(info.name, threads)

    @classmethod
    def from_directory(cls, directory: Path, *, threads: int = 1, max_sessions: int = MAX_SESSIONS) -> SmolTalker:
        """Read config.json and model.safetensors. Raises BadCheckpoint if the folder is incomplete or another model's."""
        config = read_config(directory, "hibari-talker")
        net = FeatureNet(config.value("embeddings", int), config.value("heads", int))
        load_weights(net, directory)
        phonemizer = Phonemizer(config.table("symbols", int))
        spoken = computed(partial(_rows_of, net, phonemizer, FIRST_PHRASE, 1.0), threads)
        info = ModelInfo(
            name="hibari-talker",
            revision=revision(directory, CODE_REVISION, dtype="float32", device="cpu", threads=threads, results=(spoken,)),
            accepts=(PortSpec("text", Content.TEXT),),
            produces=(PortSpec(FEATURES, Content.TENSOR, rate_hz=FRAME_RATE_HZ, width=FEATURE_WIDTH),),
            max_sessions=max_sessions,
            voices=(VOICE,),
        )
        return cls(net, phonemizer, info, threads)

    @classmethod
    def loaded(cls, folder: Path | None, options: LoadOptions) -> SmolTalker:
        assert folder is not None
        return cls.from_directory(folder, threads=options.threads, max_sessions=options.max_sessions or MAX_SESSIONS)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def threads(self) -> Sequence[Activity]:
        return (self._worker.activity,)

    def load(self) -> Load:
        return Load(queued=self._worker.queued)

    async def prepare(self, request: SpeechRequest) -> SpeechRequest:
        """Raises BadRequest for a voice this model does not have. Every speed of the contract is possible."""
        if request.voice not in ("", VOICE):
            raise BadRequest("talker.voice", f"{request.voice!r} is not one of {', '.join(self._info.voices)}")
        return request

    async def speak(self, prepared: SpeechRequest, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Frames, None]:
        """See TalkerModel.speak. Only the text of the pieces counts, not how it is cut into them. Text without a word gives no rows."""
        request, first = prepared, wanted[FEATURES]
        made, rest, finish_reason = 0, np.empty((0, FEATURE_WIDTH), np.float32), FinishReason.STOP
        async for phrase in _phrases(inputs):
            rows = await self._worker.run(partial(self._rows, phrase, request.speed), urgent=made <= first)
            if request.max_frames and made + len(rows) > request.max_frames:
                rows, finish_reason = rows[: request.max_frames - made], FinishReason.LENGTH
            fresh = rows[max(first - made, 0) :]
            made += len(rows)
            if finish_reason is FinishReason.LENGTH:
                rest = fresh
                break
            if len(fresh):
                yield Frames(fresh)
        if made < first:
            raise BadRequest("resume.positions", f"the speech has {made} frames: it cannot go on at frame {first}")
        yield Frames(rest, finish_reason)

    def _rows(self, phrase: Phrase, speed: float) -> Rows:
        return _rows_of(self._net, self._phonemizer, phrase, speed)

    async def warm_up(self) -> None:
        """Speak a sentence on the thread that speaks."""
        await self._worker.run(partial(self._rows, FIRST_PHRASE, 1.0))

    async def close(self) -> None:
        """End the thread. No session is running."""
        await self._worker.close()


def _rows_of(net: FeatureNet, phonemizer: Phonemizer, phrase: Phrase, speed: float) -> Rows:
    silence = SILENCE[phrase.pause]
    parts = [net(torch.tensor(ids), speed, silence).numpy() for ids in phonemizer.ids(_with_full_stop(phrase))]
    return np.concatenate(parts) if parts else np.empty((0, FEATURE_WIDTH), np.float32)


async def _phrases(inputs: AsyncIterator[Piece]) -> AsyncIterator[Phrase]:
    cutter = PhraseCutter()
    async for piece in inputs:
        assert isinstance(piece.content, TextPiece)  # The only input port carries text.
        for phrase in cutter.feed(piece.content.text):
            yield phrase
    for phrase in cutter.flush():
        yield phrase


def _with_full_stop(phrase: Phrase) -> str:
    """A heading or list item without punctuation falls in pitch like a sentence."""
    if phrase.pause in (Pause.NONE, Pause.CLAUSE) or phrase.text[-1] in ".!?…:;,\"'”’)":
        return phrase.text
    return phrase.text + "."
