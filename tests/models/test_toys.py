"""The toys: the film maker draws its formulas, alone and in steps that it shares with others; and the toy that sees and hears says its
formula, from pixels, places on three axes, prompt rows, and frames that need one another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.families import ITEMS, PICTURE, SEEN, SOUND, TOKENS
from helpers.models import said, text_pieces
from helpers.waiting import turning
from omnistage.models.conversation import Media, Turn
from omnistage.models.interface import (
    BadRequest,
    Clip,
    Drawn,
    DrawRequest,
    EncodedPicture,
    FinishReason,
    Piece,
    Preview,
    Sound,
    SpeechRequest,
    StepsDone,
    TensorRows,
    TextPiece,
    TextRequest,
    Wanted,
    inputs_of,
)
from omnistage.models.reports import LoadError
from omnistage.models.toy import formulas
from omnistage.models.toy.files import pixels_of, png, wav
from omnistage.models.toy.film import FILM, FilmMaker, FilmOptions
from omnistage.models.toy.omni import OmniOptions, OmniTalker, OmniThinker, OmniThinkerOptions

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
    async with aclosing(maker.draw(await maker.prepare(request), inputs_of(), wanted)) as pieces:
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
    shown = await draw(FilmMaker(FilmOptions()), replace(HILL, frames=11, seconds=0.3, previews=4), {"audio": 1000})
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
    first, second = [(await asyncio.to_thread(lambda: asyncio.run(draw(maker, HILL)))).pictures for _ in range(2)]
    assert first == second == (await draw(maker, HILL)).pictures


@pytest.mark.parametrize("option", ["max_chunk", "budget", "step_budget", "experts", "workers"])
def test_counts_of_nothing_are_no_options(option: str) -> None:
    with pytest.raises(LoadError, match=f"option {option} of the toy models is 0: give 1 or more"):
        FilmOptions.from_settings({option: 0})


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
    async with aclosing(maker.draw(await maker.prepare(long), inputs_of(), {"video": 0, "image": 0})) as pieces:
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
    async with aclosing(maker.draw(await maker.prepare(request), inputs_of(), {"image": 0, "checkpoint": 0})) as pieces:
        made = [piece async for piece in pieces]
    rows = [piece.rows for piece in made if isinstance(piece, TensorRows)]
    assert len(rows) == 1 and len(rows[0]) == (1 + multistep) * 2 * 24 * 40
    steps = maker.sessions.steps
    again = await draw(maker, replace(request, history=rows[0].astype(np.uint32)), {"image": 0})
    assert again.pictures == [piece for piece in made if isinstance(piece, EncodedPicture)]
    assert maker.sessions.steps - steps == 4 + 2 + 1, "half of the steps, the pictures, and their end"
    with pytest.raises(BadRequest, match="at most"):
        await maker.prepare(replace(request, history=np.zeros((9999, 1), np.uint32)))


# The toy that sees and hears ------------------------------------------------------------------------------------------------------------


SHOWN = Media("image/png", png(PICTURE))
LOOK = TextRequest((Turn("user", ("What is ", SHOWN, " and ", Media("audio/wav", wav(SOUND, formulas.SAMPLE_RATE_HZ)), "?")),), seed=5)
PORTS = {"text": 0, "prompt": 0, "places": 0, "hidden": 0}


def test_places_are_worked_out_by_hand() -> None:
    """Two characters, a picture of 3 by 2 patches, one character: the picture takes as many places as its longer side has patches."""
    pixels = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], [1, 1, 1, 1], [9, 0, 0, 2]], np.uint8)
    patches = [[14, 2, 2, 2], [22, 2, 2, 3], [4, 2, 3, 2], [4, 2, 3, 3], [9, 2, 4, 2], [2, 2, 4, 3]]
    assert formulas.items(["ab", pixels, "c"]).tolist() == [[97, 0, 0, 0], [98, 1, 1, 1], *patches, [99, 5, 5, 5]]
    assert formulas.next_place(formulas.items(["ab", pixels])) == 5


async def test_others_run_while_it_reads_a_long_text() -> None:
    model = OmniThinker(OmniThinkerOptions())
    prepared = await model.prepare(TextRequest((Turn("user", ("a" * (1 << 20),)),), seed=1))
    async with turning() as turns, aclosing(model.generate(prepared, inputs_of(), PORTS)) as pieces:
        await anext(pieces)
        assert turns() > 2


async def test_it_says_the_formula_of_what_it_sees_and_hears() -> None:
    rows: dict[str, list[NDArray[np.generic]]] = {"prompt": [], "places": [], "hidden": []}
    text, order = "", []
    async for piece in said(OmniThinker(OmniThinkerOptions()), LOOK, PORTS):
        if isinstance(piece, TextPiece):
            text += piece.text
            order.append("text")
        else:
            rows[piece.port].append(piece.rows)
            order.append(piece.port)
    assert text == "".join(map(formulas.word, TOKENS))
    assert TOKENS[1] == (31 * 5 + int((ITEMS @ [1, 1, 2, 3]).sum()) + 7 * (formulas.next_place(ITEMS) + 1)) % 1000
    np.testing.assert_array_equal(np.concatenate(rows["prompt"]), formulas.prompt_rows(formulas.items(SEEN)))
    np.testing.assert_array_equal(np.concatenate(rows["places"]), ITEMS)
    np.testing.assert_array_equal(np.concatenate(rows["hidden"]), formulas.omni_rows(TOKENS))
    assert np.concatenate(rows["prompt"]).dtype == np.uint16 and np.concatenate(rows["places"]).dtype == np.int64
    assert max(order.index("prompt"), order.index("places")) < min(order.index("text"), order.index("hidden")), "prompt rows come first"


async def test_rows_of_the_prompt_alone_take_no_token() -> None:
    """A token would take an hour."""
    pieces = [piece async for piece in said(OmniThinker(OmniThinkerOptions(interval_s=3600)), LOOK, {"prompt": 0, "places": 0})]
    assert {piece.port for piece in pieces if isinstance(piece, TensorRows) and piece.last} == {"prompt", "places"}


async def test_a_pixel_and_its_place_count() -> None:
    other = PICTURE.copy()
    other[20, 33] ^= 1
    said = [await tokens_of(picture) for picture in (PICTURE, other, PICTURE.T.copy())]
    assert said[0] not in said[1:]


async def tokens_of(picture: NDArray[np.uint8]) -> list[int]:
    request = TextRequest((Turn("user", ("What is ", Media("image/png", png(picture)))),), seed=5)
    return [token for piece in await text_pieces(OmniThinker(OmniThinkerOptions()), request) for token in piece.token_ids]


async def test_the_row_of_a_token_comes_a_step_after_the_token() -> None:
    given = said(OmniThinker(OmniThinkerOptions(max_chunk=1)), LOOK, {"text": 0, "hidden": 0})
    first, second, third = [await anext(given) for _ in range(3)]
    await given.aclose()
    assert isinstance(first, TextPiece) and isinstance(second, TextPiece) and isinstance(third, TensorRows) and len(third.rows) == 1


# The Talker ------------------------------------------------------------------------------------------------------------------------------

PROMPT = [Piece("prompt", 0, True, formulas.prompt_rows(ITEMS)), Piece("places", 0, True, ITEMS)]


def row(n: int, *, last: bool = False) -> Piece:
    return Piece("hidden", n, last, formulas.omni_rows(TOKENS[n : n + 1]))


class Feeding:
    """Inputs that are given one by one, and frames that are read as they come."""

    def __init__(self, talker: OmniTalker, request: SpeechRequest, first: int = 0) -> None:
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self.frames: list[list[int]] = []
        self.reason: FinishReason | None = None
        self.task = asyncio.create_task(self._listen(talker, request, first))

    async def _inputs(self) -> AsyncIterator[Piece]:
        while True:
            yield await self._queue.get()

    async def _listen(self, talker: OmniTalker, request: SpeechRequest, first: int) -> None:
        async for frames in talker.speak(await talker.prepare(request), self._inputs(), {"codes": first}):
            self.frames += frames.rows.tolist()
            self.reason = frames.finish_reason

    async def give(self, *pieces: Piece) -> int:
        """Frames that there are when nothing more can come of it."""
        for piece in pieces:
            self._queue.put_nowait(piece)
        for _ in range(50):
            await asyncio.sleep(0)
        return len(self.frames)


async def test_it_starves_without_the_next_row_and_wakes_with_it() -> None:
    talker = OmniTalker(OmniOptions())
    speech = Feeding(talker, SpeechRequest(seed=1))
    assert await speech.give(row(0), row(1)) == 0, "the prompt is not there"
    assert await speech.give(PROMPT[0]) == 0
    assert await speech.give(PROMPT[1]) == 2
    for n in range(2, len(TOKENS)):
        assert await speech.give(row(n, last=n == len(TOKENS) - 1)) == n + 1 + formulas.TAIL * (n == len(TOKENS) - 1)
    await speech.task
    assert speech.frames == formulas.omni_frames(ITEMS, TOKENS).tolist()
    assert speech.reason is FinishReason.STOP


async def test_a_frame_needs_the_frame_before_it(seed: int) -> None:
    """Rows in another order make other frames from there on to the end."""
    whole = formulas.omni_frames(ITEMS, TOKENS)
    swapped = formulas.omni_frames(ITEMS, [*TOKENS[:3], TOKENS[4], TOKENS[3], *TOKENS[5:]])
    assert (whole[:3] == swapped[:3]).all() and (whole[3:] != swapped[3:]).any(axis=1).all()
    rng, talker = random.Random(seed), OmniTalker(OmniOptions())
    for known in (0, 1, 5, len(whole) - 1, rng.randrange(len(whole))):
        request = SpeechRequest(seed=1, history=whole[:known])
        assert await spoken(talker, request, known) == whole[known:].tolist()


async def spoken(talker: OmniTalker, request: SpeechRequest, first: int) -> list[list[int]]:
    speech = Feeding(talker, request, first)
    await speech.give(*PROMPT, *(row(n, last=n == len(TOKENS) - 1) for n in range(len(TOKENS))))
    await speech.task
    return speech.frames


@pytest.mark.parametrize("voice", ["toy", "other"])
async def test_voices_differ_and_a_limit_holds(voice: str) -> None:
    whole = formulas.omni_frames(ITEMS, TOKENS, ("toy", "other").index(voice)).tolist()
    assert await spoken(OmniTalker(OmniOptions()), SpeechRequest(seed=1, voice=voice, max_frames=9), 0) == whole[:9]
