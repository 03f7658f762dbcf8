"""A whole answer: its text, its sound, and the account of the server."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omnistage.client.encoder import format_of
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
    Usage,
    VideoDelta,
    array,
)
from omnistage.client.film_file import Film
from omnistage.client.notebook import films, paragraph, pictures, player
from omnistage.client.playback import Timing, figures
from omnistage.client.sound_file import write_sound

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
        return player(self.samples, self.sample_rate)

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

    finish_reason: stop, length or interrupted. seed: the same seed gives the same answer. usage: the server's account. timing: the times
    that this client measured. failovers: servers that were lost during the answer and replaced, oldest first. unspoken: how many characters
    of the text the voice has no sound for; unspoken_words: the first 64 of these characters. notes: sentences for the user, such as what a
    model cannot draw. drew: whether another seed could have given another answer; None: the server does not say."""

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
        """When the speech of each token begins, in seconds from the first sample; empty if `words` is empty. A token begins with the first
        word that ends after the token's first character. So a token that is not spoken begins with the next spoken word; a token after the
        last word begins where that word ends. Tokens whose text came in one piece begin together."""
        ends = [word.first_character + len(word.text) for word in self.words]
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
        """The text, a player of the sound, the pictures and the films, for a notebook."""
        sound = "" if self.audio is None else self.audio._repr_html_()
        shown = pictures((picture.media_type, picture.data) for picture in self.pictures)
        shown += films((film.media_type, film.data) for film in self.videos)
        return (paragraph(self.text) if self.text else "") + sound + shown

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
                return Answer(
                    deltas,
                    _audio(sounds),
                    tuple(pictures),
                    event,
                    np.concatenate(codes) if codes else None,
                    tuple(words),
                    tensors,
                    "".join(thoughts),
                    _films(clips),
                )
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
