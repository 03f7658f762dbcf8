"""A list of texts is a list of answers: in order, beside each other, never more at once than there are places."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any, assert_type

import numpy as np
import pytest

from helpers import lengths
from helpers.waiting import until
from omnistage.client import Answer, AsyncOmni, BadRequestError, Omni, OverloadedError
from omnistage.client.call import FIRST_ROOM, LARGEST_ROOM, Together
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png

ENDLESS = 32768
ANSWER = Answer.__new__(Answer)


class PlacesTogether:
    """Something to ask, with as many places as it says. others: how many of them somebody else has."""

    def __init__(self, places: int, wrong: Sequence[str] = (), others: int = 0, delay_s: float | None = 0.0) -> None:
        self.places, self.wrong, self.others, self.delay_s = places, wrong, others, delay_s
        self.now = self.most = self.refused = 0
        self.ended: list[str] = []

    async def ask(self, text: str) -> Answer:
        if self.now + self.others >= self.places:
            self.refused += 1
            error = OverloadedError("all places are taken")
            error.retry_delay_s = self.delay_s
            if not self.now:
                self.others -= 1
            raise error
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            if text in self.wrong:
                raise BadRequestError.of("prompt", f"{text} is wrong")
            return ANSWER
        finally:
            self.now -= 1
            self.ended.append(text)


@pytest.mark.parametrize("places", [1, 2, 3, 7, 200])
async def test_all_are_answered_however_few_places_there_are(places: int) -> None:
    asked = PlacesTogether(places)
    texts = [str(i) for i in range(200)]
    assert len(await Together(asked.ask, 60.0).answers(texts)) == 200
    assert sorted(asked.ended) == sorted(texts)
    assert asked.most <= min(places, LARGEST_ROOM)
    assert asked.refused <= FIRST_ROOM + 4, "it learns how many there are"


async def test_a_moment_without_places_does_not_bind_the_rest() -> None:
    """All have places but the first ones: at the beginning, and once more in the middle."""
    for full in ({*range(4)}, {*range(150, 170)}):
        asked = PlacesTogether(1 << 30)
        count = 0

        async def ask(text: str, full: set[int] = full, asked: PlacesTogether = asked) -> Answer:
            nonlocal count
            count += 1
            if count - 1 in full:
                await asyncio.sleep(0)
                error = OverloadedError("all places are taken")
                error.retry_delay_s = 0.0
                raise error
            return await asked.ask(text)

        assert len(await Together(ask, 60.0).answers([str(i) for i in range(400)])) == 400
        assert asked.most == LARGEST_ROOM
        asked.most = 0


async def test_each_time_that_places_are_tried_out_again_is_rarer() -> None:
    asked = PlacesTogether(1)
    await Together(asked.ask, 60.0).answers([str(i) for i in range(2000)])
    assert asked.refused <= FIRST_ROOM + 4 + 2000 // LARGEST_ROOM


async def test_places_that_are_known_are_not_tried_out() -> None:
    asked = PlacesTogether(2)
    await Together(asked.ask, 60.0, 2).answers([str(i) for i in range(20)])
    assert (asked.most, asked.refused) == (2, 0)


async def test_what_others_have_is_waited_for() -> None:
    asked = PlacesTogether(3, others=3)
    assert len(await Together(asked.ask, 60.0).answers(["a", "b", "c"])) == 3


async def test_patience_ends() -> None:
    asked = PlacesTogether(0, others=1 << 30, delay_s=5.0)
    with pytest.raises(OverloadedError) as refused:
        await Together(asked.ask, 1.0).answers(["a", "b"])
    assert refused.value.answers == [None, None]


async def test_the_first_error_of_the_list_comes_when_all_have_ended_with_the_answers_that_came() -> None:
    asked = PlacesTogether(100, wrong=["7", "3"])
    with pytest.raises(BadRequestError, match="3 is wrong") as refused:
        await Together(asked.ask, 60.0).answers([str(i) for i in range(10)])
    assert len(asked.ended) == 10
    assert [i for i, answer in enumerate(refused.value.answers) if answer is None] == [3, 7]
    assert any("prompt[3] of 10, and 1 more failed" in note for note in refused.value.__notes__)


async def test_what_is_no_error_of_an_answer_ends_all_at_once() -> None:
    asked = PlacesTogether(100)

    async def ask(text: str) -> Answer:
        if text == "2":
            raise TypeError("a bug")
        return await asked.ask(text)

    with pytest.raises(TypeError, match="a bug"):
        await Together(ask, 60.0).answers([str(i) for i in range(50)])
    assert asked.now == 0 and len(asked.ended) < 50


async def test_as_few_tasks_as_are_asked_at_once() -> None:
    seen: list[int] = []

    async def ask(text: str) -> Answer:
        seen.append(len(asyncio.all_tasks()))
        return ANSWER

    assert len(await Together(ask, 60.0).answers(["a"] * 10_000)) == 10_000
    assert max(seen) <= LARGEST_ROOM + 2


def test_a_list_is_answered_in_its_order_by_both_clients(toy_address: str) -> None:
    texts = [f"text {i}" for i in range(30)]
    with Omni(address=toy_address) as omni:
        alone = omni.generate(texts[7], seed=3)
        answers = omni.generate(texts, seed=3)
        assert_type(alone, Answer)
        assert_type(answers, list[Answer])
        assert [answer.text for answer in answers] == [formulas.text(3, text, formulas.NATURAL_LENGTH) for text in texts]
        assert (answers[7].text, answers[7].seed) == (alone.text, 3)
        assert omni.generate([]) == []
        assert len(omni.generate(tuple(texts[:2]))) == 2

    async def asked() -> list[Answer]:
        async with AsyncOmni(address=toy_address) as other:
            return await other.generate(texts, seed=3)

    assert [answer.text for answer in asyncio.run(asked())] == [answer.text for answer in answers]


@pytest.mark.parametrize(
    ("prompt", "options", "told"),
    [
        (["a", 3], {}, r"prompt\[1\]: is 3; it must be text"),
        ([{"role": "user", "content": "a"}], {}, r"prompt\[0\]: is a turn of a conversation, which chat takes"),
        (["a", ""], {}, r"prompt\[1\]: is empty"),
        (["a", " "], {}, r"prompt\[1\]: is empty"),
        ([], {"max_tokens": "3"}, "max_tokens: is '3'; it must be a whole number"),
        (["a", "b"], {"max_tokens": "3"}, "max_tokens: is '3'; it must be a whole number"),
        ({"a": 1}, {}, "chat takes a conversation"),
        (iter(["a"]), {}, r"a list of texts: list\(...\) makes one"),
        (["a"], {"request_id": "one"}, "request_id: names a single answer"),
    ],
)
def test_a_list_that_is_not_one_is_refused_before_anything_is_asked(
    toy_address: str, prompt: Any, options: dict[str, Any], told: str
) -> None:
    with Omni(address=toy_address) as omni, pytest.raises(BadRequestError, match=told) as told_error:
        omni.generate(prompt, **options)
    assert not getattr(told_error.value, "__notes__", ()), "it is about all of them, or names the one"


def test_events_are_those_of_one_text(toy_address: str) -> None:
    with Omni(address=toy_address) as omni, pytest.raises(BadRequestError, match="generate also takes a list of texts"):
        omni.stream(["a", "b"])  # type: ignore[arg-type]


async def test_a_cancelled_list_leaves_nothing_behind(toy_address: str) -> None:
    async with AsyncOmni(address=toy_address) as omni:
        beside = asyncio.all_tasks()
        asking = asyncio.create_task(omni.generate(["a"] * 9, max_tokens=ENDLESS, ignore_eos=True))
        await until(lambda: len(asyncio.all_tasks() - beside) > FIRST_ROOM)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not [task for task in asyncio.all_tasks() - beside if "ask" in str(task.get_coro())]
        assert (await omni.generate("Hi", seed=1)).text, "and the next one is answered"


@lengths.long_form(
    "client/test_together.py::test_a_list_is_answered_in_its_order_by_both_clients",
    "client/test_media.py::test_a_file_is_what_it_was_however_it_is_handed_over",
    unkept="a file is read once for all texts",
)
def test_all_texts_have_the_same_media_also_of_an_open_file() -> None:
    file = io.BytesIO(png(np.arange(64, dtype=np.uint8).reshape(8, 8)))
    with Omni(pipeline="toy-omni") as omni:
        alone = omni.generate("What?", images=file.getvalue(), seed=1)
        file.seek(0)
        answers = omni.generate(["What?", "And?", "What?"], images=file, seed=1)
    assert answers[0].text == answers[2].text == alone.text != answers[1].text
