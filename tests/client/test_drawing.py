"""Pictures, films and sounds of a prompt against a toy that makes all three: it is drawn where nothing but that can be done with it."""

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
from helpers.media_files import picture
from helpers.peer import Doorkeeper
from helpers.ports import take_address
from helpers.servers import ServerProcess, family_logic, local_router, local_stage, toy_logic
from omnistage.client import AsyncOmni, AudioChunk, Done, Film, Omni, Picture, Progress, VideoDelta, errors
from omnistage.client.answer import Answer
from omnistage.client.events import Timing, Usage
from omnistage.client.options import ABOUT, DIFFUSION, GUIDES
from omnistage.client.request import for_drawing, for_prompt
from omnistage.models.toy import film as toy
from omnistage.models.toy import formulas
from omnistage.models.toy.files import pixels_of, png
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import stage_pb2

SYSTEM, TURN = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a hill"}


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    with servers.toy_address(tmp_path_factory.mktemp("film"), "toy-film") as address, Omni(address=address) as omni:
        yield omni


def test_generate_draws_where_nothing_else_can_be_done(maker: Omni) -> None:
    drawn = maker.draw("a hill", seed=4, width=24, height=16, steps=3)
    for named in ({}, {"pipeline": "toy-film"}):
        answer = maker.generate("a hill", seed=4, width=24, height=16, steps=3, **named)  # type: ignore[call-overload]
        assert [picture.data for picture in answer.pictures] == [picture.data for picture in drawn.pictures]
    (image,) = answer.images
    assert image.size == (24, 16) and np.array_equal(np.asarray(image), pixels_of(answer.pictures[0].data))
    file = io.BytesIO()
    image.save(file, "PNG")
    assert answer.images[0] is image, "decoded once"
    assert "1 picture," in repr(answer)


def test_options_and_media_of_a_drawing_go_along(maker: Omni) -> None:
    before = maker.generate("a hill", seed=1).pictures[0].data
    common: dict[str, Any] = {"seed": 2, "layers": 2, "results": 2, "negative_prompt": "rain", "guidance_scale": 2, "previews": 1}
    answer = maker.generate("a hill", images=[io.BytesIO(before)], **common)
    expected = maker.draw("a hill", images=[before], **common)
    assert [picture.data for picture in answer.pictures] == [picture.data for picture in expected.pictures]
    assert [(picture.index, picture.layer) for picture in answer.pictures] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert len(answer.images) == 4


def test_a_stream_of_a_drawing_tells_its_steps(maker: Omni) -> None:
    for stream in (maker.stream, maker.stream_draw):
        *events, done = stream("a hill", steps=4, previews=2)
        assert isinstance(done, Done)
        assert [(event.done, event.total) for event in events if isinstance(event, Progress)] == [(step, 4) for step in (1, 2, 3, 4)]
        assert [event.preview_step for event in events if isinstance(event, Picture)] == [2, 4, None]


async def test_asyncio(maker: Omni) -> None:
    async with AsyncOmni(address=maker.address) as omni:
        drawn = await omni.generate("a hill", seed=3)
        async with aclosing(omni.stream("a hill", seed=3)) as events:
            assert [event.data async for event in events if isinstance(event, Picture)] == [drawn.pictures[0].data]
        (film,) = (await omni.film(PROMPT, **OF_FILM)).videos
        sound = (await omni.sound(PROMPT, **OF_SOUND)).audio
        assert film.data == film_file() and sound is not None and len(sound.samples) == len(sound_samples())
        async with aclosing(omni.stream_film(PROMPT, **OF_FILM)) as events:
            assert b"".join([event.data async for event in events if isinstance(event, VideoDelta)]) == film_file()


@pytest.mark.parametrize(
    ("option", "value", "stage"),
    [
        *((name, value, "thinker") for name, value in (("max_tokens", 5), ("temperature", 0.5), ("choice", ["a", "b"]))),
        *(("voice", "x", "talker"), ("sample_rate_hz", 8000, "code2wav")),
    ],
)
def test_what_a_drawing_has_no_use_for_is_refused(maker: Omni, option: str, value: Any, stage: str) -> None:
    with pytest.raises(errors.BadRequestError, match="only draws") as error:
        maker.generate("a hill", **{option: value})
    (violation,) = error.value.fields
    assert violation.field.partition(".")[0] == stage


