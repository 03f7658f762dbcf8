"""The orders of a drawing, a film and a sound of a prompt: each asks for it, keeps it, writes its files, and prints its figures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from omnistage.cli.make.drawing_screen import drawing_screen_for, frames_text, picture_size
from omnistage.cli.make.figures import SEPARATOR, print_object, remarks, seed_text, sentence, tell
from omnistage.cli.make.files import SOUND_KINDS, GrowingFile, OutputFile, film_size, new_name
from omnistage.cli.make.orders import STDIN, TypedOrder, medium, words
from omnistage.cli.make.screen import Screen
from omnistage.cli.stack.layout import Layout
from omnistage.cli.targets import Need
from omnistage.cli.wording import SHELL, TYPED_NAMES
from omnistage.client.answer import write_sound
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.errors import BadRequestError, ProtocolError, RequestError
from omnistage.client.events import AudioChunk, Done, Event, Picture, Progress, VideoDelta
from omnistage.client.files import FILM_KINDS, Samples, format_of
from omnistage.client.media import to_part
from omnistage.client.options import GUIDES
from omnistage.client.request import Options, for_drawing

PICTURE_KINDS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WebP"}
"""Kinds of files that can be written, by their endings."""

MEDIA_TYPES = {ending: f"image/{name.lower()}" for ending, name in PICTURE_KINDS.items()}

FILM_MEDIA_TYPES = {("vp9", ".webm"): "video/webm", ("vp9", ".mp4"): "video/mp4", ("h264", ".mp4"): 'video/mp4; codecs="avc1"'}
"""The media type to ask for, by the codec's name as it can be typed and the ending of the file."""

SIZE = ("diffusion.width", "diffusion.height")
"""Fields of a request that --size sets: refusals name them."""

NEEDS_A_PICTURE = "It changes a picture: give one with --image F."

OTHER_PIPELINE = "Give another --pipeline: `omnistage pipelines`."


@dataclass
class PromptOrder(TypedOrder):
    """An order of something that a prompt describes. prompt: its words; - (standard input) until `check` reads it. example: such a prompt.
    out: None: no file was typed. steps: how many were done."""

    prompt: str
    out: Path | None
    options: Options
    as_json: bool
    steps: int = field(default=0, init=False)

    example: ClassVar[str] = "a red heart on blue"

    @property
    def screen(self) -> Screen:
        return drawing_screen_for(self.as_json)

    def take(self, event: Event) -> None:
        if isinstance(event, Progress):
            self.steps = event.done

    def report(self, done: Done, facts: Mapping[str, object], figures: Sequence[str]) -> None:
        """Print the product: one object for scripts, which begins with `facts`; or lines for people: the servers that were lost, a line
        that begins with `figures`, and the servers' remarks."""
        if self.as_json:
            print_object({**facts, "e2e_s": done.timing.e2e_s, "steps": self.steps or None}, done)
            return
        parts = [*figures, f"{self.steps} steps" if self.steps else "", f"pipeline {done.pipeline}", *seed_text(done)]
        losses = (sentence(failover, done.timing) for failover in done.failovers)
        tell(*losses, SEPARATOR.join(filter(None, parts)), *remarks(done))


