"""The default Code2Wav: feature rows go in, 24 kHz sound comes out, in chunks that grow.

A chunk ends at the end of a phrase or where the schedule says. The schedule depends only on the frame index, so the samples do not depend
on how the rows arrive.

Phrases do not touch each other, so a session that goes on begins with the phrase of its first sample. There the phase of the pulses is
computed from the beginning of the phrase, the net only from a little before the sample, because its state after a chunk depends only on the
end of that chunk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.models.checkpoint.files import read_config
from omnistage.models.checkpoint.revision import compute_on_thread, revision
from omnistage.models.checkpoint.weights import load_weights
from omnistage.models.devices import hardware
from omnistage.models.interface import (
    USUAL_PROFILE,
    Activity,
    Array,
    BadRequest,
    Content,
    Load,
    ModelInfo,
    Piece,
    PortSpec,
    Profile,
    Sound,
    Wanted,
    WaveRequest,
)
from omnistage.models.options import LoadOptions
from omnistage.models.smol import waveform
from omnistage.models.smol.prosody import COUNT, ENERGY, F0, FEATURE_WIDTH, FRAME_RATE_HZ, INDEX, TEXT_WIDTH
from omnistage.models.smol.waveform import SAMPLE_RATE_HZ, OverlapAdd, PulseTrain, SpectrumNet, SpectrumStream
from omnistage.models.speech.pace import computing_s, speakers_text
from omnistage.models.worker import Worker

Samples = NDArray[np.float32]

CODE_REVISION = "2"
"""Raise it with every change of the code that changes the samples."""
NOISE_SEED = 0
"""The seed of all speech: nobody can hear whether two noises differ, so another seed would change nothing that is heard."""
SAMPLES_PER_ROW = SAMPLE_RATE_HZ // FRAME_RATE_HZ
FRAMES_PER_ROW = SAMPLES_PER_ROW // waveform.HOP
LOOKAHEAD_ROWS = -(-(waveform.NET_LOOKAHEAD + waveform.OVERLAP_LOOKAHEAD) // FRAMES_PER_ROW)
"""How many rows after a row its samples depend on: 15 (0.375 s of speech), or fewer at the end of a phrase."""
CONTEXT_ROWS = -(-(waveform.NET_LOOKAHEAD + waveform.OVERLAP_LOOKBEHIND) // FRAMES_PER_ROW)
"""How many rows before a row its samples depend on, apart from the phase of the pulses: 14, or fewer at the beginning of a phrase."""
MAX_PHRASE_ROWS = 4096
WARM_UP_ROWS = 150
"""Rows of the phrase that is decoded to warm up: 3.75 s of speech."""
_FADE = torch.sin(torch.arange(1, 121) / 121 * math.pi / 2) ** 2
"""Factors for the first 5 ms of a phrase and, reversed, the last 5 ms: a sound that began or ended at once would click."""
SCHEDULES: Mapping[str, tuple[int, ...]] = {
    Profile.LATENCY: (4, 8, 16, 32),
    Profile.BALANCED: (8, 16, 32),
    Profile.QUALITY: (16, 32, 64),
    Profile.OFFLINE: (128,),
}
"""By profile: how many rows the first chunk of a session has, the second and so on; later chunks have the last number. 8 rows are 0.2 s."""


def chunk_rows(schedule: tuple[int, ...], first: int, remaining: int) -> int:
    """The number of rows of the chunk that begins at row `first` of a session, `remaining` rows before the end of its phrase. A tail
    shorter than half a chunk joins the chunk before it."""
    reached = 0
    size = schedule[-1]
    for candidate in schedule:
        reached += candidate
        if first < reached:
            size = candidate
            break
    return remaining if 2 * remaining < 3 * size else size  # A tail of `remaining - size` rows would be shorter than half a chunk.


class _Phrase:
    """Turns the rows of one phrase into samples. seed: seed of the noise. first_row: index of its first row in the session. rows: number of
    its rows. first_needed_row: the first row of the phrase whose samples are needed. Samples of earlier rows may be wrong; with
    first_needed_row >= rows, the rows are only counted, and nothing is computed."""

    def __init__(self, net: SpectrumNet, seed: int, first_row: int, rows: int, first_needed_row: int) -> None:
        self.first_row = first_row
        self.rows = rows
        self._first_needed_row = first_needed_row
        self.received = 0  # Rows that have come.
        self.returned = 0  # Rows whose samples were returned.
        self._waiting: deque[Samples] = deque()
        self._pushed = 0  # Rows that the net has got. Their samples are made, but for the last LOOKAHEAD_ROWS.
        self._has_end = False  # Whether the net has got the end of the phrase.
        self._seed = seed
        self._next_frame = first_row * FRAMES_PER_ROW  # Index, in the session, of the frame of the next spectrum.
        self._device = net.head.weight.device
        self._spectra = SpectrumStream(net)
        self._train = PulseTrain()
        self._pulses = torch.zeros(0, waveform.BINS, dtype=torch.complex64)  # Pulses of frames whose spectra are not made yet.
        self._overlap = OverlapAdd()
        self._samples = torch.zeros(0)  # Made and not yet returned.

    @property
    def skipped(self) -> bool:
        """Whether none of its samples are wanted."""
        return self._first_needed_row >= self.rows

    def receive(self, rows: Samples) -> None:
        if not self.skipped:
            self._waiting.append(rows)
        self.received += len(rows)

    def needs(self, rows: int) -> int:
        """How many rows of the phrase must have come before the next `rows` can be turned into samples."""
        return min(self.returned + rows + LOOKAHEAD_ROWS, self.rows)

    def take(self, rows: int) -> Samples:
        """Return the samples of the next `rows` rows, SAMPLES_PER_ROW each, faded at both ends of the phrase. See `needs`."""
        needed_rows = self.needs(rows)
        last = needed_rows == self.rows
        # If a phrase is broken off, its last row may have been pushed before: then an empty push ends the phrase.
        if needed_rows > self._pushed or (last and not self._has_end):
            self._push(self._next_rows(needed_rows - self._pushed), last)
            self._has_end = last
        sample_count = rows * SAMPLES_PER_ROW
        out, self._samples = self._samples[:sample_count].clamp(-1, 1), self._samples[sample_count:]
        if self.returned == 0:
            out[: len(_FADE)] *= _FADE
        self.returned += rows
        if self.returned == self.rows:
            out[-len(_FADE) :] *= _FADE.flip(0)
        return out.numpy()

    def _next_rows(self, count: int) -> Samples:
        """Take the next `count` rows of those that wait."""
        rows = np.concatenate(self._waiting)
        self._waiting = deque([rows[count:]])
        self._pushed += count
        return rows[:count]

    def _push(self, rows: Samples, last: bool) -> None:
        """Compute with the next rows and append the samples that are complete. last: the phrase ends with these rows."""
        f0 = rows[:, F0].reshape(-1)
        pulses = torch.cat([self._pulses, self._train.push(f0, last)])
        if not last and self._first_needed_row >= self._pushed + CONTEXT_ROWS:
            # The wanted samples depend on these rows only by the phase of the pulses, so the net skips them.
            count = self._spectra.skip(len(f0))
            spectra = torch.zeros(count, waveform.BINS, dtype=torch.complex64)
        else:
            maps = self._spectra.push(torch.from_numpy(self._frames(rows)).to(self._device), last).cpu()
            count = maps.shape[0]
            spectra = waveform.mix(maps, pulses[:count], waveform.noise(self._seed, self._next_frame, count))
        self._pulses = pulses[count:]
        self._next_frame += count
        self._samples = torch.cat([self._samples, self._overlap.push(spectra, last)])

    @staticmethod
    def _frames(rows: Samples) -> Samples:
        """The rows as frames for the net, [len(rows) * FRAMES_PER_ROW, waveform.IN_WIDTH]."""
        text = np.repeat(rows[:, :TEXT_WIDTH], FRAMES_PER_ROW, axis=0)
        f0, energy = rows[:, F0].reshape(-1, 1), rows[:, ENERGY].reshape(-1, 1)
        pitch = np.log(np.maximum(f0, 0) + 1) / np.float32(5)
        return np.concatenate([text, pitch, energy / np.float32(5)], axis=1)


@dataclass(slots=True)
class WaveSession:
    """Turns the rows of one session into chunks of samples, without a thread: the caller calls `step` while `ready()` is true. schedule: a
    value of SCHEDULES. first_sample: the first wanted sample; earlier samples are computed only if the rest depends on them."""

    net: SpectrumNet
    seed: int
    schedule: tuple[int, ...]
    first_sample: int = 0
    _phrases: deque[_Phrase] = field(default_factory=deque)
    _has_begun: bool = False  # Whether a row of the first whole phrase has come.
    _received: int = 0  # Index, in the session, of the next row to come.
    _returned: int = 0  # Index, in the session, of the first row whose samples were not returned.
    _silent: bool = True

    @property
    def silent(self) -> bool:
        """Whether no samples have been returned yet."""
        return self._silent

    def feed(self, first: int, rows: Array) -> None:
        """Copy the next rows, [n, FEATURE_WIDTH] float32. first: session index of the first. Raises BadRequest for impossible rows."""
        copy = np.array(rows, np.float32)
        if not np.isfinite(copy).all():
            raise BadRequest("features", "holds NaN or infinity: send the rows of the Talker of this model unchanged")
        if not self._has_begun:
            copy = self._begin(first, copy)
        while len(copy):
            if not self._phrases or self._phrases[-1].received == self._phrases[-1].rows:
                self._begin_phrase(float(copy[0, COUNT]))
            phrase = self._phrases[-1]
            part, copy = np.split(copy, [phrase.rows - phrase.received])
            places = np.arange(phrase.received, phrase.received + len(part))
            if (part[:, INDEX] != places).any() or (part[:, COUNT] != phrase.rows).any():
                raise BadRequest("features", f"rows of a phrase of {phrase.rows} are missing or out of order near row {places[0]}")
            phrase.receive(part)
            self._received += len(part)
            if phrase.skipped and phrase.received == phrase.rows:
                self._phrases.popleft()
                self._returned += phrase.rows

    def _begin(self, first: int, rows: Samples) -> Samples:
        """Return the session's first rows without rows before the first whole phrase: a resumed session may get the end of a phrase that
        it does not need. first: index of the first row. Raises BadRequest if a row that the first sample needs is missing."""
        phrase_begins = [0] if first == 0 else np.flatnonzero(rows[:, INDEX] == 0).tolist()
        dropped = phrase_begins[0] if phrase_begins else len(rows)
        self._has_begun = bool(phrase_begins)
        self._received = self._returned = first + dropped
        if self._returned * SAMPLES_PER_ROW > self.first_sample:
            rows_text = f"rows from the beginning of the phrase of sample {self.first_sample}"
            raise BadRequest("features", f"{rows_text} are needed, the first phrase after row {first} begins too late")
        return rows[dropped:]

    def end(self) -> None:
        """No more rows come. A phrase that was broken off ends where its rows end. Raises BadRequest if that is before `first_sample`."""
        samples = self._received * SAMPLES_PER_ROW
        if samples < self.first_sample:
            raise BadRequest("resume.positions", f"the sound has {samples} samples: it cannot go on at sample {self.first_sample}")
        if self._phrases:
            self._phrases[-1].rows = self._phrases[-1].received

    def ready(self) -> bool:
        """Whether all rows that the next chunk depends on have come."""
        if not self._phrases or self._phrases[0].skipped:
            return False
        return self._phrases[0].received >= self._phrases[0].needs(self._next_chunk())

    def step(self) -> Sound:
        """The next chunk, float32 [samples, 1], without the samples before `first_sample`; it may be empty."""
        phrase, rows = self._phrases[0], self._next_chunk()
        skipped = max(self.first_sample - self._returned * SAMPLES_PER_ROW, 0)
        samples = phrase.take(rows)[skipped:, None]
        self._returned += rows
        needed_row = phrase.first_row  # A session that goes on after this chunk begins with it.
        if phrase.returned == phrase.rows:
            self._phrases.popleft()
            needed_row = self._returned
        self._silent = self._silent and not len(samples)
        return Sound(samples, needed_row)

    def _next_chunk(self) -> int:
        phrase = self._phrases[0]
        return chunk_rows(self.schedule, self._returned, phrase.rows - phrase.returned)

    def _begin_phrase(self, count: float) -> None:
        """Begin a phrase of `count` rows with the next row. Raises BadRequest for an impossible number."""
        if not (1 <= count <= MAX_PHRASE_ROWS and count.is_integer()):
            raise BadRequest("features", f"a phrase of {count} rows; 1 to {MAX_PHRASE_ROWS} are possible")
        first_needed_row = self.first_sample // SAMPLES_PER_ROW - self._received
        self._phrases.append(_Phrase(self.net, self.seed, self._received, int(count), first_needed_row))


def _fixed_sounds(net: SpectrumNet, profile: str) -> Iterator[Samples]:
    """Yield the sound of a fixed random phrase, chunk by chunk; it is so long that chunks of all sizes of the schedule occur."""
    rows = np.random.Generator(np.random.PCG64(0)).standard_normal((WARM_UP_ROWS, FEATURE_WIDTH), np.float32)
    rows[:, F0], rows[:, ENERGY] = 120 + 10 * rows[:, F0], np.abs(rows[:, ENERGY])
    rows[:, INDEX], rows[:, COUNT] = np.arange(WARM_UP_ROWS), WARM_UP_ROWS
    session = WaveSession(net, 0, SCHEDULES[profile])
    session.feed(0, rows)
    while session.ready():
        yield session.step().samples


class SmolCode2Wav:
    """The default Code2Wav, a `Code2WavModel`. Build it with `load_code2wav`. threads: number of torch threads of its computing thread."""

    def __init__(self, net: SpectrumNet, info: ModelInfo, threads: int) -> None:
        self._net = net
        self.info = info
        self._worker = Worker(info.name, threads)
        self.threads: Sequence[Activity] = (self._worker.activity,)

    def load(self) -> Load:
        return Load(queued=self._worker.queued)

    async def prepare(self, request: WaveRequest) -> WaveRequest:
        """Accept every request: there is a schedule for each profile."""
        return request

    def first_frame(self, prepared: WaveRequest, sample: int) -> int:
        """Always 0, because only the rows show where the phrase of a sample begins. A caller that has the sound reads `Sound.needs`."""
        return 0

    async def decode(self, prepared: WaveRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        """See Code2WavModel.decode. If no rows come, there is no chunk. Raises BadRequest for malformed rows."""
        session = WaveSession(self._net, NOISE_SEED, SCHEDULES[prepared.profile], ports["audio"])
        async for piece in inputs:
            assert isinstance(piece.content, np.ndarray)  # The only input port carries rows.
            session.feed(piece.first, piece.content)
            async for sound in self._sounds(session):
                yield sound
        session.end()
        async for sound in self._sounds(session):
            yield sound

    async def _sounds(self, session: WaveSession) -> AsyncIterator[Sound]:
        """Yield the chunks whose rows have come."""
        while session.ready():
            sound = await self._worker.run(session.step, urgent=session.silent)
            if len(sound.samples):
                yield sound

    async def warm_up(self) -> None:
        """Decode a few seconds on the worker's thread, then once more to measure how many sessions it can serve in real time."""
        await self._worker.run(lambda: list(_fixed_sounds(self._net, USUAL_PROFILE)))
        speakers = await self._worker.run(self._speakers)
        self.info = replace(self.info, settings={**self.info.settings, "real_time_speakers": speakers_text(speakers)})

    def _speakers(self) -> float:
        """Measure how many seconds of sound a second of computing makes."""
        device = self._net.head.weight.device.type
        begin_s = computing_s(None, device)
        samples = sum(map(len, _fixed_sounds(self._net, USUAL_PROFILE)))
        return samples / SAMPLE_RATE_HZ / (computing_s(None, device) - begin_s)

    async def close(self) -> None:
        """End the thread. No session may be running."""
        await self._worker.close()


def load_code2wav(folder: Path, options: LoadOptions | None = None) -> SmolCode2Wav:
    """Load from a folder `code2wav` that `convert_voice` wrote. Raises BadCheckpoint if it is incomplete or of another model."""
    options = options or LoadOptions()
    read_config(folder, "hibari-code2wav")
    net = SpectrumNet()
    load_weights(net, folder)
    net.to(options.device)
    results = compute_on_thread(lambda: [sound for profile in SCHEDULES for sound in _fixed_sounds(net, profile)], options.threads)
    info = ModelInfo(
        name="hibari-code2wav",
        revision=revision(
            folder, CODE_REVISION, dtype="float32", device=hardware(options.device), threads=options.threads, results=results
        ),
        accepts=(PortSpec("features", Content.TENSOR, rate_hz=FRAME_RATE_HZ, width=FEATURE_WIDTH, window=True),),
        produces=(PortSpec("audio", Content.AUDIO, rate_hz=SAMPLE_RATE_HZ, width=1),),
        max_sessions=options.sessions,
        draws=False,
    )
    return SmolCode2Wav(net, info, options.threads)
