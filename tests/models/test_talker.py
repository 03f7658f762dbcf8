"""The Talker: rows that depend on the text alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.speech import cancel_often, frames_of, pieces, rows_of
from omnistage.engine.types import FinishReason
from omnistage.models.interface import BadRequest, Frames, Piece, SpeechRequest
from omnistage.models.smol.prosody import COUNT, FEATURE_WIDTH, FRAME_RATE_HZ, INDEX, at_speed
from omnistage.models.smol.talker import SmolTalker

TEXT = "Here are **two** tips:\n- Drink 3 cups of water, or tea.\n- Sleep well!\n\nDr. Lee said so in 1999, and zorblings agree."
SUBJECTS, VERBS = ("The old mayor", "A cat", "My neighbours", "Nobody", "I"), ("counted", "saw", "was given", "remembered", "strengthened")
OBJECTS = ("apples", "thick books in the library", "houses by the sea, and more", "chances", "sixths")


async def test_rows_do_not_depend_on_the_deltas(talker: SmolTalker, seed: int) -> None:
    draw = random.Random(seed)
    whole = await rows_of(talker, TEXT)
    assert whole.shape[0] > 4 * FRAME_RATE_HZ
    assert np.array_equal(await rows_of(talker, *TEXT), whole)
    for _ in range(10):
        places = [0, *sorted(draw.sample(range(1, len(TEXT)), draw.randrange(1, 20))), len(TEXT)]
        deltas = [TEXT[a:b] for a, b in pairwise(places)]
        assert np.array_equal(await rows_of(talker, *deltas), whole)


async def test_rows_say_where_they_lie_in_their_phrase(talker: SmolTalker) -> None:
    frames = await frames_of(talker, TEXT)
    assert [one.finish_reason for one in frames] == [None] * (len(frames) - 1) + [FinishReason.STOP]
    assert len(frames[-1].rows) == 0
    for one in frames[:-1]:
        assert one.rows.dtype == np.float32 and one.rows.shape[1] == FEATURE_WIDTH and np.isfinite(one.rows).all()
        assert (one.rows[:, INDEX] == np.arange(len(one.rows))).all()
        assert (one.rows[:, COUNT] == len(one.rows)).all()


async def test_first_rows_come_before_the_text_is_complete(talker: SmolTalker) -> None:
    more = asyncio.Event()

    async def text() -> AsyncIterator[Piece]:
        async for piece in pieces(["Paris has many museums "]):
            yield piece
        await more.wait()

    speech = talker.speak(SpeechRequest(seed=0), text(), {"features": 0})
    first = await anext(speech)
    assert isinstance(first, Frames) and len(first.rows) > 0
    more.set()
    last = await anext(speech)
    assert isinstance(last, Frames) and last.finish_reason is FinishReason.STOP


async def test_speed_is_exact(talker: SmolTalker, seed: int) -> None:
    """Within two percent of the length at speed 1, whatever is said; and no sound is left out."""
    draw = random.Random(seed)
    text = " ".join(f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.randrange(3, 90)} {draw.choice(OBJECTS)}." for _ in range(6))
    length = len(await rows_of(talker, text))
    for speed in (0.5, 0.75, 1.1, 1.25, 1.5, 1.75, 2.0):
        rows = await rows_of(talker, text, request=SpeechRequest(seed=0, speed=speed))
        assert abs(len(rows) * speed / length - 1) < 0.02, (text, speed)
    durations = torch.tensor([draw.randrange(1, 9) for _ in range(60)])
    for speed in (0.5, 1.3, 2.0):
        assert int(at_speed(durations, speed).min()) >= 1
        assert int(at_speed(durations, speed).sum()) == round(int(durations.sum()) / speed)
    assert at_speed(durations, 1.0).tolist() == durations.tolist()


async def test_longer_rests_after_sentences_than_after_commas(talker: SmolTalker) -> None:
    comma, stop, plain = [(await frames_of(talker, f"We went there{mark} Then we left"))[0].rows for mark in (",", ".", "")]
    assert len(stop) > len(comma) > 0
    assert len(plain) > 0


@pytest.mark.parametrize("text", ["", "😀🎉🎉", "你好，世界。", "```\ncode\n```", "...", "\n\n"])
async def test_nothing_to_say_ends_properly(talker: SmolTalker, text: str) -> None:
    (frames,) = await frames_of(talker, text)
    assert (frames.rows.shape, frames.finish_reason) == ((0, FEATURE_WIDTH), FinishReason.STOP)


@lengths.drawn_cells(1, "unit", ["word ", "x", "7", "Well, yes. "])
async def test_20000_characters_come_in_bounded_phrases(talker: SmolTalker, unit: str) -> None:
    text = unit * (20_000 // len(unit))
    phrases = 0
    async for frames in talker.speak(SpeechRequest(seed=0), pieces([text]), {"features": 0}):
        assert isinstance(frames, Frames) and len(frames.rows) < 120 * FRAME_RATE_HZ
        phrases += 1
        if phrases == 8:
            break
    assert phrases == 8


async def test_a_voice_that_it_does_not_have_is_refused(talker: SmolTalker) -> None:
    with pytest.raises(BadRequest, match=r"^talker\.voice: "):
        await talker.prepare(SpeechRequest(seed=0, voice="nobody"))


async def test_cancel_at_any_moment_leaves_nothing_queued(talker: SmolTalker, seed: int) -> None:
    await cancel_often(talker, lambda: talker.speak(SpeechRequest(seed=0), pieces([TEXT] * 5), {"features": 0}), random.Random(seed))
    assert len(await rows_of(talker, TEXT)) > 0


@pytest.mark.parametrize(("limit", "first"), [(1, 0), (7, 0), (100, 0), (100, 40), (100, 99), (100, 100)])
async def test_max_frames_counts_the_rows_before_and_ends_with_length(talker: SmolTalker, limit: int, first: int) -> None:
    whole = await rows_of(talker, TEXT)
    frames = await frames_of(talker, TEXT, request=SpeechRequest(seed=0, max_frames=limit), first=first)
    assert np.array_equal(np.concatenate([one.rows for one in frames]), whole[first:limit])
    assert frames[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("limit", [0, 30])
async def test_speech_that_ends_before_its_first_row_is_refused(talker: SmolTalker, limit: int) -> None:
    with pytest.raises(BadRequest, match=r"^resume\.positions: "):
        await frames_of(talker, "Hello there.", request=SpeechRequest(seed=0, max_frames=limit), first=200)