def test_other_refusals_stay_as_they_are(maker: Omni) -> None:
    with pytest.raises(errors.BadRequestError, match="outputs: toy-film gives image, video, audio, progress, not 'text'"):
        maker.generate("a hill", outputs=["text"])
    with pytest.raises(errors.UnknownModelError):
        maker.generate("a hill", pipeline="none")
    for told in ([SYSTEM, TURN], [TURN, {"role": "assistant", "content": "A hill."}, TURN]):
        with pytest.raises(errors.BadRequestError, match="toy-film does not answer"):
            maker.chat(told)
    with pytest.raises(errors.BadRequestError, match=r"^toy-film does not speak a text; no other pipeline of this router does"):
        maker.say("a hill")
    with pytest.raises(errors.BadRequestError, match="toy-film does not answer"):
        maker.generate("a hill", audios=[(np.zeros(9, np.int16), 8000)])


def test_a_conversation_of_one_question_is_a_prompt(maker: Omni) -> None:
    """On the wire they are the same."""
    assert maker.chat([TURN], seed=4).pictures[0].data == maker.generate("a hill", seed=4).pictures[0].data


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
def test_what_cannot_be_drawn_is_a_typed_error_with_its_field(maker: Omni, prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(errors.BadRequestError) as error:
        maker.draw(prompt, **options)
    assert [violation.field for violation in error.value.fields] == [field]


def test_every_option_of_a_drawing_reaches_its_field() -> None:
    fields = {field.name: field for field in stage_pb2.DiffusionParams.DESCRIPTOR.fields}
    texts = {name for name, field in fields.items() if field.type == field.TYPE_STRING}
    said: dict[str, Any] = {name: "image/webp" if name in texts else 1 for name in DIFFUSION}
    said |= {"sigmas": [1.0, 0.5], "options": {"one": True, "two": 0.5, "three": 3, "four": "x"}}
    said |= dict.fromkeys(GUIDES, picture(1))
    params = for_drawing("a hill", (), said).complete().diffusion  # type: ignore[arg-type]
    told = {field.name: value for field, value in params.ListFields()}
    assert all(told[name] == stage_pb2.Media(media_type="image/png", data=picture(1)) for name in GUIDES)
    named = {ABOUT[name].name: value for name, value in said.items()}
    expected = {"prompt": "a hill", **named, "options": {"one": "true", "two": "0.5", "three": "3", "four": "x"}}
    assert {name: told[name] for name in expected if name not in GUIDES} == {name: expected[name] for name in {*expected} - {*GUIDES}}
    assert told.keys() == expected.keys()
    never = {"width", "height", "steps", "results", "preview_side", "frames", "frames_per_second", "seconds", "flow_shift"}
    assert {name for name in DIFFUSION if ABOUT[name].never_zero} == never


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
        with pytest.raises(errors.BadRequestError):
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
    with pytest.raises(errors.ProtocolError, match="picture 0 of type 'image/png' cannot be decoded"):
        _ = answer.images


def test_without_pillow_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(errors.NotAvailableError) as error:
        _ = answer_of(file.getvalue()).images
    assert "pip install pillow" in error.value.hint


PROMPT, SEED, FRAMES, STEPS, SIDE, SECONDS = "a walk", 7, 6, 4, 16, 1.5
TYPE = "video/x-grey8"
OF_FILM: dict[str, Any] = {"frames": FRAMES, "steps": STEPS, "width": SIDE, "height": SIDE, "seed": SEED}
OF_SOUND: dict[str, Any] = {"seconds": SECONDS, "steps": STEPS, "seed": SEED}


def film_file(shown: int = 0) -> bytes:
    """The film that the toy must make: a byte for each pixel."""
    begun = formulas.noise(SEED, np.arange(FRAMES), np.arange(SIDE), np.arange(SIDE))
    return formulas.latent_after(begun, formulas.steer(PROMPT, "", toy.GUIDANCE, shown), STEPS).astype(np.uint8).tobytes()


def sound_samples() -> Any:
    """float32 [n], as 16 bits have them."""
    samples = formulas.film_sound(SEED, formulas.steer(PROMPT, "", toy.GUIDANCE), 0, round(SECONDS * formulas.SAMPLE_RATE_HZ))[:, 0]
    return np.round(samples * 32768).astype(np.float32) / 32768


def test_a_film_is_a_file_with_its_type_and_frames(maker: Omni, tmp_path: Path) -> None:
    answer = maker.film(PROMPT, **OF_FILM)
    (film,) = answer.videos
    assert film == Film(film_file(), TYPE, FRAMES)
    assert (answer.audio, answer.pictures, answer.seed) == (None, (), SEED)
    assert f"{FRAMES} frames of {TYPE}" in repr(answer) and repr(film) == f"Film({TYPE}, {FRAMES} frames, {len(film.data)} bytes)"
    film.save(tmp_path / "walk.grey")
    assert (tmp_path / "walk.grey").read_bytes() == film.data and "or of another type" in answer._repr_html_()


def test_a_name_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    film = Film(b"x", "video/mp4", 1)
    for name, hint in (("a.webm", "ends in .mp4, or ask for media_type='video/webm'."), ("a.gif", "ends in .mp4."), ("a", "ends in .mp4.")):
        with pytest.raises(errors.RequestError, match="this film is video/mp4") as error:
            film.save(tmp_path / name)
        assert error.value.hint.endswith(hint)
    assert list(tmp_path.iterdir()) == []
    film.save(tmp_path / "walk.MP4")
    assert (tmp_path / "walk.MP4").read_bytes() == b"x"
    assert film._repr_html_() == '<video controls loop src="data:video/mp4;base64,eA=="></video>'


def test_a_film_begins_with_a_picture(maker: Omni) -> None:
    begin = png(np.full((4, 4), 3, np.uint8))
    for image in (begin, [begin], io.BytesIO(begin)):
        (film,) = maker.film(PROMPT, image=image, **OF_FILM).videos
        assert film.data == film_file(shown=48)
    with pytest.raises(errors.BadRequestError, match=r"^image: "):
        maker.film(PROMPT, image=b"no picture", **OF_FILM)
    with pytest.raises(errors.BadRequestError, match=r"^image: .*PNG"):
        maker.film(PROMPT, image=picture(3), **OF_FILM)


def test_pieces_of_a_film_are_the_file_behind_steps(maker: Omni) -> None:
    *events, done = maker.stream_film(PROMPT, **OF_FILM)
    assert isinstance(done, Done)
    assert [(event.done, event.total) for event in events if isinstance(event, Progress)] == [(step, STEPS) for step in range(1, STEPS + 1)]
    pieces = [event for event in events if isinstance(event, VideoDelta)]
    assert len(pieces) > 1 and b"".join(piece.data for piece in pieces) == film_file()
    assert [piece.first_frame for piece in pieces] == [sum(one.frames for one in pieces[:at]) for at in range(len(pieces))]


def test_a_sound_is_heard_and_saved(maker: Omni, tmp_path: Path) -> None:
    answer = maker.sound(PROMPT, **OF_SOUND)
    assert answer.audio is not None and answer.audio.sample_rate == formulas.SAMPLE_RATE_HZ
    np.testing.assert_array_equal(answer.audio.samples, sound_samples())
    answer.save(tmp_path / "rain.wav")
    assert (tmp_path / "rain.wav").read_bytes().startswith(b"RIFF")
    *events, _ = maker.stream_sound(PROMPT, **OF_SOUND)
    chunks = [event for event in events if isinstance(event, AudioChunk)]
    np.testing.assert_array_equal(np.concatenate([chunk.samples for chunk in chunks]), sound_samples())
    assert any(isinstance(event, Progress) for event in events)


def test_who_names_outputs_gets_them(maker: Omni) -> None:
    events = list(maker.stream_film(PROMPT, outputs=["video"], **OF_FILM))
    assert {type(event) for event in events} == {VideoDelta, Done}
    assert maker.film(PROMPT, outputs=["video", "audio"], **OF_FILM, seconds=SECONDS).audio is not None


def test_what_is_made_of_a_prompt_is_what_was_asked_for(maker: Omni) -> None:
    """The toy draws a picture of whoever says no length."""
    for ask, kind, hint in (
        (lambda: maker.film(PROMPT), "film", "Say how long it is: frames."),
        (lambda: maker.sound(PROMPT), "sound", "Say how long it is: seconds."),
        (lambda: maker.draw(PROMPT, **OF_FILM), "picture", "frames, seconds."),
        (lambda: list(maker.stream_film(PROMPT)), "film", "Say how long it is: frames."),
    ):
        with pytest.raises(errors.RequestError, match=f"the drawing ended without a {kind}: toy-film made none of this prompt") as error:
            ask()
        assert error.value.hint.endswith(hint)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("film", "toy makes no films; no other pipeline of this router does; serve a checkpoint that does, such as Wan 2.2"),
        ("sound", "toy makes no sound of a prompt; no other pipeline of this router does; serve a .*, such as Stable Audio Open"),
        ("draw", "toy does not draw; no other pipeline of this router does; serve a checkpoint that does, such as Qwen-Image"),
        ("generate", "toy does not draw; no other pipeline"),
    ],
)
def test_a_pipeline_that_makes_none_says_who_does(toy_address: str, method: str, told: str) -> None:
    with Omni(address=toy_address) as omni, pytest.raises(errors.BadRequestError, match=f"^{told}") as error:
        getattr(omni, method)(PROMPT, **({"width": 8} if method in ("draw", "generate") else {}))
    assert method in ("film", "sound") or error.value.hint == ""


