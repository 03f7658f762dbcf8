"""Films and sounds of a prompt: `film`, `sound` and their streams against a toy that makes both, and who is told that he cannot."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import servers
from helpers.media_files import picture
from omnistage.client import AsyncOmni, AudioChunk, BadRequestError, DeadlineError, Done, Film, Omni, Progress, RequestError, VideoDelta
from omnistage.client.request import for_prompt
from omnistage.models.toy import film as toy
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png

PROMPT, SEED, FRAMES, STEPS, SIDE, SECONDS = "a walk", 7, 6, 4, 16, 1.5
TYPE = "video/x-grey8"
OF_FILM: dict[str, Any] = {"frames": FRAMES, "steps": STEPS, "width": SIDE, "height": SIDE, "seed": SEED}
OF_SOUND: dict[str, Any] = {"seconds": SECONDS, "steps": STEPS, "seed": SEED}


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    with servers.toy_address(tmp_path_factory.mktemp("film"), "toy-film") as address, Omni(address=address) as omni:
        yield omni


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
    assert (tmp_path / "walk.grey").read_bytes() == film.data
    assert "or of another type" in answer._repr_html_()


def test_a_name_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    film = Film(b"x", "video/mp4", 1)
    for name, hint in (("a.webm", "ends in .mp4, or ask for media_type='video/webm'."), ("a.gif", "ends in .mp4."), ("a", "ends in .mp4.")):
        with pytest.raises(RequestError, match="this film is video/mp4") as error:
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
    with pytest.raises(BadRequestError, match=r"^image: "):
        maker.film(PROMPT, image=b"no picture", **OF_FILM)
    with pytest.raises(BadRequestError, match=r"^image: .*PNG"):
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


async def test_asyncio(maker: Omni) -> None:
    async with AsyncOmni(address=maker.address) as omni:
        (film,) = (await omni.film(PROMPT, **OF_FILM)).videos
        assert film.data == film_file()
        sound = (await omni.sound(PROMPT, **OF_SOUND)).audio
        assert sound is not None and len(sound.samples) == len(sound_samples())
        async with aclosing(omni.stream_film(PROMPT, **OF_FILM)) as events:
            assert b"".join([event.data async for event in events if isinstance(event, VideoDelta)]) == film_file()


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
        with pytest.raises(RequestError, match=f"the drawing ended without a {kind}: toy-film made none of this prompt") as error:
            ask()
        assert error.value.hint.endswith(hint)


def test_a_pipeline_that_makes_none_says_who_does(toy_address: str) -> None:
    with Omni(address=toy_address) as omni:
        for ask, told in (
            (lambda: omni.film(PROMPT), "toy makes no films; no other pipeline of this router does"),
            (lambda: omni.sound(PROMPT), "toy makes no sound of a prompt; no other pipeline of this router does"),
            (lambda: omni.draw(PROMPT), "toy does not draw; no other pipeline of this router does"),
        ):
            with pytest.raises(BadRequestError, match=f"^{told}"):
                ask()


def test_a_private_stack_that_makes_none_says_what_to_give() -> None:
    with Omni(pipeline="toy-picture") as omni:
        with pytest.raises(BadRequestError, match="outputs: toy-picture gives image, progress, not 'video'") as error:
            omni.film(PROMPT)
        assert error.value.hint == "Serve a checkpoint that makes films, such as Wan."
        with pytest.raises(BadRequestError, match="not 'latents'") as error:
            omni.draw(PROMPT, outputs=["image", "latents"])
        assert error.value.hint == ""
        assert len(omni.draw(PROMPT).pictures) == 1


def test_what_there_could_be_less_of_is_told_where_time_passed(maker: Omni) -> None:
    for ask, told in (
        (lambda: maker.film(PROMPT, **OF_FILM, timeout_s=1e-6), "ask for less: frames, steps."),
        (lambda: maker.sound(PROMPT, **OF_SOUND, timeout_s=1e-6), "ask for less: seconds, steps."),
        (lambda: maker.draw(PROMPT, timeout_s=1e-6), "ask for less: steps."),
    ):
        with pytest.raises(DeadlineError) as error:
            ask()
        assert error.value.hint.endswith(told)


def test_a_drawing_is_saved_by_itself(maker: Omni, tmp_path: Path) -> None:
    for answer, hint in (
        (maker.film(PROMPT, **OF_FILM), "answer.videos[0].save(path)"),
        (maker.draw(PROMPT), "answer.images[0].save(path)"),
    ):
        with pytest.raises(RequestError, match="and has no sound") as error:
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
    with pytest.raises(BadRequestError) as error:
        getattr(maker, method)(PROMPT, **{**usual, **options})
    assert [violation.field for violation in error.value.fields] == [field]
    if field == "diffusion.duration_s":
        assert str(error.value).startswith("seconds: must be from 0 to 3600")


def test_a_film_can_be_shown_to_a_model() -> None:
    film = Film(b"\x1a\x45\xdf\xa3 webm", "video/webm", 1)
    request = for_prompt("What is this?", (), (), film, {}).complete()
    media = request.thinker.messages[0].parts[0].media
    assert (media.data, media.media_type, media.use_audio) == (film.data, "video/webm", False)
    with pytest.raises(BadRequestError, match="is a film, not a picture"):
        for_prompt("What is this?", film, (), (), {}).complete()  # type: ignore[arg-type]
