"""Carries out one drawing, film or sound of a prompt: asks for it, shows or plays it while it comes, writes its files, and prints its
figures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np

from omnistage.cli.make.drawing_screen import DrawingScreen, drawing_screen_for, follow, picture_size, report
from omnistage.cli.make.figures import tell
from omnistage.cli.make.files import GrowingFile, OutputFile, film_size, new_name
from omnistage.cli.make.listening import Listening, listening
from omnistage.cli.make.orders import STDIN, HeardOrder, TypedOrder, medium, words
from omnistage.cli.report import Interruptible
from omnistage.cli.stack.layout import Layout
from omnistage.cli.targets import Need, Where, connect_client
from omnistage.cli.wording import SHELL, TYPED_NAMES
from omnistage.client.answer import write_sound
from omnistage.client.errors import BadRequestError, ProtocolError, RequestError
from omnistage.client.events import AudioChunk, Done, Event, Picture, VideoDelta
from omnistage.client.files import FILM_KINDS, FORMATS, Samples, format_of
from omnistage.client.media import to_part
from omnistage.client.options import GUIDES
from omnistage.client.request import Options, for_drawing, time_limit_s

EXAMPLE = "a red heart on blue"
"""Example of a prompt."""

PICTURE_KINDS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WebP"}
"""Kinds of files that can be written, by their endings."""

MEDIA_TYPES = {ending: f"image/{name.lower()}" for ending, name in PICTURE_KINDS.items()}

SIZE = ("diffusion.width", "diffusion.height")
"""Fields of a request that --size sets: refusals name them."""

NEEDS_A_PICTURE = "It changes a picture: give one with --image F."

F = TypeVar("F", bound=OutputFile)


@dataclass(frozen=True, slots=True)
class PictureOrder(TypedOrder):
    """An order of a drawing or a film. prompt: its words; - (standard input) until `checked` reads it. images: names of files; after
    `checked` their bytes. sized: width and height were typed as one option, --size. is_unnamed: no file was typed; `out` is only an ending
    until `name_file` makes a name. output: the port of the result."""

    prompt: str
    out: Path
    images: Sequence[str | bytes]
    options: Options
    as_json: bool = False
    sized: bool = False
    is_unnamed: bool = False

    output: ClassVar[str]

    @property
    def need(self) -> Need:
        shows = self.images or any(name in self.options for name in GUIDES)
        return Need(["text", *(["image"] if shows else [])], [self.output], "diffusion")

    @property
    def folders(self) -> list[Path]:
        """The folders in which the name of the file must be new."""
        return [Path()]

    def checked(self) -> Self:
        # The words are read before the files are tried only if a file is named after them.
        order = replace(self, prompt=words(self.prompt, EXAMPLE)) if self.is_unnamed else self
        with ExitStack() as tried:
            order.name_file(tried).open_files(tried)
        images, options = read_pictures(self.images, self.options)
        prompt = order.prompt if self.is_unnamed else words(self.prompt, EXAMPLE)
        for_drawing(prompt, images, options).complete()
        return replace(order, prompt=prompt, images=images, options=options)

    def name_file(self, files: ExitStack) -> Self:
        """The order itself, or, if no file was typed, the order with a file named after its prompt. No other call gets that name until
        `files` ends. Raises RequestError."""
        if not self.is_unnamed:
            return self
        return replace(self, out=files.enter_context(new_name(self.prompt, self.out.suffix, self.folders)))

    @abstractmethod
    def open_files(self, files: ExitStack) -> object:
        """Open the expected files of a named order. Raises RequestError."""

    def open_file(self, kind: type[F], path: Path, kinds: Mapping[str, str], files: ExitStack) -> F:
        """Open one file until `files` ends. kind: its class. kinds: as in OutputFile. Raises RequestError."""
        try:
            file = kind(path, "--out", kinds)
        except RequestError as error:
            if self.is_unnamed:
                error.hint = f"Say where it goes: --out FOLDER/{self.out}"
            raise
        files.enter_context(file)
        return file


@dataclass(frozen=True, slots=True)
class DrawingOrder(PictureOrder):
    """An order of a drawing. preview_dir: the folder of previews; None: that of the picture."""

    preview_dir: Path | None = None

    output = "image"

    @property
    def folders(self) -> list[Path]:
        return [Path(), *([self.preview_dir] if self.preview_dir is not None and self.preview_dir.is_dir() else [])]

    def open_files(self, files: ExitStack) -> dict[Path, OutputFile]:
        """Open the files of all pictures and layers; returns them by path. Raises RequestError."""
        layers, count = self.options.get("layers", 0), self.options.get("results", 1)
        paths = [self.path(result, layer, count, layers) for result in range(count) for layer in range(max(layers, 1))]
        opened = {path: self.open_file(OutputFile, path, PICTURE_KINDS, files) for path in paths}
        if self.preview_dir is not None and not self.preview_dir.is_dir():
            raise RequestError(
                f"--preview-dir {self.preview_dir}: there is no such folder", hint=f"Make it first: mkdir -p {self.preview_dir}"
            )
        return opened

    def path(self, result: int, layer: int, results: int, layers: int) -> Path:
        """The path of one picture. result, layer: its numbers, from 0. results, layers: how many there are of each; layers 0: the model
        draws none."""
        number = f"-{result + 1}" if results > 1 else ""
        layer_text = f"-layer-{layer}" if layers else ""
        return self.out.with_stem(f"{self.out.stem}{number}{layer_text}")

    def preview_path(self, preview: Picture) -> Path:
        """The path of a preview. Its ending is that of the picture, unless the preview is of another type."""
        number = f"-{preview.index + 1}" if preview.index else ""
        endings = (self.out.suffix, *MEDIA_TYPES)
        ending = next((ending for ending in endings if MEDIA_TYPES[ending.lower()] == preview.media_type), self.out.suffix)
        return (self.preview_dir or self.out.parent) / f"{self.out.stem}{number}-preview-{preview.preview_step:02}{ending}"


@dataclass(slots=True)
class Drawn:
    """The results of a drawing so far: its pictures, and the files of its previews."""

    pictures: list[Picture] = field(default_factory=list)
    previews: list[Path] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PictureFile:
    """The written file of a picture. result, layer: its numbers, from 0. size: width and height in pixels, if they are known."""

    path: Path
    result: int
    layer: int
    size: tuple[int, int] | None

    @property
    def facts(self) -> dict[str, object]:
        width, height = self.size or (None, None)
        return {"path": str(self.path), "result": self.result, "layer": self.layer, "width": width, "height": height}


def read_pictures(images: Sequence[str | bytes], options: Mapping[str, Any]) -> tuple[list[bytes], Options]:
    """Read the pictures in `images`, and those that options name (GUIDES); - is standard input. Returns the bytes of the pictures, and the
    options with bytes in place of names. Raises RequestError."""
    sources = [medium("image") if image == STDIN else image for image in images]
    complete = dict(options)
    for name in GUIDES:
        if name in complete:
            source = medium("image") if complete[name] == STDIN else complete[name]
            complete[name] = to_part(source, "image", TYPED_NAMES[name]).media.data
    return [to_part(source, "image", "--image").media.data for source in sources], cast("Options", complete)


async def draw_order(work: Interruptible, order: DrawingOrder, target: Where, verbose: bool) -> None:
    """Ask for a drawing, show the progress, write the files, print the figures; a private stack ends after that.

    The JSON object goes to stdout and everything else to stderr.
    """
    if isinstance(target.at, Layout) and "diffusion" not in target.at.kinds:
        raise RequestError(f"{target.at.names} does not draw", hint="Give another --pipeline: `omnistage pipelines`.")
    with ExitStack() as files:
        # Opened before anything is started or asked: a drawing that cannot be kept would be lost.
        order = order.name_file(files)
        opened = order.open_files(files)
        async with connect_client(target, time_limit_s(order.options), verbose, is_quiet=order.as_json) as omni:
            events = omni.stream_draw(order.prompt, images=order.images, **target.options(order.options))
            with refusals(sized=order.sized, has_images=bool(order.images)):
                screen, drawing = drawing_screen_for(order.as_json), Drawn()
                steps, done = await follow(events, screen, lambda event: _take_picture(event, order, drawing, screen))
            work.complete()
            picture_files = _write_pictures(order, drawing, opened, files)
            facts = {"files": [file.facts for file in picture_files], "previews": [str(path) for path in drawing.previews]}
            report(facts, _figures(picture_files, done), steps, done, as_json=order.as_json)


@contextmanager
def refusals(*, sized: bool, has_images: bool) -> Iterator[None]:
    """A context that rewords refusals. If `sized`, the refusal of a side names --size. Unless `has_images`, the refusal of a missing
    picture gets a hint."""
    try:
        yield
    except BadRequestError as error:
        field = error.metadata.get("field", "")
        if sized and field in SIZE:
            description = error.message.partition(": ")[2]  # Before it stands the name of the field.
            raise RequestError(f"--size: {SHELL.message(description)}") from error
        if field == "diffusion.images" and not has_images:
            error.hint = NEEDS_A_PICTURE
        raise


def _take_picture(event: Event, order: DrawingOrder, drawing: Drawn, screen: DrawingScreen) -> None:
    """Show and keep a picture that has come; a preview is written to its file at once."""
    if isinstance(event, Picture):
        if event.preview_step is None:
            drawing.pictures.append(event)
        else:
            drawing.previews.append(_keep_preview(order, event))
        screen.picture(event.data)


def _keep_preview(order: DrawingOrder, preview: Picture) -> Path:
    """Write a preview to its file; returns the path."""
    path = order.preview_path(preview)
    with OutputFile(path, "--previews", PICTURE_KINDS) as file:
        file.write(partial(_fill, preview))
    return path


def _write_pictures(order: DrawingOrder, drawing: Drawn, opened: dict[Path, OutputFile], files: ExitStack) -> list[PictureFile]:
    """Write a file for each picture. opened: by path, the files that are open already. Raises ProtocolError if no picture has come, or if
    one has another type than was asked for."""
    if not drawing.pictures:
        raise ProtocolError("the drawing ended without a picture")
    layered = "layers" in order.options or any(picture.layer for picture in drawing.pictures)
    layers = 1 + max(picture.layer for picture in drawing.pictures)
    picture_files = []
    for picture in drawing.pictures:
        media_type = order.options.get("media_type", "")
        if picture.media_type != media_type:
            raise ProtocolError(f"a picture came as {picture.media_type!r}, {media_type} was asked for")
        result = picture.index // layers  # The index counts all layers of the results before.
        path = order.path(result, picture.layer, len(drawing.pictures) // layers, layers if layered else 0)
        file = opened.get(path) or files.enter_context(OutputFile(path, "--out", PICTURE_KINDS))
        file.write(partial(_fill, picture))
        picture_files.append(PictureFile(path, result, picture.layer, picture_size(picture.data)))
    return picture_files


def _fill(picture: Picture, place: Path) -> None:
    place.write_bytes(picture.data)


def _figures(picture_files: Sequence[PictureFile], done: Done) -> list[str]:
    """The first parts of the line for people: files, sizes and time."""
    sizes = dict.fromkeys("×".join(map(str, file.size)) for file in picture_files if file.size is not None)
    names = ", ".join(str(file.path) for file in picture_files)
    return [f"wrote {names}", f"{', '.join(sizes)} pixels" if sizes else "", f"{done.timing.e2e_s:.2f} s"]


FILM_MEDIA_TYPES = {("vp9", ".webm"): "video/webm", ("vp9", ".mp4"): "video/mp4", ("h264", ".mp4"): 'video/mp4; codecs="avc1"'}
"""The media type to ask for, by the codec's name as it can be typed and the ending of the file."""