def test_a_private_stack_that_makes_none_says_what_to_give() -> None:
    with Omni(pipeline="toy-picture") as omni:
        with pytest.raises(errors.BadRequestError, match="outputs: toy-picture gives image, progress, not 'video'") as error:
            omni.film(PROMPT)
        assert error.value.message.endswith("not 'video'; serve a checkpoint that does, such as Wan 2.2") and error.value.hint == ""
        with pytest.raises(errors.BadRequestError, match="not 'latents'") as error:
            omni.draw(PROMPT, outputs=["image", "latents"])
        assert (error.value.hint, len(omni.draw(PROMPT).pictures)) == ("", 1)


def test_what_there_could_be_less_of_is_told_where_time_passed(maker: Omni) -> None:
    for ask, told in (
        (lambda: maker.film(PROMPT, **OF_FILM, timeout_s=1e-6), "ask for less: frames, steps."),
        (lambda: maker.sound(PROMPT, **OF_SOUND, timeout_s=1e-6), "ask for less: seconds, steps."),
        (lambda: maker.draw(PROMPT, timeout_s=1e-6), "ask for less: steps."),
    ):
        with pytest.raises(errors.DeadlineError) as error:
            ask()
        assert error.value.hint.endswith(told)


def test_a_drawing_is_saved_by_itself(maker: Omni, tmp_path: Path) -> None:
    drawn = maker.draw(PROMPT)
    for answer, hint in ((maker.film(PROMPT, **OF_FILM), "answer.videos[0].save(path)"), (drawn, "answer.images[0].save(path)")):
        with pytest.raises(errors.RequestError, match="and has no sound") as error:
            answer.save(tmp_path / "x.wav")
        assert hint in error.value.hint


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"frames": 0}, "frames"),
        ({"frames": -1}, "frames"),
        ({"frames": 1.5}, "frames"),
        ({"frames": 1 << 20}, "diffusion.frames"),
        ({"frames_per_second": 0}, "frames_per_second"),
        ({"frames_per_second": 121}, "diffusion.frames_per_second"),
        ({"frames_per_second": float("nan")}, "frames_per_second"),
        ({"flow_shift": 0}, "flow_shift"),
        ({"flow_shift": 1000}, "diffusion.flow_shift"),
        ({"guidance_scale_2": 101}, "diffusion.guidance_scale_2"),
        ({"guidance_scale_2": "much"}, "guidance_scale_2"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 3601}, "diffusion.duration_s"),
        ({"seconds": float("inf")}, "seconds"),
        ({"begin_s": -1}, "diffusion.begin_s"),
        ({"begin_s": True}, "begin_s"),
        ({"media_type": "video/x-flv"}, "diffusion.media_type"),
        ({"steps": 0}, "steps"),
        ({"width": 0}, "width"),
    ],
)
@pytest.mark.parametrize("method", ["film", "sound"])
def test_what_cannot_be_made_is_a_typed_error_with_its_field(maker: Omni, method: str, options: dict[str, Any], field: str) -> None:
    usual = OF_FILM if method == "film" else OF_SOUND
    with pytest.raises(errors.BadRequestError) as error:
        getattr(maker, method)(PROMPT, **{**usual, **options})
    assert [violation.field for violation in error.value.fields] == [field]
    if field == "diffusion.duration_s":
        assert str(error.value).startswith("seconds: must be above 0, at most 3600")


def test_a_film_can_be_shown_to_a_model() -> None:
    film = Film(b"\x1a\x45\xdf\xa3 webm", "video/webm", 1)
    request = for_prompt("What is this?", (), (), film, {}).complete()
    media = request.thinker.messages[0].parts[0].media
    assert (media.data, media.media_type, media.use_audio) == (film.data, "video/webm", False)
    with pytest.raises(errors.BadRequestError, match="is a film, not a picture"):
        for_prompt("What is this?", film, (), (), {}).complete()  # type: ignore[arg-type]