@dataclass
class PictureOrder(PromptOrder):
    """An order of a drawing or a film. images: names of files; after `check` their bytes. sized: width and height were typed as one option,
    --size. path: the file, once the files are open. output: the port of the product. lacks: what a pipeline without it does, in words."""

    images: Sequence[str | bytes]
    sized: bool
    path: Path = field(init=False)

    output: ClassVar[str]
    lacks: ClassVar[str]

    @property
    def ending(self) -> str:
        """The ending of a file that is named after the prompt."""
        return ".png"

    @property
    def folders(self) -> list[Path]:
        """The folders in which the name of the file must be new."""
        return [Path()]

    def check(self) -> None:
        if self.out is None:  # Otherwise the words are read after the file is tried.
            self.prompt = words(self.prompt, self.example)
        with ExitStack() as tried:
            self.open_files(tried)
        self.images, self.options = read_pictures(self.images, self.options)
        if self.out is not None:
            self.prompt = words(self.prompt, self.example)
        for_drawing(self.prompt, self.images, self.options).complete()

    @property
    def need(self) -> Need:
        shows = self.images or any(name in self.options for name in GUIDES)
        return Need(["text", *(["image"] if shows else [])], [self.output], "diffusion")

    def inability(self, layout: Layout) -> RequestError:
        return RequestError(f"{layout.names} {self.lacks}", hint=OTHER_PIPELINE)

    def open_files(self, files: ExitStack) -> None:
        # No other call gets the name until `files` ends.
        self.path = self.out or files.enter_context(new_name(self.prompt, self.ending, self.folders))
        try:
            self.open_named(files)
        except RequestError as error:
            if self.out is None:
                error.hint = f"Say where it goes: --out FOLDER/{self.path}"
            raise

    @abstractmethod
    def open_named(self, files: ExitStack) -> None:
        """Open the file at `path`, or the files that are named after it, until `files` ends. Raises RequestError."""

    @asynccontextmanager
    async def refusals(self, omni: AsyncOmni, pipeline: str) -> AsyncIterator[None]:
        """A context that rewords refusals: that of a side names --size if that was typed, and that of a missing picture has a hint."""
        try:
            yield
        except BadRequestError as error:
            field = error.metadata.get("field", "")
            if self.sized and field in SIZE:
                description = error.message.partition(": ")[2]  # Before it stands the name of the field.
                raise RequestError(f"--size: {SHELL.message(description)}") from error
            if field == "diffusion.images" and not self.images:
                error.hint = NEEDS_A_PICTURE
            raise


