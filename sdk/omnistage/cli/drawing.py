"""Carries out one drawing: asks for it, shows it while it comes, writes its files, and prints its figures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from omnistage.cli.connect import connect_client
from omnistage.cli.drawing_screen import DrawingScreen, drawing_screen_for
from omnistage.cli.interruptible import Interruptible
from omnistage.cli.layout import Layout
from omnistage.cli.orders import TypedOrder
from omnistage.cli.output import OutputFile
from omnistage.cli.picture_cells import size_of
from omnistage.cli.picture_name import new_name
from omnistage.cli.standard_input import STDIN, medium
from omnistage.cli.steps import follow, report
from omnistage.cli.targets import Need
from omnistage.cli.where import Where
from omnistage.cli.wording import SHELL, TYPED
from omnistage.cli.words import words
from omnistage.client.errors import BadRequestError, ProtocolError, RequestError
from omnistage.client.events import Done, Event, Picture
from omnistage.client.media import to_part
from omnistage.client.options import GUIDES
from omnistage.client.request import Options, for_drawing, time_limit_s

EXAMPLE = "a red heart on blue"
"""Example of a prompt."""

KINDS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WebP"}
"""Kinds of files that can be written, by their endings."""

MEDIA_TYPES = {ending: f"image/{name.lower()}" for ending, name in KINDS.items()}

SIZE = ("diffusion.width", "diffusion.height")
"""Fields of a request that --size sets: refusals name them."""

NEEDS_A_PICTURE = "It changes a picture: give one with --image F."

F = TypeVar("F", bound=OutputFile)


@dataclass(frozen=True, slots=True)
class PictureOrder(TypedOrder):
    """An order of a drawing or a film. prompt: its words; - (standard input) until `checked` reads it. images: names of files; after
    `checked` their bytes. sized: width and height were typed as one option, --size. is_unnamed: no file was typed; `out` is only an ending
    until `named` makes a name. output: the port of the result."""

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
        order = replace(self, prompt=words(self.prompt, EXAMPLE)) if self.is_unnamed else self
        with ExitStack() as tried:
            order.named(tried).open_files(tried)
        images, options = read_pictures(self.images, self.options)
        prompt = order.prompt if self.is_unnamed else words(self.prompt, EXAMPLE)
        for_drawing(prompt, images, options).complete()
        return replace(order, prompt=prompt, images=images, options=options)

    def named(self, files: ExitStack) -> Self:
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
        opened = {path: self.open_file(OutputFile, path, KINDS, files) for path in paths}
        if self.preview_dir is not None and not self.preview_dir.is_dir():
            raise RequestError(
                f"--preview-dir {self.preview_dir}: there is no such folder", hint=f"Make it first: mkdir -p {self.preview_dir}"
            )
        return opened

    def path(self, result: int, layer: int, results: int, layers: int) -> Path:
        """The path of one picture. result, layer: its numbers, from 0. results, layers: how many there are of each; layers 0: the model
        draws none."""
        number = f"-{result + 1}" if results > 1 else ""
        return self.out.with_stem(f"{self.out.stem}{number}{f'-layer-{layer}' if layers else ''}")

    def preview_path(self, preview: Picture) -> Path:
        """The path of a preview. Its ending is that of the picture, unless the preview is of another type."""
        number = f"-{preview.index + 1}" if preview.index else ""
        ending = next(
            (ending for ending in (self.out.suffix, *MEDIA_TYPES) if MEDIA_TYPES[ending.lower()] == preview.media_type), self.out.suffix
        )
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
            complete[name] = to_part(source, "image", TYPED[name]).media.data
    return [to_part(source, "image", "--image").media.data for source in sources], cast("Options", complete)


async def draw_order(work: Interruptible, order: DrawingOrder, target: Where, verbose: bool) -> None:
    """Ask for a drawing, show the progress, write the files, print the figures; a private stack ends after that.

    The JSON object goes to stdout and everything else to stderr.
    """
    if isinstance(target.at, Layout) and "diffusion" not in target.at.kinds:
        raise RequestError(f"{target.at.names} does not draw", hint="Give another --pipeline: `omnistage pipelines`.")
    with ExitStack() as files:
        # Opened before anything is started or asked: a drawing that cannot be kept would be lost.
        order = order.named(files)
        opened = order.open_files(files)
        async with connect_client(target, time_limit_s(order.options), verbose, is_quiet=order.as_json) as omni:
            events = omni.stream_draw(order.prompt, images=order.images, **target.options(order.options))
            with refusals(sized=order.sized, has_images=bool(order.images)):
                screen, drawing = drawing_screen_for(order.as_json), Drawn()
                steps, done = await follow(events, screen, lambda event: _take(event, order, drawing, screen))
            work.complete()
            picture_files = _write(order, drawing, opened, files)
            facts = {"files": [file.facts for file in picture_files], "previews": [str(path) for path in drawing.previews]}
            report(facts, _figures(picture_files, done), steps, done, as_json=order.as_json)


@contextmanager
def refusals(*, sized: bool, has_images: bool) -> Iterator[None]:
    """A context that rewords refusals: for a wrong side it names --size if `sized`; for a missing picture it adds a hint unless
    `has_images`."""
    try:
        yield
    except BadRequestError as error:
        field = error.metadata.get("field", "")
        if sized and field in SIZE:
            raise RequestError(f"--size: {SHELL.message(error.message.partition(': ')[2])}") from error
        if field == "diffusion.images" and not has_images:
            error.hint = NEEDS_A_PICTURE
        raise


def _take(event: Event, order: DrawingOrder, drawing: Drawn, screen: DrawingScreen) -> None:
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
    with OutputFile(path, "--previews", KINDS) as file:
        file.write(partial(_fill, preview))
    return path


def _write(order: DrawingOrder, drawing: Drawn, opened: dict[Path, OutputFile], files: ExitStack) -> list[PictureFile]:
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
        result = picture.index // layers
        path = order.path(result, picture.layer, len(drawing.pictures) // layers, layers if layered else 0)
        file = opened.get(path) or files.enter_context(OutputFile(path, "--out", KINDS))
        file.write(partial(_fill, picture))
        picture_files.append(PictureFile(path, result, picture.layer, size_of(picture.data)))
    return picture_files


def _fill(picture: Picture, place: Path) -> None:
    place.write_bytes(picture.data)


def _figures(picture_files: Sequence[PictureFile], done: Done) -> list[str]:
    """The first parts of the line for people: files, sizes and time."""
    sizes = dict.fromkeys("×".join(map(str, file.size)) for file in picture_files if file.size is not None)
    names = ", ".join(str(file.path) for file in picture_files)
    return [f"wrote {names}", f"{', '.join(sizes)} pixels" if sizes else "", f"{done.timing.e2e_s:.2f} s"]
