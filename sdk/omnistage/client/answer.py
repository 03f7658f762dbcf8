"""A whole answer: its text, its sound, and the account of the server; and a sound file that grows while an answer is spoken."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedWriter
from itertools import accumulate
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from omnistage.client.errors import NotAvailableError, NotSpokenError, ProtocolError, RequestError
from omnistage.client.events import (
    Alignment,
    AudioChunk,
    Done,
    Event,
    Failover,
    Picture,
    Rows,
    SpeechCodes,
    SpokenWord,
    TextDelta,
    ThoughtDelta,
    Timing,
    Usage,
    VideoDelta,
    array,
    figures,
)
from omnistage.client.files import Film, SoundEncoder, channels_of, films_html, format_of, pictures_html, sound_html, text_html

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Audio:
    """Sound. samples: float32 [n], or [n, channels] if there are several, -1 to 1. sample_rate: samples per second. encoding: the type
    of the samples as they were sent, pcm16 or float32."""

    samples: NDArray[np.float32]
    sample_rate: int
    encoding: str = "pcm16"

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate

    def __repr__(self) -> str:
        return f"Audio({array(self.samples)}, sample_rate={self.sample_rate}, {self.encoding!r}, {figures(self, 'duration_s')})"

    def _repr_html_(self) -> str:
        """A player, for a notebook."""
        return sound_html(self.samples, self.sample_rate)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file of the kind that its name ends in: .wav, with samples of type `encoding`, .flac, .ogg, .opus or .mp3. Raises
        RequestError for sound that such a file cannot hold, NotAvailableError for a kind that this machine cannot write, OSError."""
        write_sound(path, self.samples, self.sample_rate, self.encoding if format_of(path).is_wav else "pcm16")


