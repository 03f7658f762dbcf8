"""The toy film maker draws its formulas, alone and in steps that it shares with others, and frees what is given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.families import PICTURE
from omnistage.models.conversation import Media
from omnistage.models.interface import (
    BadRequest,
    Clip,
    Drawn,
    DrawRequest,
    EncodedPicture,
    Preview,
    Sound,
    StepsDone,
    TensorRows,
    Wanted,
    no_inputs,
)
from omnistage.models.reports import LoadError
from omnistage.models.steps.loop import Aside
from omnistage.models.steps.session import MAX_UNREAD
from omnistage.models.toy import formulas
from omnistage.models.toy.files import pixels_of, png
from omnistage.models.toy.film import FILM, FilmMaker, FilmOptions, ToyFilmJob

ALL = {"image": 0, "video": 0, "audio": 0, "progress": 0}
HILL = DrawRequest(seed=7, prompt="a hill", width=40, height=24, steps=5)


@dataclass
class FilmOutput:
    """All that came of a request."""

    progress: list[int] = field(default_factory=list)
    previews: list[Preview] = field(default_factory=list)
    pictures: list[EncodedPicture] = field(default_factory=list)
    film: bytes = b""
    frames: int = 0
    sound: list[NDArray[np.float32]] = field(default_factory=list)

    def take(self, piece: Drawn) -> None:
        match piece:
            case StepsDone(step, _):
                self.progress.append(step)
            case Preview():
                self.previews.append(piece)
            case EncodedPicture():
                self.pictures.append(piece)
            case Clip(data, media_type, frames):
                assert media_type == FILM
                self.film += data
                self.frames += frames
            case Sound(samples):
                self.sound.append(samples)


async def draw(maker: FilmMaker, request: DrawRequest, wanted: Wanted = ALL) -> FilmOutput:
    shown = FilmOutput()
    async with aclosing(maker.draw(await maker.prepare(request), no_inputs(), wanted)) as pieces:
        async for piece in pieces:
            shown.take(piece)
    return shown


def latent(request: DrawRequest, planes: int, steps: int, steer: int) -> NDArray[np.int64]:
    places = (np.arange(planes), np.arange(request.height), np.arange(request.width))
    return formulas.latent_after(formulas.noise(request.seed, *places), steer, steps)


def test_a_step_is_worked_out_by_hand() -> None:
    """Seed 7, plane 1, y 2, x 3: 7 + 3 + 10 + 21 = 41. Two steps with 10: 3 * 41 + 11 = 134, then 3 * 134 + 12 = 414 - 256 = 158."""
    begun = formulas.noise(7, np.array([1]), np.array([2]), np.array([3]))
    assert begun.item() == 41
    assert [formulas.latent_after(begun, 10, steps).item() for steps in (1, 2)] == [134, 158]
    assert formulas.steer("b", "a", 4) == (97 + 4 * 1) % 256


async def test_pictures_and_their_layers_are_the_formula() -> None:
    request = replace(HILL, results=2, layers=3, previews=2, negative_prompt="fog", guidance_scale=7.0)
    shown = await draw(FilmMaker(FilmOptions()), request)
    steer = formulas.steer("a hill", "fog", 7)
    expected = latent(request, 2, 5, steer)
    assert [picture.layer for picture in shown.pictures] == [0, 1, 2, 0, 1, 2]
    for n, picture in enumerate(shown.pictures):
        np.testing.assert_array_equal(pixels_of(picture.data), (expected[n // 3] + 16 * (n % 3)) % 256)
    assert [preview.step for preview in shown.previews] == [3, 5]
    for preview in shown.previews:
        np.testing.assert_array_equal(pixels_of(preview.data), latent(request, 2, preview.step, steer)[0] // 16 * 16)
    assert shown.progress[-1] == 5 and shown.progress == sorted(shown.progress)
    assert not shown.film and not shown.sound


async def test_a_film_and_its_sound_are_the_formula() -> None:
    request = replace(HILL, frames=11, seconds=0.3, images=(Media("image/png", png(PICTURE)),))
    shown = await draw(FilmMaker(FilmOptions()), request)
    steer = formulas.steer("a hill", "", 4, int(PICTURE.sum()))
    assert shown.frames == 11 and not shown.pictures
    assert shown.film == latent(request, 11, 5, steer).astype(np.uint8).tobytes()
    np.testing.assert_array_equal(np.concatenate(shown.sound), formulas.film_sound(7, steer, 0, 7200))
    assert len(shown.sound) > 1


async def test_what_is_not_wanted_is_not_drawn() -> None:
    request = replace(HILL, frames=11, seconds=0.3, previews=4)
    shown = await draw(FilmMaker(FilmOptions()), request, {"audio": 1000})
    assert not (shown.film or shown.previews or shown.progress)
    assert sum(map(len, shown.sound)) == 6200


async def test_those_of_one_size_share_their_steps_and_each_is_what_it_is_alone(seed: int) -> None:
    """Whatever their steps, guidance and previews; and a late one joins in."""
    rng = random.Random(seed)
    requests = [
        replace(HILL, seed=n, steps=rng.randint(1, 9), guidance_scale=float(n), results=rng.randint(1, 3), width=rng.choice([40, 48]))
        for n in range(8)
    ]
    alone = [(await draw(FilmMaker(FilmOptions()), request)).pictures for request in requests]
    maker = FilmMaker(FilmOptions())

    async def late(n: int) -> list[EncodedPicture]:
        for _ in range(3 * n):
            await asyncio.sleep(0)
        return (await draw(maker, requests[n])).pictures

    assert await asyncio.gather(*map(late, range(len(requests)))) == alone
    assert max(maker.groups) > 1, "nobody shared a step"
    assert len(maker.groups) < sum(request.steps for request in requests)
    assert (maker.sessions.running, maker.load().queued) == (0, 0)
    batches = maker.load().batches
    assert batches is not None and batches.steps - len(maker.groups) == batches.stepped - sum(maker.groups) > 0, "pieces are decoded alone"


async def test_one_that_is_given_up_at_any_step_leaves_the_others_alone() -> None:
    whole = (await draw(FilmMaker(FilmOptions()), HILL)).pictures
    for step in range(HILL.steps + 1):
        maker = FilmMaker(FilmOptions())
        kept = asyncio.create_task(draw(maker, HILL))
        given_up = maker.draw(await maker.prepare(replace(HILL, seed=9)), no_inputs(), ALL)
        while True:
            piece = await anext(given_up)
            if isinstance(piece, EncodedPicture) or piece.step >= step:  # type: ignore[union-attr]
                break
        await given_up.aclose()
        assert maker.sessions.running <= 1
        assert (await kept).pictures == whole
        assert (maker.sessions.running, maker.load().queued) == (0, 0)


async def test_one_who_does_not_read_holds_only_itself_up() -> None:
    maker = FilmMaker(FilmOptions(max_chunk=1))
    film = replace(HILL, frames=40)
    slow = maker.draw(await maker.prepare(film), no_inputs(), {"video": 0})
    assert isinstance(await anext(slow), Clip)
    for _ in range(3):
        assert (await draw(maker, HILL)).pictures
    for _ in range(100):
        await asyncio.sleep(0)
    units = maker.sessions.steps
    for _ in range(100):
        await asyncio.sleep(0)
    assert maker.sessions.steps == units, "it goes on though nobody reads"
    assert units < 3 * (HILL.steps + 2) + film.steps + MAX_UNREAD + 4
    rest = [piece async for piece in slow]
    assert len(rest) == 39
    assert maker.sessions.running == 0


class Choking(FilmMaker):
    """Cannot draw a plane of ones: the step of every group that it is in fails."""

    def step(self, jobs: Sequence[ToyFilmJob], aside: Aside | None) -> None:
        if any(job.scene.request.prompt == "choke" for job in jobs):
            raise FloatingPointError("a latent is not finite")
        super().step(jobs, aside)


async def test_one_that_fails_ends_alone() -> None:
    whole = (await draw(FilmMaker(FilmOptions()), HILL)).pictures
    maker = Choking(FilmOptions())
    good, bad, other = await asyncio.gather(
        draw(maker, HILL), draw(maker, replace(HILL, prompt="choke")), draw(maker, HILL), return_exceptions=True
    )
    assert isinstance(bad, FloatingPointError)
    assert isinstance(good, FilmOutput) and isinstance(other, FilmOutput) and good.pictures == other.pictures == whole
    assert (maker.sessions.running, maker.load().queued) == (0, 0)


async def test_those_for_whom_there_is_no_room_wait_their_turn() -> None:
    maker = FilmMaker(FilmOptions(budget=70))
    drawings = [asyncio.create_task(draw(maker, replace(HILL, seed=n))) for n in range(6)]
    for _ in range(4):
        await asyncio.sleep(0)
    assert maker.load().queued == 4 and maker.sessions.running == 2
    drawings[5].cancel()
    await asyncio.wait([drawings[5]])
    assert maker.load().queued <= 3
    assert all([(await drawing).pictures for drawing in drawings[:5]])
    assert max(maker.groups) == 2


@pytest.mark.parametrize("interval_s", [0.0, 0.001])
async def test_a_loop_that_ends_leaves_nothing_for_the_next(interval_s: float) -> None:
    """As tests have them: a model outlives the event loop of its callers."""
    maker = FilmMaker(FilmOptions(interval_s=interval_s))

    def elsewhere() -> list[EncodedPicture]:
        return asyncio.run(draw(maker, HILL)).pictures

    first = await asyncio.to_thread(elsewhere)
    assert await asyncio.to_thread(elsewhere) == first == (await draw(maker, HILL)).pictures


class Misgrouping(FilmMaker):
    """Has a bug: nobody can say any more who steps with whom."""

    def key(self, job: ToyFilmJob) -> tuple[int, int]:
        raise AssertionError("told to fail")


@pytest.mark.parametrize("option", ["max_chunk", "budget", "step_budget", "experts", "workers"])
def test_counts_of_nothing_are_no_options(option: str) -> None:
    with pytest.raises(LoadError, match=f"option {option} of the toy models is 0: give 1 or more"):
        FilmOptions.from_settings({option: 0})


async def test_a_bug_of_the_model_ends_every_drawing_and_lets_none_wait_for_ever() -> None:
    maker = Misgrouping(FilmOptions(budget=70))
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*(draw(maker, replace(HILL, seed=n)) for n in range(4)), return_exceptions=True)
    assert [type(end) for end in ends] == [AssertionError] * 4
    assert "told to fail" in str(ends[0])
    assert (maker.sessions.running, maker.load().queued) == (0, 0)


def by_hand(request: DrawRequest, steer: int, *, experts: int, multistep: bool) -> NDArray[np.int64]:
    """One step after the other, as the options say it."""
    places = (np.arange(request.results), np.arange(request.height), np.arange(request.width))
    x = formulas.noise(request.seed, *places)
    before = np.zeros_like(x)
    for step in range(1, request.steps + 1):
        made = (3, 5)[experts == 2 and 2 * (step - 1) >= request.steps] * x
        x = (made + (before if multistep else 0) + steer + step) % 256
        before = made % 256
    return x


@pytest.mark.parametrize(("experts", "multistep", "workers"), [(2, False, 1), (1, True, 1), (2, True, 2)])
async def test_parts_that_change_between_steps_and_steps_with_a_history_are_the_formula(
    experts: int, multistep: bool, workers: int, seed: int
) -> None:
    """Whoever draws beside it, with other steps and so at another part."""
    rng = random.Random(seed)
    maker = FilmMaker(FilmOptions(experts=experts, multistep=multistep, workers=workers, interval_s=0.0005))
    asked = [replace(HILL, seed=rng.getrandbits(40), steps=rng.randint(1, 9), results=rng.randint(1, 2)) for _ in range(12)]
    made = await asyncio.gather(*(draw(maker, request) for request in asked))
    for request, shown in zip(asked, made, strict=True):
        expected = by_hand(request, formulas.steer("a hill", "", 4), experts=experts, multistep=multistep)
        for picture, plane in zip(shown.pictures, expected, strict=True):
            np.testing.assert_array_equal(pixels_of(picture.data), plane)
    assert max(maker.groups) > 1


async def test_workers_that_have_nothing_to_do_share_those_that_draw() -> None:
    maker = FilmMaker(FilmOptions(workers=2))
    await asyncio.gather(*(draw(maker, replace(HILL, seed=seed)) for seed in range(4)))
    assert set(maker.groups) == {2}


@pytest.mark.parametrize("of", ["film", "pictures"])
async def test_what_is_decoded_holds_nobody_up(of: str) -> None:
    """A small picture of somebody else comes before the pieces of a long film, or of many pictures."""
    maker = FilmMaker(FilmOptions(max_chunk=1))
    long = replace(HILL, client="a", frames=64 if of == "film" else 0, results=1 if of == "film" else 8)
    small = replace(HILL, client="b", width=8, height=8)
    async with aclosing(maker.draw(await maker.prepare(long), no_inputs(), {"video": 0, "image": 0})) as pieces:
        await anext(pieces)
        before, ends = maker.sessions.steps, list[int]()
        theirs = asyncio.create_task(draw(maker, small))
        theirs.add_done_callback(lambda _: ends.append(maker.sessions.steps))
        assert len([piece async for piece in pieces]) == (63 if of == "film" else 7)
        assert len((await theirs).pictures) == 1
        assert ends[0] - before <= small.steps + 2 + 4, "its steps, its picture, its end, and a few of the other's between"


@pytest.mark.parametrize("multistep", [False, True])
async def test_a_drawing_goes_on_in_the_middle_of_its_steps(multistep: bool) -> None:
    maker = FilmMaker(FilmOptions(experts=2, multistep=multistep))
    request = replace(HILL, steps=8, results=2)
    async with aclosing(maker.draw(await maker.prepare(request), no_inputs(), {"image": 0, "checkpoint": 0})) as pieces:
        made = [piece async for piece in pieces]
    rows = [piece.rows for piece in made if isinstance(piece, TensorRows)]
    assert len(rows) == 1 and len(rows[0]) == (1 + multistep) * 2 * 24 * 40
    steps = maker.sessions.steps
    again = await draw(maker, replace(request, history=rows[0].astype(np.uint32)), {"image": 0})
    assert again.pictures == [piece for piece in made if isinstance(piece, EncodedPicture)]
    assert maker.sessions.steps - steps == 4 + 2 + 1, "half of the steps, the pictures, and their end"
    with pytest.raises(BadRequest, match="at most"):
        await maker.prepare(replace(request, history=np.zeros((9999, 1), np.uint32)))
