"""Words of a text that are not spoken are told, wherever they stand, and once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helpers.speech import frames_of, made_of, rows_of, unspoken_of
from omnistage.models.interface import Alignment, SpeechRequest
from omnistage.models.smol.talker import SmolTalker

TEXT = "Hello 你好. 🙂\n\n🎉 And 世界, or ∯ so\n- ✨\n\nthe end 🙃"
RUNS = ["你好", "🙂", "🎉", "世界", "∯", "✨", "🙃"]


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("🙂", ["🙂"]),
        ("🙂\n\nHello.", ["🙂"]),
        ("Hello. 🙂", ["🙂"]),
        ("Hello.\n\n🙂\n\nHello.", ["🙂"]),
        ("Hello, 🙂, hello.", ["🙂"]),
        ("Hello :-( there :), hello; (5) :D", [":-(", ":)", ":D"]),
        ("| one | 🙂 |\n|---|---|\n| 🎉 | two |", ["🙂", "🎉"]),
        ("你好世界" * 60, ["你好世界" * 50, "你好世界" * 10]),
        ("# 🙂\n**🎉** [✨](https://example.com/你好) ![🙃](x.png)", ["🙂", "🎉", "✨", "🙃"]),
        ("Say:\n```\n你好\n```\n<b>Hello</b> [there](https://example.com/世界).", []),
    ],
)
async def test_each_kind_of_cut_tells_it(talker: SmolTalker, text: str, runs: list[str]) -> None:
    """Marks that Markdown leaves out were not to be read, and are not told."""
    assert await unspoken_of(talker, text) == runs


async def test_it_does_not_depend_on_the_deltas(talker: SmolTalker) -> None:
    assert await unspoken_of(talker, TEXT) == RUNS
    assert await unspoken_of(talker, *TEXT) == RUNS


async def test_it_is_that_of_the_whole_text_wherever_speech_goes_on(talker: SmolTalker, seed: int) -> None:
    """Also where nothing is wanted any more, or the times of words alone."""
    whole = len(await rows_of(talker, TEXT))
    for first in (0, random.Random(seed).randrange(whole), whole):
        assert await unspoken_of(talker, TEXT, features=first) == RUNS
    assert await unspoken_of(talker, TEXT, alignment=0) == RUNS
    assert await unspoken_of(talker, TEXT) == RUNS
    assert await made_of(talker, TEXT, wanted={}) == []


async def test_what_comes_after_the_last_frame_is_not_counted(talker: SmolTalker) -> None:
    first, second = "Hello 你好 there.", "🙂 And 世界 so on."
    begun = len(await rows_of(talker, first))
    for most, runs in ((1, ["你好"]), (begun, ["你好"]), (begun + 1, ["你好", "🙂", "世界"])):
        request = SpeechRequest(seed=0, max_frames=most)
        assert await unspoken_of(talker, f"{first} {second}", request=request, features=0) == runs, most


GIVEN = "# *Hello* _you_ \\<b>there</b> [x](y)\nand more\n```\nText | 世界 |\n```"


async def test_plain_text_has_no_markdown(talker: SmolTalker) -> None:
    plain = SpeechRequest(seed=0, plain=True)
    assert "世界" in await unspoken_of(talker, GIVEN, request=plain)
    assert "世界" not in await unspoken_of(talker, GIVEN)
    spoken = await rows_of(talker, "5 * 3 # 2", request=plain)
    assert not np.array_equal(spoken, await rows_of(talker, "5 3 2", request=plain))
    assert len(await frames_of(talker, "```\ncode\n```", request=plain)) > 1


async def test_places_of_words_in_plain_text_are_those_of_what_was_given(talker: SmolTalker) -> None:
    text = "**Hello**\n\n  <i>you</i> ``and`` me"
    made = await made_of(talker, text, wanted={"alignment": 0}, request=SpeechRequest(seed=0, plain=True))
    words = [word for one in made if isinstance(one, Alignment) for word in one.words]
    told = [text[word.first_character : word.first_character + word.character_count] for word in words]
    for word in ("Hello", "you", "and", "me"):
        assert any(word in one for one in told), told
