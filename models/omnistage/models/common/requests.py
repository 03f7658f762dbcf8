"""What a model says to a request that asks for more than it can do. One line of `prepare` each; all raise BadRequest."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.models.interface import BadRequest, Media, ModelInfo, Streamed, TextRequest, Wanted


def check_parts(request: TextRequest, info: ModelInfo) -> None:
    """Every part of every turn is something that the model takes."""
    for turn in request.turns:
        for part in turn.parts:
            if isinstance(part, Media):
                check_medium(part, info, "thinker.messages.parts.media")
            elif isinstance(part, Streamed) and part.port not in {port.name for port in info.accepts}:
                raise BadRequest(
                    "thinker.messages.parts.port", f"{info.name} has no input port {part.port[:32]!r}; send the media in the message"
                )


def check_medium(media: Media, info: ModelInfo, field: str) -> None:
    """One picture, sound or film is of a kind that the model takes."""
    medium = media.media_type.partition("/")[0]
    if medium not in info.inputs or medium == "text":
        raise BadRequest(field, f"{info.name} takes {_listed(info.inputs)}, not {media.media_type[:64]!r}; leave it out")


def check_constraint(request: TextRequest, info: ModelInfo) -> None:
    """The text can be kept to what is asked."""
    if request.constraint is not None and request.constraint.form not in info.constraints:
        able = f"can keep its text to {_listed(info.constraints)} only" if info.constraints else "cannot constrain its text"
        raise BadRequest("thinker.constraint", f"{info.name} {able}; leave it out")


def check_place(wanted: Wanted, port: str, most: int, of: str) -> None:
    """A port that is wanted goes on no later than it ends. most: items that can have come of it. of: what they are, for humans."""
    first = wanted.get(port, 0)
    if first > most:
        raise BadRequest("resume.positions", f"port {port!r} cannot go on at {first}: there are only {most} {of}")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