@dataclass(frozen=True, slots=True)
class FilmOrder(PictureOrder):
    """An order of a film."""

    output = "video"

    def open_files(self, files: ExitStack) -> GrowingFile:
        """The one opened file."""
        return self.open_file(GrowingFile, self.out, FILM_KINDS, files)


@dataclass(slots=True)
class FilmSoFar:
    """The part of a film that has come. frames: number of frames. size: width and height in pixels, if they are known."""

    frames: int = 0
    size: tuple[int, int] | None = None
    media_type: str = ""


def out_of(out: Path | None, codec: str | None) -> tuple[Path, str]:
    """The path of the film, and the media type to ask for. out, codec: as typed; None: not typed. Without `out` the path is only the right
    ending. Raises RequestError if file and codec do not fit together."""
    if out is None:
        out = Path("film.mp4" if codec == "h264" else "film.webm")
    media_type = FILM_MEDIA_TYPES.get((codec or "vp9", out.suffix.lower()))
    if media_type is None and out.suffix.lower() == ".webm":
        raise RequestError(f"--codec {codec}: no .webm is encoded so", hint="Give a name that ends in .mp4, or leave --codec out.")
    return out, media_type or "video/webm"  # Whoever opens the file refuses other endings.


async def make_film(work: Interruptible, order: FilmOrder, target: Where, verbose: bool) -> None:
    """Ask for a film, show the progress, write the file while it comes, print the figures; a private stack ends after that.

    The JSON object goes to stdout and everything else to stderr. If the film breaks off, its file keeps what came.
    """
    if isinstance(target.at, Layout) and "diffusion" not in target.at.kinds:
        raise RequestError(f"{target.at.names} makes no films", hint="Give another --pipeline: `omnistage pipelines`.")
    with ExitStack() as files:
        # Opened before anything is started or asked, because a film that cannot be written would be lost.
        file, film = order.name_file(files).open_files(files), FilmSoFar()
        async with connect_client(target, time_limit_s(order.options), verbose, is_quiet=order.as_json) as omni:
            events = omni.stream_film(order.prompt, image=order.images, **target.options(order.options))
            done = None
            try:
                with refusals(sized=order.sized, has_images=bool(order.images)):
                    screen = drawing_screen_for(order.as_json)
                    steps, done = await follow(events, screen, lambda event: _take_frames(event, file, film, screen))
            finally:
                if film.frames and done is None and not order.as_json:
                    tell(f"{file.path} has {_frames(film)} that came; they can be played")
            work.complete()
            file.finish()
            width, height = film.size or (None, None)
            facts = {"path": str(file.path), "media_type": film.media_type, "frames": film.frames, "width": width, "height": height}
            sides = f"{width}×{height} pixels" if film.size else ""
            figures = [f"wrote {file.path}", _frames(film), sides, f"{done.timing.e2e_s:.2f} s"]
            report(facts, figures, steps, done, as_json=order.as_json)


