"""Parameters that more than one kind of stage has, checked and in the form of the models. Their ranges stand in stage.proto."""

from __future__ import annotations

import re

from omnistage.models.conversation import Media, Streamed
from omnistage.models.interface import Sampling
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError
from omnistage.wire.errors import bad_request as bad_request
from omnistage.wire.fields import check
from omnistage.wire.fields import descriptor_of as descriptor_of
from omnistage.wire.fields import rule_of as rule_of
from omnistage.wire.fields import values_for as values_for
from omnistage.wire.limits import MAX_LOGIT_BIASES

POSITIONS = "resume.positions"
HISTORY = "resume.history"

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_CODECS = re.compile(r'\s*codecs\s*=\s*("[a-z0-9., -]{1,64}"|[a-z0-9.-]{1,64})\s*')
_MEDIA_TYPE = re.compile(r"(image|audio|video)/[a-z0-9][a-z0-9.+-]{0,63}")


def media_of(media: stage_pb2.Media, field: str) -> Media:
    """A picture, sound or film as models take it. field: its path in the request. Raises BAD_REQUEST for media without a type or bytes; the
    model finds out whether it can read them."""
    media_type = media_type_of(media.media_type, field, "image/png")
    data = media.data
    if not data:
        raise bad_request(f"{field}.data", "is empty")
    return Media(media_type, data, media.use_audio, _background_of(media.background, media_type, field))


def streamed_of(part: stage_pb2.Part, field: str) -> Streamed:
    """As `media_of`, for media that the client streams on a port, also for live sound, which has no type."""
    media_type = media_type_of(part.media_type, field, "video/mp4") if part.media_type else ""
    return Streamed(part.port, media_type, part.use_audio, part.total_bytes, _background_of(part.background, media_type, field))


def _background_of(text: str, media_type: str, field: str) -> tuple[int, int, int] | None:
    """The colour `text`, #rrggbb, as red, green and blue, 0 to 255; None: no colour is named. Raises BAD_REQUEST."""
    if not text:
        return None
    if not media_type.startswith(("image/", "video/")):
        raise bad_request(f"{field}.background", "is for pictures and films: leave it out")
    if _COLOUR.fullmatch(text) is None:
        raise bad_request(f"{field}.background", "must be a colour as #rrggbb, such as #ffffff for white")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue


def media_type_of(text: str, field: str, example: str) -> str:
    """Check a media type and return it in lower case: its case means nothing. example: a valid type, for the error. Raises
    BAD_REQUEST."""
    if _MEDIA_TYPE.fullmatch(text.lower()) is None:
        raise bad_request(f"{field}.media_type", f"must be image/..., audio/... or video/..., such as {example}")
    return text.lower()


def output_type_of(text: str, field: str, example: str) -> str:
    """As `media_type_of`, for the media type of the wanted output. It may also name codecs: video/mp4; codecs="avc1". example: a valid
    type; words after a comma are for the error of a bad type only."""
    plain, semicolon, codecs = text.lower().partition(";")
    if semicolon and not _CODECS.fullmatch(codecs):
        raise bad_request(
            f"{field}.media_type",
            f'may name codecs behind it, and nothing else, such as {example.split(",")[0]} or video/mp4; codecs="avc1"',
        )
    return media_type_of(plain.strip(), field, example) + semicolon + codecs


def sampling_of(params: stage_pb2.Sampling, kind: str) -> Sampling:
    """Sampling parameters as models take them. kind: of the stage. Raises BAD_REQUEST for too many biases."""
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise bad_request(f"{kind}.sampling.logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
    return Sampling(**values_for(Sampling, params))


def check_params(params: stage_pb2.StageParams, kind: str) -> None:
    """Raise BAD_REQUEST for params of another kind of stage, and for a value that the contract does not allow; no params at all mean the
    defaults."""
    sent_kind = params.WhichOneof("kind")
    if sent_kind not in (None, kind):
        raise StageError(
            "BAD_REQUEST", f"open.params: this is a {kind}, the params are for a {sent_kind}", metadata={"field": "open.params"}
        )
    check(params)
