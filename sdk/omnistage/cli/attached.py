"""Reads the pictures, sounds and films that were typed with a question, in the order in which they were typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.cli.helping import Command

if TYPE_CHECKING:
    from omnistage.client.media import Medium

KINDS = ("image", "audio", "video")

ATTACHED = f"{__name__}.attached"


@dataclass(frozen=True, slots=True)
class Attached:
    """A picture, sound or film that is sent with a question. kind: image, audio or video, from the name of the option. path: of the file; -
    is standard input. use_audio: the model also hears the sound of a film."""

    kind: str
    path: str
    use_audio: bool = False

    def read(self) -> Medium:
        """Read the medium. Raises BadRequestError that names the option and the file, and RequestError if standard input has none."""
        from omnistage.cli.standard_input import STDIN, medium
        from omnistage.client.media import Video, to_medium

        source = medium(self.kind) if self.path == STDIN else self.path
        return to_medium(Video(source, self.use_audio) if self.kind == "video" else source, self.kind, f"--{self.kind}")


class Attaching(Command):
    """A command whose options --image, --audio and --video may be mixed. `Context.meta[ATTACHED]` gets the list of (kind, value), in the
    order in which they were typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        option_values, _, order = self.make_parser(ctx).parse_args(list(args))
        kinds = {f"--{kind}": kind for kind in KINDS}
        media = [(kinds[option.opts[0]], option.name) for option in order if option.opts[0] in kinds]
        values = {name: iter(option_values[name]) for _, name in media}
        ctx.meta[ATTACHED] = [(kind, next(values[name])) for kind, name in media]
        return super().parse_args(ctx, args)