class Answer(dict[str, str]):
    """An answer, which is also a turn of a conversation: `answer["content"]` is its text, and `conversation.append(answer)` adds it.

    text: str. thought: the model's thoughts before the answer, empty if it had none; they are no part of the text or of the turn.
    token_ids: the tokens of the text. logprobs: for each token the natural log of its probability; empty if the call did not ask for them.
    audio: Audio, or None if no sound was asked for or nothing of the text could be spoken; then `save` raises an error. codes: uint32
    [frames, codebooks] of speech, or None if the pipeline gives none. words: when each word is spoken, empty if `outputs` did not name
    alignment; words that are not spoken are left out. pictures: the finished ones, encoded, without previews; images: the same as Pillow
    images. videos: the films that were made. rows: by port, for each port of tensors that `outputs` named: an array [n, width]: `latents`,
    float32, a row for each place of the VAE's grid; `pixels`, uint8, a row for each pixel. Both go row by row from the top, one layer after
    the other, one result after the other.

    finish_reason: stop, length, repetition or interrupted. seed: the same seed gives the same answer. usage: the server's account. timing:
    the times that this client measured. failovers: servers that were lost during the answer and replaced, oldest first. unspoken: how many
    characters of the text the voice has no sound for; unspoken_words: the first 64 of these characters. notes: sentences for the user, such
    as what a model cannot draw, or that the answer was cut. drew: whether another seed could have given another answer; None: the server
    does not say."""

    def __init__(
        self,
        deltas: Sequence[TextDelta],
        audio: Audio | None,
        pictures: tuple[Picture, ...],
        done: Done,
        codes: NDArray[np.uint32] | None = None,
        words: tuple[SpokenWord, ...] = (),
        rows: Mapping[str, NDArray[Any]] | None = None,
        thought: str = "",
        videos: tuple[Film, ...] = (),
    ) -> None:
        self.text = "".join(delta.text for delta in deltas)
        self.thought = thought
        super().__init__(role="assistant", content=self.text)
        self.token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        lengths = accumulate((len(delta.text) for delta in deltas), initial=0)
        # For each token: index of the first character of the piece of text that it came with.
        self._token_characters = [first for first, delta in zip(lengths, deltas, strict=False) for _ in delta.token_ids]
        self.logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs)
        self.audio = audio
        self.codes = codes
        self.words = words
        self.pictures = pictures
        self.videos = videos
        self.rows: dict[str, NDArray[Any]] = dict(rows or {})
        self.pipeline: str = done.pipeline
        self.session_id: str = done.session_id
        self.seed: int = done.seed
        self.finish_reason: str = done.finish_reason
        self.usage: Usage = done.usage
        self.timing: Timing = done.timing
        self.failovers: tuple[Failover, ...] = done.failovers
        self.unspoken: int = done.unspoken
        self.unspoken_words: str = done.unspoken_words
        self.notes: tuple[str, ...] = done.notes
        self.drew: bool | None = done.drew

    @cached_property
    def images(self) -> list[Image]:
        """The pictures as Pillow images, in the same order, decoded when this is first read: images[0].save("cat.png"). Raises
        NotAvailableError if Pillow is not installed, ProtocolError if a picture cannot be decoded."""
        return [_decode(picture) for picture in self.pictures]

    def token_begins_s(self) -> list[float]:
        """When the speech of each token begins, in seconds from the first sample; empty if `words` is empty. The time of a token is
        the begin of the first word that ends after the token's first character. So a token that is not spoken has the time of the next
        spoken word; a token after the last word has the time at which that word ends. Tokens whose text came in one piece have one time."""
        ends = [word.first_character + len(word.text) for word in self.words]
        # The last entry is for tokens after the last word: `bisect_right` gives one more than the index of that word.
        begins = [*(word.begin_s for word in self.words), *(word.end_s for word in self.words[-1:])]
        return [begins[bisect_right(ends, first)] for first in self._token_characters] if begins else []

    def save(self, path: str | PathLike[str]) -> None:
        """Write the sound to a file, see `Audio.save`. Raises NotSpokenError if there is no sound, RequestError if there is only a picture
        or a film: use the `save` of that."""
        if self.audio is None and (self.videos or self.pictures):
            product, call = ("a film", "videos[0].save(path)") if self.videos else ("a picture", "images[0].save(path)")
            raise RequestError(f"this answer is {product}, and has no sound", hint=f"Write {product}: answer.{call}.")
        if self.audio is None:
            raise NotSpokenError("this answer has no sound: none was asked for, or nothing of its text could be spoken")
        self.audio.save(path)

    def _repr_html_(self) -> str:
        """The text, a player of the sound, the pictures, the films and the notes, for a notebook."""
        sound = "" if self.audio is None else self.audio._repr_html_()
        shown = pictures_html((picture.media_type, picture.data) for picture in self.pictures)
        shown += films_html((film.media_type, film.data) for film in self.videos)
        return (text_html(self.text) if self.text else "") + sound + shown + "".join(map(text_html, self.notes))

    def __repr__(self) -> str:
        sound = f"{self.audio.duration_s:.2f} s of sound" if self.audio else "no sound"
        pictures = f"{len(self.pictures)} picture{'s' * (len(self.pictures) != 1)}, " if self.pictures else ""
        pictures += "".join(f"{film.frames} frames of {film.media_type}, " for film in self.videos)
        sound += f", unspoken={self.unspoken}" if self.unspoken else ""
        sound += f", notes={list(self.notes)!r}" if self.notes else ""
        seed = "" if self.drew is False else f", seed={self.seed}"  # Nothing was drawn at random.
        return f"Answer({self.text!r}, {sound}, {pictures}finish_reason={self.finish_reason!r}{seed})"


async def collect(events: AsyncIterator[Event]) -> Answer:
    """Read a stream to its end and put the answer together. Raises ProtocolError if the stream ends without `Done`."""
    deltas: list[TextDelta] = []
    thoughts: list[str] = []
    sounds: list[AudioChunk] = []
    codes: list[NDArray[np.uint32]] = []
    words: list[SpokenWord] = []
    pictures: list[Picture] = []
    rows: dict[str, list[NDArray[Any]]] = {}
    clips: list[VideoDelta] = []
    async for event in events:
        match event:
            case TextDelta():
                deltas.append(event)
            case ThoughtDelta():
                thoughts.append(event.text)
            case AudioChunk():
                sounds.append(event)
            case Alignment():
                words += event.words
            case SpeechCodes():
                codes.append(event.codes)
            case Picture():
                if event.preview_step is None:
                    pictures.append(event)
            case VideoDelta():
                clips.append(event)
            case Rows():
                rows.setdefault(event.port, []).append(event.rows)
            case Done():
                tensors = {port: np.concatenate(pieces) for port, pieces in rows.items()}
                frames = np.concatenate(codes) if codes else None
                thought = "".join(thoughts)
                return Answer(deltas, _audio(sounds), tuple(pictures), event, frames, tuple(words), tensors, thought, _films(clips))
    raise ProtocolError("the stream ended without its account")


