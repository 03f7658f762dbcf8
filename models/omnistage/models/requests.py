"""Checks of requests to a model, which `prepare` calls, and the choice of a voice. All raise BadRequest for a request that the model cannot
do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from omnistage.engine.types import Unfit
from omnistage.models.conversation import Media, Streamed
from omnistage.models.interface import BadRequest, Content, DrawRequest, ModelInfo, TextRequest, Wanted

_FIELDS: Mapping[tuple[str, str], str] = {
    ("thinker", "prompt"): "thinker.messages",
    ("thinker", "max_items"): "thinker.max_tokens",
    ("thinker", "history"): "resume.history",
    ("talker", "prompt"): "thinker.messages",
    ("talker", "max_items"): "talker.max_frames",
    ("talker", "history"): "resume.history",
}
"""(stage, field of a SequenceRequest) -> the name of this field in the client's request, for fields with two names."""


def check_parts(request: TextRequest, info: ModelInfo) -> None:
    """Check that the model takes every part of every turn."""
    media = (part for turn in request.turns for part in turn.parts if not isinstance(part, str))
    for number, part in enumerate(media, 1):
        if isinstance(part, Media):
            check_medium(part, info, "thinker.messages.parts.media", medium=str(number))
        else:
            _check_streamed(part, info)


def _check_streamed(part: Streamed, info: ModelInfo) -> None:
    """Check that the model has the input port of a streamed medium, and that this port takes media of its type."""
    port = next((port for port in info.accepts if port.name == part.port), None)
    if port is None:
        raise BadRequest("thinker.messages.parts.port", f"{info.name} has no input port {part.port[:32]!r}; send the media in the message")
    if port.content is Content.MEDIA:
        check_medium(part, info, "thinker.messages.parts.media_type", port=part.port)
    elif part.media_type:
        raise BadRequest("thinker.messages.parts.media_type", f"port {port.name!r} of {info.name} carries {port.content.value} as it is")


def check_medium(media: Media | Streamed, info: ModelInfo, field: str, **place: str) -> None:
    """Check that the model takes media of this kind. field, place: the field and further facts for the error, see BadRequest."""
    if not media.media_type:
        raise BadRequest(field, "is not given: say what the media are, such as image/png", **place)
    if media.kind not in info.inputs or media.kind == "text":
        raise BadRequest(field, f"{info.name} takes {_join_words(info.inputs)}, not {media.media_type[:64]!r}; leave it out", **place)


def check_plain_drawing(request: DrawRequest, model: str) -> None:
    """Check that the request has no field that only some pipelines of Diffusers know. model: its name, for the error."""
    for field in ("sigmas", "strength", "mask_image", "control_image", "options"):
        if getattr(request, field) not in ((), None, {}):
            raise BadRequest(f"diffusion.{field}", f"{model} knows none: leave it out")


def check_constraint(request: TextRequest, info: ModelInfo) -> None:
    """Check that the model supports the form of the request's constraint."""
    if request.constraint is not None and request.constraint.form not in info.constraints:
        able = f"can keep its text to {_join_words(info.constraints)} only" if info.constraints else "cannot constrain its text"
        raise BadRequest("thinker.constraint", f"{info.name} {able}; leave it out")


def check_bias(request: TextRequest, vocabulary: int) -> None:
    """Check that the ids of `logit_bias` are below `vocabulary`. Models on the engine need not call this, because the engine checks the
    ids."""
    if any(token_id >= vocabulary for token_id in request.sampling.logit_bias):
        raise BadRequest("thinker.sampling.logit_bias", f"ids must be below {vocabulary}, the size of the vocabulary")


@contextmanager
def refuse_unfit(kind: Literal["thinker", "talker"]) -> Iterator[None]:
    """Used around the making of a SequenceRequest and `Engine.check`: turns Unfit into BadRequest with the field that the client sees."""
    try:
        yield
    except Unfit as error:
        raise BadRequest(_FIELDS.get((kind, error.field), f"{kind}.{error.field}"), error.description) from None


def check_place(ports: Wanted, port: str, max_items: int, of: str) -> None:
    """Check that a wanted port does not begin after its end. max_items: largest number of items of the port. of: name of the items, for the
    error."""
    first = ports.get(port, 0)
    if first > max_items:
        raise BadRequest("resume.positions", f"port {port!r} cannot go on at {first}: there are only {max_items} {of}")


def _join_words(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def those_there_are(voices: Sequence[str]) -> str:
    """The voices in words, such as "the voices are A and B", without a capital or a full stop."""
    if not voices:
        return "there are no voices to choose from"
    *others, last = voices
    return f"the voices are {', '.join(others)} and {last}" if others else f"the only voice is {last}"


def choose_voice(voices: Collection[str], name: str, field: str) -> str:
    """The name of the requested voice among `voices`. name: capitals do not matter; empty: the first voice. field: of the request, for the
    error. Raises BadRequest."""
    if not name:
        return next(iter(voices))
    # The exact name wins, because a checkpoint may have two voices whose names differ only in capitals.
    choice = name if name in voices else next((voice for voice in voices if voice.lower() == name.lower()), None)
    if choice is None:
        raise BadRequest(field, f"there is no voice {name[:64]!r}; {those_there_are(list(voices))}")
    return choice