def _take_frames(event: Event, file: GrowingFile, film: FilmSoFar, screen: DrawingScreen) -> None:
    """Append a piece of the film to its file, and show how many frames there are."""
    if isinstance(event, VideoDelta):
        file.append(event.data)
        film.size = film.size or film_size(event.data)
        film.frames += event.frames
        film.media_type = event.media_type
        screen.show_amount(_frames(film))


def _frames(film: FilmSoFar) -> str:
    """The number of frames in words."""
    return f"{film.frames} frame{'s' * (film.frames != 1)}"


SOUND_EXAMPLE = "rain on a tin roof"
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
        order = replace(self, prompt=words(self.prompt, SOUND_EXAMPLE))
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
            steps, done = await follow(events, screen, lambda event: _take_sound(event, sound, hearing, screen))
            work.complete()
            if file is not None:
                file.write(lambda place: _write_sound(place, sound, file.path.suffix))
            rate_hz = sound.chunks[0].sample_rate_hz
            facts = {"path": None if path is None else str(path), "audio_s": round(sound.seconds, 6), "sample_rate_hz": rate_hz}
            figures = ["" if path is None else f"wrote {path}", f"audio {sound.seconds:.2f} s", f"e2e {done.timing.e2e_s:.2f} s"]
            report(facts, figures, steps, done, as_json=order.as_json)
            await hearing.finish(work)


def _take_sound(event: Event, sound: SoundSoFar, hearing: Listening, screen: DrawingScreen) -> None:
    """Play and keep a piece of sound, and show how much there is."""
    if isinstance(event, AudioChunk):
        sound.chunks.append(event)
        hearing.write(event)
        screen.show_amount(f"{sound.seconds:.1f} s of sound")


def _write_sound(place: Path, sound: SoundSoFar, kind: str) -> None:
    """Write a sound to a file. kind: the ending that decides the format. If the format cannot have the model's rate, the sound gets the
    next higher rate that it can have, or its highest."""
    samples = np.concatenate([chunk.samples for chunk in sound.chunks])
    rate_hz, rates_hz = sound.chunks[0].sample_rate_hz, format_of(kind).rates_hz
    if rates_hz and rate_hz not in rates_hz:
        new_hz = min((possible_hz for possible_hz in rates_hz if possible_hz > rate_hz), default=max(rates_hz))
        samples, rate_hz = resample(samples, rate_hz, new_hz), new_hz
    write_sound(place, samples, rate_hz, "pcm16", kind)


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