def _decode(picture: Picture) -> Image:
    """The picture as a Pillow image. Raises as `Answer.images`."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        hint = "pip install pillow, or write the files as they came: Answer.pictures[0].data."
        raise NotAvailableError("pictures are decoded by the package pillow, which is not installed", hint=hint) from error
    try:
        image = Image.open(io.BytesIO(picture.data), formats=("PNG", "JPEG", "WEBP"))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ProtocolError(f"picture {picture.index} of type {picture.media_type!r} cannot be decoded: {error}") from error
    return image


def _films(clips: Sequence[VideoDelta]) -> tuple[Film, ...]:
    """A tuple of the one film that the pieces make; empty if there is no piece."""
    if not clips:
        return ()
    return (Film(b"".join(clip.data for clip in clips), clips[0].media_type, sum(clip.frames for clip in clips)),)


def _audio(sounds: Sequence[AudioChunk]) -> Audio | None:
    """The sound that the chunks make; None if there is no chunk."""
    if not sounds:
        return None
    return Audio(np.concatenate([sound.samples for sound in sounds]), sounds[0].sample_rate_hz, sounds[0].encoding)


class SoundFile:
    """A sound file that grows with the answer. It can be played as far as the answer has come, even if the answer, or this program, is
    broken off.

    ::

        with SoundFile("answer.opus") as file:
            for event in omni.stream("What is a kite?"):
                if isinstance(event, AudioChunk):
                    file.write(event)

    path: its ending decides the format: .wav, .flac, .ogg, .opus or .mp3. The file is made when the first sound comes. Raises RequestError
    for another ending, NotAvailableError for a kind that this machine cannot write; so make it before you ask."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._format = format_of(self._path)
        self._format.check()
        self._encoder: SoundEncoder | None = None
        self._file: BufferedWriter  # A file is open exactly while there is an encoder.
        self._form = (0, "", 0)  # sample rate, encoding and channels of the first chunk
        self._samples = 0  # written so far
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        written_s = self._samples / self._form[0] if self._samples else 0.0
        return f"SoundFile({str(self._path)!r}, {written_s:.2f} s of sound, {'closed' if self._closed else 'open'})"

    def write(self, chunk: AudioChunk) -> None:
        """Write the next piece of sound; the first one sets the file's sample rate and encoding. Raises RequestError for a rate that such a
        file cannot have or that changes, ValueError after `close`, OSError."""
        form = (chunk.sample_rate_hz, chunk.encoding, channels_of(chunk.samples))
        if self._closed:
            raise ValueError(f"{self._path} is closed")
        if self._encoder is None:
            encoding = chunk.encoding if self._format.is_wav else "pcm16"
            self._encoder = SoundEncoder(self._path, chunk.sample_rate_hz, encoding, channels_of(chunk.samples))
            self._file = self._path.open("wb")
            self._form = form
        elif form != self._form:
            old, new = (f"{rate_hz} samples a second as {encoding}, {count} at once" for rate_hz, encoding, count in (self._form, form))
            raise RequestError(f"{self._path} has {old}, these are {new}")
        self._file.write(self._encoder.encode(chunk.samples))
        self._samples += len(chunk.samples)
        if self._format.is_wav:
            self._correct_head(self._encoder.head)
        self._file.flush()

    def close(self) -> None:
        """Write the rest, and the facts that are known only at the end. Raises OSError."""
        if self._closed:
            return
        self._closed = True
        if self._encoder is not None:
            with self._file:
                self._file.write(self._encoder.finish())
                self._correct_head(self._encoder.head)

    def _correct_head(self, head: bytes) -> None:
        """Write a new beginning of the file over the old one."""
        self._file.seek(0)
        self._file.write(head)
        self._file.seek(0, io.SEEK_END)


def write_sound(path: str | PathLike[str], samples: NDArray[np.float32], sample_rate_hz: int, encoding: str, kind: str = "") -> None:
    """Write a whole sound, float32 [n] or [n, channels]. kind: the ending that decides the format; empty: the ending of `path`. Raises as
    SoundEncoder does, and RequestError if there is no sample and the file needs one."""
    encoder = SoundEncoder(kind or path, sample_rate_hz, encoding, channels_of(samples))
    if not len(samples) and not format_of(kind or path).is_wav:
        raise RequestError(f"{path} was not written: the sound has no sample")
    body = encoder.encode(samples) + encoder.finish()
    head = encoder.head  # It has the facts that are known only at the end.
    Path(path).write_bytes(head + body[len(head) :])
