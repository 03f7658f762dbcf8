"""The default Talker: text in, feature rows out, a phrase at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.activity import Activity
from omnistage.engine.types import FinishReason
from omnistage.models.interface import BadRequest, Content, Frames, Load, ModelInfo, PortSpec, SpeechRequest, TextPiece
from omnistage.models.smol.checkpoint import read_config
from omnistage.models.smol.g2p import Phonemizer
from omnistage.models.smol.phrase import Pause, Phrase, PhraseCutter
from omnistage.models.smol.prosody import FEATURE_WIDTH, FRAME_RATE_HZ, FeatureNet, Silence
from omnistage.models.smol.weights import load_weights
from omnistage.models.smol.worker import Worker

Rows = NDArray[np.float32]

CODE_REVISION = "1"
"""To be raised whenever a change of the code changes the rows."""
VOICE = "heart"
SILENCE = {
    Pause.NONE: Silence(before=2, after=2),
    Pause.CLAUSE: Silence(before=2, after=4),
    Pause.SENTENCE: Silence(before=2, after=10),
    Pause.PARAGRAPH: Silence(before=2, after=16),
}
"""Rows of 25 ms. The net pads a phrase as if it stood alone; these are the rests of running speech."""
UNKNOWN_WORD = "zorbling"


class SmolTalker:
    """TalkerModel over the converted folder `talker`."""

    def __init__(self, net: FeatureNet, phonemizer: Phonemizer, info: ModelInfo, threads: int) -> None:
        self._net = net
        self._phonemizer = phonemizer
        self._info = info
        self._worker = Worker(info.name, threads)

    @classmethod
    def from_directory(cls, directory: Path, *, threads: int = 1, max_sessions: int = 64) -> SmolTalker:
        """Read config.json and model.safetensors. Raises BadCheckpoint if the folder is incomplete or another model's."""
        config = read_config(directory, "hibari-talker")
        net = FeatureNet(config["embeddings"], config["heads"])
        load_weights(net, directory)
        info = ModelInfo(
            name="hibari-talker",
            revision=f"{config['source_sha256'][:12]}-{CODE_REVISION}",
            accepts=(PortSpec("text", Content.TEXT),),
            produces=(PortSpec("features", Content.TENSOR, rate_hz=FRAME_RATE_HZ, width=FEATURE_WIDTH),),
            max_sessions=max_sessions,
            voices=(VOICE,),
        )
        return cls(net, Phonemizer(config["symbols"]), info, threads)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def threads(self) -> Sequence[Activity]:
        return (self._worker.activity,)

    def load(self) -> Load:
        return Load(queued=self._worker.queued)

    def check(self, request: SpeechRequest) -> None:
        """Raise BadRequest for a voice, speed or limit this model does not have."""
        if request.voice not in ("", VOICE):
            raise BadRequest("talker.voice", f"{request.voice!r} is not one of {', '.join(self._info.voices)}")
        if not 0.5 <= request.speed <= 2:
            raise BadRequest("talker.speed", f"{request.speed} is outside 0.5 to 2")
        if request.max_frames < 0:
            raise BadRequest("talker.max_frames", f"{request.max_frames} is negative; 0 is no limit")

    async def speak(self, request: SpeechRequest, inputs: AsyncIterator[TextPiece | NDArray[np.float32]]) -> AsyncGenerator[Frames, None]:
        """See TalkerModel.speak. Only the text of the pieces counts, not how it is cut into them. Text without a word gives no rows.

        Raises BadRequest for what `check` refuses and for an input that is not text.
        """
        self.check(request)
        made, rest, finish_reason = 0, np.empty((0, FEATURE_WIDTH), np.float32), FinishReason.STOP
        async for phrase in _phrases(inputs):
            rows = await self._worker.run(partial(self._rows, phrase, request.speed), urgent=made <= request.first)
            if request.max_frames and made + len(rows) > request.max_frames:
                rows, finish_reason = rows[: request.max_frames - made], FinishReason.LENGTH
            fresh = rows[max(request.first - made, 0) :]
            made += len(rows)
            if finish_reason is FinishReason.LENGTH:
                rest = fresh
                break
            if len(fresh):
                yield Frames(fresh)
        if made < request.first:
            raise BadRequest("resume.positions", f"the speech has {made} frames: it cannot go on at frame {request.first}")
        yield Frames(rest, finish_reason)

    def _rows(self, phrase: Phrase, speed: float) -> Rows:
        silence = SILENCE[phrase.pause]
        parts = [self._net(torch.tensor(ids), speed, silence).numpy() for ids in self._phonemizer.ids(_with_full_stop(phrase))]
        return np.concatenate(parts) if parts else np.empty((0, FEATURE_WIDTH), np.float32)

    async def warm_up(self) -> None:
        """Speak a sentence with a word that is in no lexicon, which loads the net for such words."""
        await self._worker.run(partial(self._rows, Phrase(f"This is a {UNKNOWN_WORD}.", Pause.SENTENCE), 1.0))

    async def close(self) -> None:
        """End the thread. No session is running."""
        await self._worker.close()


async def _phrases(inputs: AsyncIterator[TextPiece | NDArray[np.float32]]) -> AsyncIterator[Phrase]:
    cutter = PhraseCutter()
    async for piece in inputs:
        if not isinstance(piece, TextPiece):
            raise BadRequest("text", "this Talker takes text, not hidden rows")
        for phrase in cutter.feed(piece.text):
            yield phrase
    for phrase in cutter.flush():
        yield phrase


def _with_full_stop(phrase: Phrase) -> str:
    """A heading or list item without punctuation falls in pitch like a sentence."""
    if phrase.pause in (Pause.NONE, Pause.CLAUSE) or phrase.text[-1] in ".!?…:;,\"'”’)":
        return phrase.text
    return phrase.text + "."
