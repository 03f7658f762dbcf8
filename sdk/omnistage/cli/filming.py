"""Carries out one film: asks for it, writes it while it comes, and prints its figures."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from omnistage.cli.connect import connect_client
from omnistage.cli.drawing import PictureOrder, refusals
from omnistage.cli.drawing_screen import DrawingScreen, drawing_screen_for
from omnistage.cli.figures import tell
from omnistage.cli.film_size import size_of
from omnistage.cli.interruptible import Interruptible
from omnistage.cli.layout import Layout
from omnistage.cli.output import GrowingFile
from omnistage.cli.steps import follow, report
from omnistage.cli.where import Where
from omnistage.client.errors import RequestError
from omnistage.client.events import Event, VideoDelta
from omnistage.client.files import FILM_KINDS
from omnistage.client.request import time_limit_s

MEDIA_TYPES = {("vp9", ".webm"): "video/webm", ("vp9", ".mp4"): "video/mp4", ("h264", ".mp4"): 'video/mp4; codecs="avc1"'}
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
    media_type = MEDIA_TYPES.get((codec or "vp9", out.suffix.lower()))
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
        file, film = order.named(files).open_files(files), FilmSoFar()
        async with connect_client(target, time_limit_s(order.options), verbose, is_quiet=order.as_json) as omni:
            events = omni.stream_film(order.prompt, image=order.images, **target.options(order.options))
            done = None
            try:
                with refusals(sized=order.sized, has_images=bool(order.images)):
                    screen = drawing_screen_for(order.as_json)
                    steps, done = await follow(events, screen, lambda event: _take(event, file, film, screen))
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


def _take(event: Event, file: GrowingFile, film: FilmSoFar, screen: DrawingScreen) -> None:
    """Append a piece of the film to its file, and show how many frames there are."""
    if isinstance(event, VideoDelta):
        file.append(event.data)
        film.size = film.size or size_of(event.data)
        film.frames += event.frames
        film.media_type = event.media_type
        screen.came(_frames(film))


def _frames(film: FilmSoFar) -> str:
    """The number of frames in words."""
    return f"{film.frames} frame{'s' * (film.frames != 1)}"