@dataclass
class DrawingOrder(PictureOrder):
    """An order of a drawing. preview_dir: the folder of previews; None: that of the picture. files: the opened files, by path. pictures,
    previews: what has come: finished pictures, and the files of previews."""

    preview_dir: Path | None = None
    files: dict[Path, OutputFile] = field(default_factory=dict, init=False)
    pictures: list[Picture] = field(default_factory=list, init=False)
    previews: list[Path] = field(default_factory=list, init=False)

    output = "image"
    lacks = "does not draw"

    @property
    def folders(self) -> list[Path]:
        return [Path(), *([self.preview_dir] if self.preview_dir is not None and self.preview_dir.is_dir() else [])]

    def check(self) -> None:
        ending = self.ending if self.out is None else self.out.suffix.lower()
        self.options["media_type"] = MEDIA_TYPES.get(ending, "")  # Whoever opens the files refuses other endings.
        super().check()

    def open_files(self, files: ExitStack) -> None:
        super().open_files(files)
        if self.preview_dir is not None and not self.preview_dir.is_dir():
            hint = f"Make it first: mkdir -p {self.preview_dir}"
            raise RequestError(f"--preview-dir {self.preview_dir}: there is no such folder", hint=hint)

    def open_named(self, files: ExitStack) -> None:
        layers, count = self.options.get("layers", 0), self.options.get("results", 1)
        paths = [self.picture_path(result, layer, count, layers) for result in range(count) for layer in range(max(layers, 1))]
        self.files = {path: files.enter_context(OutputFile(path, "--out", PICTURE_KINDS)) for path in paths}

    def picture_path(self, result: int, layer: int, results: int, layers: int) -> Path:
        """The path of one picture. result, layer: its numbers, from 0. results, layers: how many there are of each; layers 0: the model
        draws none."""
        number = f"-{result + 1}" if results > 1 else ""
        layer_text = f"-layer-{layer}" if layers else ""
        return self.path.with_stem(f"{self.path.stem}{number}{layer_text}")

    def preview_path(self, preview: Picture) -> Path:
        """The path of a preview. Its ending is that of the picture, unless the preview is of another type."""
        number = f"-{preview.index + 1}" if preview.index else ""
        endings = (self.path.suffix, *MEDIA_TYPES)
        ending = next((ending for ending in endings if MEDIA_TYPES[ending.lower()] == preview.media_type), self.path.suffix)
        return (self.preview_dir or self.path.parent) / f"{self.path.stem}{number}-preview-{preview.preview_step:02}{ending}"

    def ask(self, omni: AsyncOmni, options: Options) -> AsyncGenerator[Event, None]:
        return omni.stream_draw(self.prompt, images=self.images, **options)

    def take(self, event: Event) -> None:
        super().take(event)
        if isinstance(event, Picture):
            if event.preview_step is None:
                self.pictures.append(event)
            else:
                self.previews.append(self._write(event, self.preview_path(event), "--previews"))

    def finish(self, done: Done) -> None:
        if not self.pictures:
            raise ProtocolError("the drawing ended without a picture")
        layers = 1 + max(picture.layer for picture in self.pictures)
        is_layered = "layers" in self.options or layers > 1
        files, sizes = list[dict[str, object]](), dict[str, None]()
        for picture in self.pictures:
            if picture.media_type != (media_type := self.options["media_type"]):
                raise ProtocolError(f"a picture came as {picture.media_type!r}, {media_type} was asked for")
            result = picture.index // layers  # The index counts all layers of the results before.
            path = self.picture_path(result, picture.layer, len(self.pictures) // layers, layers if is_layered else 0)
            self._write(picture, path, "--out")
            width, height = picture_size(picture.data) or (None, None)
            files.append({"path": str(path), "result": result, "layer": picture.layer, "width": width, "height": height})
            sizes |= {f"{width}×{height}": None} if width else {}
        names = ", ".join(str(file["path"]) for file in files)
        figures = [f"wrote {names}", f"{', '.join(sizes)} pixels" if sizes else "", f"{done.timing.e2e_s:.2f} s"]
        self.report(done, {"files": files, "previews": [str(path) for path in self.previews]}, figures)

    def _write(self, picture: Picture, path: Path, option: str) -> Path:
        """Write a picture to its file, which may be open already; returns the path. option: the one by which the picture was ordered."""
        with ExitStack() as new:
            file = self.files.get(path) or new.enter_context(OutputFile(path, option, PICTURE_KINDS))
            file.write(lambda place: place.write_bytes(picture.data))
        return path


@dataclass
class FilmOrder(PictureOrder):
    """An order of a film. codec: as it was typed; None: it was not. file: the opened file, which is written while the film comes. frames,
    size, media_type: of the part that has come; size: width and height in pixels, if they are known."""

    codec: str | None = None
    file: GrowingFile = field(init=False)
    frames: int = field(default=0, init=False)
    size: tuple[int, int] | None = field(default=None, init=False)
    media_type: str = field(default="", init=False)

    output = "video"
    lacks = "makes no films"

    @property
    def ending(self) -> str:
        return ".mp4" if self.codec == "h264" else ".webm"

    def check(self) -> None:
        ending = self.ending if self.out is None else self.out.suffix.lower()
        media_type = FILM_MEDIA_TYPES.get((self.codec or "vp9", ending))
        if media_type is None and ending == ".webm":
            raise RequestError(f"--codec {self.codec}: no .webm is encoded so", hint="Give a name that ends in .mp4, or leave --codec out.")
        self.options["media_type"] = media_type or "video/webm"  # Whoever opens the file refuses other endings.
        super().check()

    def open_named(self, files: ExitStack) -> None:
        self.file = files.enter_context(GrowingFile(self.path, "--out", FILM_KINDS))

    def ask(self, omni: AsyncOmni, options: Options) -> AsyncGenerator[Event, None]:
        return omni.stream_film(self.prompt, image=self.images, **options)

    @asynccontextmanager
    async def refusals(self, omni: AsyncOmni, pipeline: str) -> AsyncIterator[None]:
        try:
            async with super().refusals(omni, pipeline):
                yield
        except BaseException:
            if self.frames and not self.as_json:
                tell(f"{self.path} has {frames_text(self.frames)} that came; they can be played")
            raise

    def take(self, event: Event) -> None:
        super().take(event)
        if isinstance(event, VideoDelta):
            self.file.append(event.data)
            self.size = self.size or film_size(event.data)
            self.frames += event.frames
            self.media_type = event.media_type

    def finish(self, done: Done) -> None:
        self.file.finish()
        width, height = self.size or (None, None)
        facts = {"path": str(self.path), "media_type": self.media_type, "frames": self.frames, "width": width, "height": height}
        sides = f"{width}×{height} pixels" if self.size else ""
        self.report(done, facts, [f"wrote {self.path}", frames_text(self.frames), sides, f"{done.timing.e2e_s:.2f} s"])


@dataclass
class SoundOrder(PromptOrder):
    """An order for the sound that a prompt describes. out: None: the sound is heard, or written to a file named after the prompt. file: the
    opened file; None: there is none. chunks: the sound that has come."""

    play: bool | None = None
    file: OutputFile | None = field(default=None, init=False)
    chunks: list[AudioChunk] = field(default_factory=list, init=False)

    example = "rain on a tin roof"

    def check(self) -> None:
        self.prompt = words(self.prompt, self.example)
        if self.out is not None and not self.is_sound_piped:
            with OutputFile(self.out, "--out", SOUND_KINDS):
                format_of(self.out).check()
        for_drawing(self.prompt, (), self.options).complete()

    @property
    def need(self) -> Need:
        return Need(["text"], ["audio"], "diffusion")

    def inability(self, layout: Layout) -> RequestError:
        return RequestError(f"{layout.names} makes no sound of a prompt", hint="Give another --pipeline, or `omnistage say` for a text.")

    def open_files(self, files: ExitStack) -> None:
        path = None if self.is_sound_piped else self.out
        if path is None and self.hearing.is_lost and not self.as_json:
            path = files.enter_context(new_name(self.prompt, ".wav", [Path()]))
        self.file = None if path is None else files.enter_context(OutputFile(path, "--out", SOUND_KINDS))

    def ask(self, omni: AsyncOmni, options: Options) -> AsyncGenerator[Event, None]:
        return omni.stream_sound(self.prompt, **options)

    def take(self, event: Event) -> None:
        super().take(event)
        if isinstance(event, AudioChunk):
            self.chunks.append(event)
            self.hearing.write(event)

    def finish(self, done: Done) -> None:
        if self.file is not None:
            self.file.write(partial(write_resampled, self.chunks, kind=self.file.path.suffix))
        path, audio_s = None if self.file is None else str(self.file.path), sum(chunk.duration_s for chunk in self.chunks)
        facts = {"path": path, "audio_s": audio_s, "sample_rate_hz": self.chunks[0].sample_rate_hz}
        self.report(done, facts, [f"wrote {path}" if path else "", f"audio {audio_s:.2f} s", f"e2e {done.timing.e2e_s:.2f} s"])


def read_pictures(images: Sequence[str | bytes], options: Mapping[str, Any]) -> tuple[list[bytes], Options]:
    """Read the pictures in `images`, and those that options name (GUIDES); - is standard input. Returns the bytes of the pictures, and the
    options with bytes in place of names. Raises RequestError."""

    def read(image: str | bytes, option: str) -> bytes:
        return to_part(medium("image") if image == STDIN else image, "image", option).media.data

    guides = {name: read(options[name], TYPED_NAMES[name]) for name in GUIDES if name in options}
    return [read(image, "--image") for image in images], cast("Options", {**options, **guides})


def write_resampled(chunks: Sequence[AudioChunk], path: Path, kind: str) -> None:
    """Write the chunks of a sound to a file. kind: the ending that decides the format. If the format cannot have the model's rate, the
    sound gets the next higher rate that it can have, or its highest."""
    samples = np.concatenate([chunk.samples for chunk in chunks])
    rate_hz, rates_hz = chunks[0].sample_rate_hz, format_of(kind).rates_hz
    if rates_hz and rate_hz not in rates_hz:
        new_hz = min((possible_hz for possible_hz in rates_hz if possible_hz > rate_hz), default=max(rates_hz))
        samples, rate_hz = resample(samples, rate_hz, new_hz), new_hz
    write_sound(path, samples, rate_hz, "pcm16", kind)


def resample(samples: Samples, rate_hz: int, new_hz: int) -> Samples:
    """The same sound at another rate, both in Hz. samples: [n] or [n, channels]; returns float32 of the same form. All frequencies that
    both rates can have stay unchanged."""
    # The sound gets whole seconds, so that both rates have a whole number of samples; the last second is silent.
    silence = -len(samples) % rate_hz + rate_hz
    padded = np.pad(samples.astype(np.float64), [(0, silence), *[(0, 0)] * (samples.ndim - 1)])
    new_length = len(padded) * new_hz // rate_hz
    spectrum = np.fft.rfft(padded, axis=0)[: new_length // 2 + 1]  # The new rate has no higher frequencies.
    waveform = np.fft.irfft(spectrum, new_length, axis=0) * (new_length / len(padded))
    resampled: Samples = waveform[: round(len(samples) * new_hz / rate_hz)].astype(np.float32)
    return resampled
