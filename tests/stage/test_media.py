"""Media of a request reach the model as they stood in it; what has no form is refused by field."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from helpers.run import params
from helpers.servers import family_logic
from omnistage.diffusion.stage import DiffusionStage
from omnistage.models.conversation import Media, Streamed, TextConstraint, Turn
from omnistage.models.interface import DrawRequest, TextRequest
from omnistage.models.toy.film import FilmMaker, FilmOptions, ToyScene
from omnistage.models.toy.omni import OmniThinker, OmniThinkerOptions, PreparedToy
from omnistage.stage.logic import Start
from omnistage.thinker.stage import MAX_CONSTRAINT_CHARACTERS, ThinkerStage
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError


class ListeningThinker(OmniThinker):
    """Keeps what it is asked."""

    asked: TextRequest

    async def prepare(self, request: TextRequest) -> PreparedToy:
        self.asked = request
        return PreparedToy(request, ())


class LookingFilmMaker(FilmMaker):
    """Keeps what it is asked."""

    asked: DrawRequest

    async def prepare(self, request: DrawRequest) -> ToyScene:
        self.asked = request
        return cast(ToyScene, None)

    def items(self, prepared: ToyScene) -> Mapping[str, int]:
        return {}


def said_by(role: str, *parts: stage_pb2.Part) -> stage_pb2.Message:
    return stage_pb2.Message(role=role, parts=parts)


def text(said: str) -> stage_pb2.Part:
    return stage_pb2.Part(text=said)


def media(data: bytes, media_type: str = "image/png", *, use_audio: bool = False) -> stage_pb2.Part:
    return stage_pb2.Part(media=stage_pb2.Media(data=data, media_type=media_type, use_audio=use_audio))


async def asked(*messages: stage_pb2.Message, **fields: object) -> TextRequest:
    model = ListeningThinker(OmniThinkerOptions())
    request = stage_pb2.Open(params=params("thinker", "", messages=messages, **fields), seed=3, client="somebody", scope="some key")
    await ThinkerStage(model).prepare(request, Start())
    return model.asked


async def prepare_drawing(model: LookingFilmMaker | None = None, **fields: Any) -> DrawRequest:
    model = model or LookingFilmMaker(FilmOptions())
    request = stage_pb2.Open(params=params("diffusion", **{"prompt": "a hill", **fields}), seed=3, client="somebody")
    await DiffusionStage(model).prepare(request, Start())
    return replace(model.asked, history=None)


@contextmanager
def refusal(field: str, match: str | None = None) -> Iterator[None]:
    """A bad request, which names this field."""
    with pytest.raises(StageError, match=match) as error:
        yield
    assert (error.value.reason, error.value.metadata["field"]) == ("BAD_REQUEST", field)


async def test_parts_come_in_their_order():
    system, user = said_by("system", text("Be brief.")), said_by("user", text("a"), media(b"xy"), stage_pb2.Part(port="live"), text("b"))
    film = said_by("user", media(b"zz", "video/mp4", use_audio=True))
    request = await asked(system, user, film, constraint=stage_pb2.Constraint(regex="[ab]+"), top_logprobs=5)
    picture = Media("image/png", b"xy")
    assert picture.digest == hashlib.sha256(b"xy").digest()
    assert request.turns == (
        Turn("system", ("Be brief.",)),
        Turn("user", ("a", picture, Streamed("live"), "b")),
        Turn("user", (Media("video/mp4", b"zz", use_audio=True),)),
    )
    assert request.turns[1].text == "ab"
    assert (request.constraint, request.client, request.seed) == (TextConstraint("regex", "[ab]+"), "somebody", 3)
    assert (request.scope, request.logprobs, request.top_logprobs) == ("some key", True, 5)


async def test_a_media_type_is_the_same_in_capitals():
    on_port = stage_pb2.Part(port="media0", media_type="VIDEO/mp4", use_audio=True)
    request = await asked(said_by("user", media(b"xy", "Image/PNG"), on_port))
    picture, film = request.turns[0].parts
    assert picture == Media("image/png", b"xy") and film == Streamed("media0", "video/mp4", use_audio=True)
    assert (picture.kind, film.kind) == ("image", "video")
    assert (await prepare_drawing(media_type="VIDEO/X-grey8")).media_type == "video/x-grey8"


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ('Video/MP4; codecs="avc1"', 'video/mp4; codecs="avc1"'),
        ("video/mp4;codecs=avc1.64001f", "video/mp4;codecs=avc1.64001f"),
        ('video/webm ; codecs="vp9, opus"', 'video/webm; codecs="vp9, opus"'),
    ],
)
async def test_codecs_of_what_is_to_be_made_reach_the_model(said: str, asked: str):
    assert (await prepare_drawing(media_type=said)).media_type == asked


WRONG_CODECS = [f"video/mp4; {codecs}" for codecs in ('codecs=""', "codecs=", 'codecs="avc1', "rate=3")]


@pytest.mark.parametrize("said", [*WRONG_CODECS, "video/mp4;", "video/; codecs=avc1", "; codecs=avc1"])
async def test_other_parameters_of_it_are_refused(said: str):
    with refusal("diffusion.media_type"):
        await prepare_drawing(media_type=said)


async def test_a_ground_is_a_colour_and_is_for_what_is_seen():
    """The rule holds for media in a message and on a port, of conversations and of drawings."""
    shown = [stage_pb2.Media(data=b"x", media_type=kind, background="#1eC85a") for kind in ("image/png", "video/mp4")]
    parts = [*(stage_pb2.Part(media=one) for one in shown), stage_pb2.Part(port="media0", media_type="image/gif", background="#000000")]
    request = await asked(said_by("user", *parts, media(b"x")))
    colours = [(30, 200, 90), (30, 200, 90), (0, 0, 0), None]
    assert [getattr(part, "background", "none at all") for part in request.turns[0].parts] == colours
    assert (await prepare_drawing(images=shown[:1])).images[0].background == (30, 200, 90)


@pytest.mark.parametrize(
    "background", ["white", "#fff", "#ffffff ", "#ffffff\n", "ffffff", "#gggggg", "#ffffffff", "#\uff11\uff11\uff11\uff11\uff11\uff11"]
)
async def test_a_ground_that_is_no_colour_is_refused_by_field(background: str):
    shown = stage_pb2.Media(data=b"x", media_type="image/png", background=background)
    on_port = stage_pb2.Part(port="media0", media_type="image/png", background=background)
    for part, field in ((stage_pb2.Part(media=shown), "thinker.messages.parts.media"), (on_port, "thinker.messages.parts")):
        with refusal(f"{field}.background", "must be a colour as #rrggbb, such as #ffffff for white"):
            await asked(said_by("user", part))
    with refusal("diffusion.images.background"):
        await prepare_drawing(images=[shown])


async def test_a_sound_has_no_ground():
    heard = stage_pb2.Media(data=b"x", media_type="audio/wav", background="#ffffff")
    for part in (stage_pb2.Part(media=heard), stage_pb2.Part(port="live", background="#ffffff")):
        with pytest.raises(StageError, match="for pictures and films"):
            await asked(said_by("user", part))


async def test_choices_come_as_they_are_and_too_much_is_refused():
    user = said_by("user", text("a"))

    def choices(*texts: str) -> stage_pb2.Constraint:
        return stage_pb2.Constraint(choice=stage_pb2.Choices(texts=texts))

    request = await asked(user, constraint=choices("yes", "no", "yes "))
    assert request.constraint == TextConstraint("choice", choices=("yes", "no", "yes "))
    assert (request.logprobs, request.top_logprobs) == (False, 0)
    most = MAX_CONSTRAINT_CHARACTERS
    for form, bad in (
        ("choice", choices()),
        ("choice", choices("yes", "")),
        ("choice", choices("a" * most, "b")),
        ("regex", stage_pb2.Constraint(regex="")),
        ("regex", stage_pb2.Constraint(regex="a" * (most + 1))),
        ("json_schema", stage_pb2.Constraint(json_schema=" " * (most + 1))),
    ):
        with refusal(f"thinker.constraint.{form}"):
            await asked(user, constraint=bad)
    with refusal("thinker.constraint.choice"):
        await asked(user, verbatim="yes", constraint=choices("yes"))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (said_by("user", stage_pb2.Part()), "thinker.messages.parts"),
        (said_by("user", media(b"x", "")), "thinker.messages.parts.media.media_type"),
        (said_by("user", media(b"x", "text/html")), "thinker.messages.parts.media.media_type"),
        (said_by("user", media(b"x", "image/png\n")), "thinker.messages.parts.media.media_type"),
        (said_by("user", media(b"")), "thinker.messages.parts.media.data"),
        (said_by("robot", text("x")), "thinker.messages.role"),
        (said_by("user", text(" ")), "thinker.messages"),
        (said_by("assistant", media(b"x")), "thinker.messages"),
    ],
)
async def test_a_message_without_form_is_refused_by_field(message: stage_pb2.Message, field: str):
    with refusal(field):
        await asked(message)
    assert (await asked(said_by("user", text("x"), media(b"x")))).turns


async def test_a_user_may_show_something_without_a_word():
    assert (await asked(said_by("user", media(b"x")))).turns[0].text == ""


async def test_a_model_that_takes_text_says_so_of_everything_else():
    logic = family_logic("toy", "thinker")
    for part, field in [(media(b"x"), "thinker.messages.parts.media"), (stage_pb2.Part(port="live"), "thinker.messages.parts.port")]:
        with refusal(field, "toy-thinker"):
            await logic.prepare(stage_pb2.Open(params=params("thinker", messages=[said_by("user", text("x"), part)])), Start())
    assert list(logic.description.inputs) == ["text"] and not logic.description.constraints


async def test_everything_of_a_drawing_request_reaches_the_model():
    image, mask = (stage_pb2.Media(data=data, media_type="image/png") for data in (b"xy", b"m"))
    control = stage_pb2.Media(data=b"c", media_type="image/webp")
    alike: dict[str, Any] = {
        "prompt": "a hill",
        "negative_prompt": "fog",
        "width": 64,
        "height": 48,
        "frames": 7,
        "layers": 4,
        "steps": 9,
        "guidance_scale": 2.5,
        "results": 2,
        "previews": 3,
        "media_type": "video/mp4",
        "strength": 0.7,
        "options": {"eta": "0.5"},
    }
    media: dict[str, Any] = {"images": [image], "mask_image": mask, "control_image": control}
    assert await prepare_drawing(**alike, **media, duration_s=1.5, sigmas=[1.0, 0.7]) == DrawRequest(
        seed=3,
        client="somebody",
        seconds=1.5,
        sigmas=(1.0, 0.7),
        images=(Media("image/png", b"xy"),),
        mask_image=Media("image/png", b"m"),
        control_image=Media("image/webp", b"c"),
        **alike,
    )
    assert await prepare_drawing() == DrawRequest(seed=3, client="somebody", prompt="a hill"), "what is not said is the model's own"


@pytest.mark.parametrize("sigmas", [[1.0, 1 - 1e-12], [1.0, 1e-50], [1e-7], [1e7, 1.0], [float("nan")], [0.5, 1.0]])
async def test_sigmas_that_are_none_in_float32_do_not_reach_the_model(sigmas: list[float]):
    model = LookingFilmMaker(FilmOptions())
    with refusal("diffusion.sigmas"):
        await prepare_drawing(model, sigmas=sigmas)
    assert not hasattr(model, "asked")
    assert (await prepare_drawing(sigmas=[1.0, 1e-6])).sigmas == (1.0, 1e-6)
