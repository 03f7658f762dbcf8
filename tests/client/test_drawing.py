"""Pictures by `generate` and `draw`: a prompt is drawn where nothing but that can be done with it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers import servers
from helpers.doorkeeper import Doorkeeper
from helpers.media_files import picture
from helpers.ports import take_address
from helpers.servers import ServerProcess, family_logic, local_router, local_stage, toy_logic
from omnistage.client import AsyncOmni, BadRequestError, Done, NotAvailableError, Omni, Picture, Progress, ProtocolError, UnknownModelError
from omnistage.client.answer import Answer
from omnistage.client.events import Timing, Usage
from omnistage.client.options import GUIDES
from omnistage.client.request import DIFFUSION, NEVER_ZERO, PROTO_NAMES, Options, for_drawing
from omnistage.models.toy.files import pixels_of
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import stage_pb2

SYSTEM, TURN = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a hill"}


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    with servers.toy_address(tmp_path_factory.mktemp("film"), "toy-film") as address, Omni(address=address) as omni:
        yield omni


def test_generate_draws_where_nothing_else_can_be_done(film: Omni) -> None:
    drawn = film.draw("a hill", seed=4, width=24, height=16, steps=3)
    for named in ({}, {"pipeline": "toy-film"}):
        answer = film.generate("a hill", seed=4, width=24, height=16, steps=3, **named)  # type: ignore[call-overload]
        assert [picture.data for picture in answer.pictures] == [picture.data for picture in drawn.pictures]
    (image,) = answer.images
    assert image.size == (24, 16)
    assert np.array_equal(np.asarray(image), pixels_of(answer.pictures[0].data))
    file = io.BytesIO()
    image.save(file, "PNG")
    assert answer.images[0] is image, "decoded once"
    assert "1 picture," in repr(answer)


def test_options_and_media_of_a_drawing_go_along(film: Omni) -> None:
    before = film.generate("a hill", seed=1).pictures[0].data
    common: dict[str, Any] = {"seed": 2, "layers": 2, "results": 2, "negative_prompt": "rain", "guidance_scale": 2, "previews": 1}
    answer = film.generate("a hill", images=[io.BytesIO(before)], **common)
    expected = film.draw("a hill", images=[before], **common)
    assert [picture.data for picture in answer.pictures] == [picture.data for picture in expected.pictures]
    assert [(picture.index, picture.layer) for picture in answer.pictures] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert len(answer.images) == 4


def test_a_stream_of_a_drawing_tells_its_steps(film: Omni) -> None:
    for stream in (film.stream, film.stream_draw):
        *events, done = stream("a hill", steps=4, previews=2)
        assert isinstance(done, Done)
        assert [(event.done, event.total) for event in events if isinstance(event, Progress)] == [(step, 4) for step in (1, 2, 3, 4)]
        assert [event.preview_step for event in events if isinstance(event, Picture)] == [2, 4, None]


async def test_asyncio(film: Omni) -> None:
    async with AsyncOmni(address=film.address) as omni:
        answer = await omni.generate("a hill", seed=3)
        async with aclosing(omni.stream("a hill", seed=3)) as events:
            (picture,) = [event async for event in events if isinstance(event, Picture)]
        assert answer.pictures[0].data == picture.data


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"max_tokens": 5}, "thinker"),
        ({"voice": "x"}, "talker"),
        ({"temperature": 0.5}, "thinker"),
        ({"choice": ["a", "b"]}, "thinker"),
        ({"sample_rate_hz": 8000}, "code2wav"),
    ],
)
def test_what_a_drawing_has_no_use_for_is_refused(film: Omni, options: Any, stage: str) -> None:
    with pytest.raises(BadRequestError, match="only draws") as error:
        film.generate("a hill", **options)
    (violation,) = error.value.fields
    assert violation.field.partition(".")[0] == stage


def test_other_refusals_stay_as_they_are(film: Omni, toy_address: str) -> None:
    with pytest.raises(BadRequestError, match="outputs: toy-film gives image, video, audio, progress, not 'text'"):
        film.generate("a hill", outputs=["text"])
    with pytest.raises(UnknownModelError):
        film.generate("a hill", pipeline="none")
    for told in ([SYSTEM, TURN], [TURN, {"role": "assistant", "content": "A hill."}, TURN]):
        with pytest.raises(BadRequestError, match="toy-film does not answer"):
            film.chat(told)
    with pytest.raises(BadRequestError, match=r"^toy-film does not speak a text; no other pipeline of this router does"):
        film.say("a hill")
    with pytest.raises(BadRequestError, match="toy-film does not answer"):
        film.generate("a hill", audios=[(np.zeros(9, np.int16), 8000)])
    with Omni(address=toy_address) as toy:
        for call in (toy.draw, toy.generate):
            with pytest.raises(BadRequestError, match=r"^toy does not draw; no other pipeline") as error:
                call("a hill", width=8)
            assert error.value.hint == ""


def test_a_conversation_of_one_question_is_a_prompt(film: Omni) -> None:
    """On the wire they are the same."""
    assert film.chat([TURN], seed=4).pictures[0].data == film.generate("a hill", seed=4).pictures[0].data


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "prompt"),
        ([], {}, "prompt"),
        (7, {}, "prompt"),
        ("", {}, "diffusion.prompt"),
        ("a hill", {"steps": 2.5}, "steps"),
        ("a hill", {"steps": 0}, "steps"),
        ("a hill", {"steps": "many"}, "steps"),
        ("a hill", {"width": -8}, "width"),
        ("a hill", {"step_cache": "often"}, "step_cache"),
        ("a hill", {"step_cache": 1.5}, "diffusion.step_cache"),
        ("a hill", {"step_cache": float("nan")}, "step_cache"),
        ("a hill", {"media_type": 3}, "media_type"),
        ("a hill", {"sigmas": 0.5}, "sigmas"),
        ("a hill", {"sigmas": ["x"]}, "sigmas"),
        ("a hill", {"sigmas": [0.5, 1.0]}, "diffusion.sigmas"),
        ("a hill", {"sigmas": [1.0, 0.0]}, "diffusion.sigmas"),
        ("a hill", {"sigmas": [1.0, 0.5]}, "diffusion.sigmas"),
        ("a hill", {"strength": 0}, "diffusion.strength"),
        ("a hill", {"strength": float("nan")}, "strength"),
        ("a hill", {"strength": 0.5}, "diffusion.strength"),
        ("a hill", {"options": "eta=1"}, "options"),
        ("a hill", {"options": {1: 2}}, "options"),
        ("a hill", {"options": {"eta": None}}, "options['eta']"),
        ("a hill", {"options": {"no name": 1}}, "diffusion.options"),
        ("a hill", {"options": {"eta": 0.5}}, "diffusion.options"),
        ("a hill", {"options": {f"eta{n}": 0.5 for n in range(200)}}, "diffusion.options"),
        ("a hill", {"mask_image": []}, "mask_image"),
        ("a hill", {"mask_image": b"no picture"}, "mask_image"),
        ("a hill", {"mask_image": picture(1)}, "diffusion.mask_image"),
        ("a hill", {"control_image": picture(1)}, "diffusion.control_image"),
    ],
)
def test_what_cannot_be_drawn_is_a_typed_error_with_its_field(film: Omni, prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(BadRequestError) as error:
        film.draw(prompt, **options)
    assert [violation.field for violation in error.value.fields] == [field]


NO_OPTIONS = {"prompt", "images"}
"""Fields of DiffusionParams that are arguments of their own."""


def test_every_field_of_a_drawing_is_an_option() -> None:
    fields = {field.name: field for field in stage_pb2.DiffusionParams.DESCRIPTOR.fields}
    assert {PROTO_NAMES.get(name, name) for name in DIFFUSION} == fields.keys() - NO_OPTIONS and set(DIFFUSION) <= set(
        Options.__annotations__
    )
    texts = {name for name, field in fields.items() if field.type == field.TYPE_STRING}
    said: dict[str, Any] = {name: "image/webp" if name in texts else 1 for name in DIFFUSION}
    said |= {"sigmas": [1.0, 0.5], "options": {"one": True, "two": 0.5, "three": 3, "four": "x"}}
    said |= dict.fromkeys(GUIDES, picture(1))
    params = for_drawing("a hill", (), said).complete().diffusion  # type: ignore[arg-type]
    told = {field.name: value for field, value in params.ListFields()}
    assert all(told[name] == stage_pb2.Media(media_type="image/png", data=picture(1)) for name in GUIDES)
    named = {PROTO_NAMES.get(name, name): value for name, value in said.items()}
    expected = {"prompt": "a hill", **named, "options": {"one": "true", "two": "0.5", "three": "3", "four": "x"}}
    assert {name: told[name] for name in expected if name not in GUIDES} == {
        name: expected[name] for name in expected if name not in GUIDES
    }
    assert told.keys() == expected.keys()
    never = {"width", "height", "steps", "results", "preview_side", "frames", "frames_per_second", "seconds", "flow_shift"}
    assert set(DIFFUSION) & set(NEVER_ZERO) == never


async def test_a_prompt_is_one_call_and_no_list() -> None:
    """Whether it is drawn or refused."""
    door = Doorkeeper()
    async with (
        local_stage(family_logic("toy-film", "diffusion"), family="toy-film") as stage,
        local_router({"diffusion": stage.address}, load_pipeline("toy-film"), interceptors=[door]) as router,
        AsyncOmni(address=router.address) as omni,
    ):
        drawn = [await omni.generate("a hill", seed=3, **named) for named in ({}, {"pipeline": "toy-film"}, {"width": 24})]
        assert [len(answer.pictures) for answer in drawn] == [1, 1, 1]
        with pytest.raises(BadRequestError):
            await omni.generate("a hill", voice="x")
    assert [method for method, _ in door.calls] == ["Generate"] * 4


WORDS = """
name: words
description: Words alone.
inputs: [text]
outputs: [text]
stages: [{kind: thinker, family: toy}]
defaults: {thinker: {max_tokens: 64}}
"""


async def test_a_router_that_comes_back_with_other_pipelines_is_asked_anew(tmp_path: Path) -> None:
    """Nothing is drawn that can be answered by then, though nobody told the client."""
    words, address = tmp_path / "words.yaml", take_address()
    words.write_text(WORDS)

    def router(pipelines: str, **stages: str) -> ServerProcess:
        flags = ("--stages", ",".join(f"{kind}={at}" for kind, at in stages.items()), "--address", address)
        return ServerProcess("omnistage.router", "--pipeline", pipelines, *flags, log_folder=tmp_path)

    async with local_stage(family_logic("toy-film", "diffusion"), family="toy-film") as film, local_stage(toy_logic("thinker")) as thinker:
        omni = AsyncOmni(address=address, connect_timeout_s=60)
        for pipelines, stages, answering in (
            ("toy-film", {"diffusion": film.address}, "toy-film"),
            (f"{words},toy-film", {"thinker": thinker.address, "diffusion": film.address}, "words"),
            (str(words), {"thinker": thinker.address}, "words"),
            ("toy-film", {"diffusion": film.address}, "toy-film"),
        ):
            with router(pipelines, **stages) as running:
                await asyncio.to_thread(running.wait_ready)
                for _ in range(2):
                    assert (await omni.generate("a hill", seed=1)).pipeline == answering
        await omni.close()


def answer_of(data: bytes) -> Answer:
    done = Done("s", "film", 1, "", Usage((), 0.0, 0.0, 0.0, 0.0), Timing((), (), 1.0))
    return Answer((), None, (Picture(data, "image/png", 0, 0, None, 0.5),), done)


def test_a_picture_that_is_none_is_told_when_it_is_decoded() -> None:
    answer = answer_of(b"no picture")
    assert answer.pictures[0].data == b"no picture"
    with pytest.raises(ProtocolError, match="picture 0 of type 'image/png' cannot be decoded"):
        _ = answer.images


def test_without_pillow_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(NotAvailableError) as error:
        _ = answer_of(file.getvalue()).images
    assert "pip install pillow" in error.value.hint
