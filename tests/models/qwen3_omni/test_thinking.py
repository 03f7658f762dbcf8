"""A checkpoint that thinks before it answers: what is told apart, and what a Talker gets of it; and one that is asked without words."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from helpers import media_files
from helpers.checkpoints import change_json, linked
from helpers.run import messages
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.models.conversation import Media, TextConstraint, Turn
from omnistage.models.interface import FinishReason, Sampling, TensorRows, TextPiece, TextRequest, Wanted, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.config import read_thinker_config
from omnistage.models.qwen3_omni.thinker import Qwen3Thinker, load_thinker, tokenizer_of
from omnistage.models.speech.talker import HIDDEN, PLACES, PROMPT
from omnistage.models.text.thinker import USUAL_TOKENS
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny
from omnistage.models.tiny.qwen3_omni import TEMPLATE, THINKING_TEMPLATE
from omnistage.router.pipeline import load_pipeline
from omnistage.router.request import validate
from omnistage.thinker.stage import parse
from omnistage.v1 import omni_pb2, stage_pb2

ASKED = TextRequest((Turn("user", ("What is this?",)),), seed=1, max_tokens=60)
LETTERS = TextConstraint("regex", "[a-c]{3,9}")
EVERY = {"text": 0, PROMPT: 0, PLACES: 0, HIDDEN: 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking") / "made"
    make_tiny("qwen3-omni-thinking", folder, CheckpointOrder())
    return folder


@pytest.fixture(scope="module")
def thinker(made: Path) -> Iterator[Qwen3Thinker]:
    model = loaded(made)
    yield model
    asyncio.run(model.close())


def loaded(folder: Path, **options: Any) -> Qwen3Thinker:
    return load_thinker(folder, LoadOptions(path=folder, dtype="float32", **options))


def with_template(folder: Path, like: Path, template: str) -> Path:
    """A checkpoint that is like another one, with another chat template."""
    linked(like, folder, "chat_template.json")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return folder


@dataclass
class ThoughtAndAnswer:
    """All that came of a request: tokens of the thought and of the answer."""

    thought: str
    text: str
    thinking: list[int]
    answer: list[int]
    reason: FinishReason | None
    rows: dict[str, int]


async def said(model: Qwen3Thinker, request: TextRequest, wanted: Wanted | None = None) -> ThoughtAndAnswer:
    made = ThoughtAndAnswer("", "", [], [], None, {})
    async with aclosing(model.generate(await model.prepare(request), inputs_of(), wanted or {"text": 0})) as pieces:
        async for piece in pieces:
            if isinstance(piece, TensorRows):
                made.rows[piece.port] = made.rows.get(piece.port, 0) + len(piece.rows)
                continue
            assert isinstance(piece, TextPiece)
            made.thought += piece.thought or ""
            made.text += piece.text
            (made.answer if piece.thought is None else made.thinking).extend(piece.token_ids)
            made.reason = piece.finish_reason
    return made


def drawn(model: Qwen3Thinker, **changed: object) -> TextRequest:
    """A request whose thought ends after some tokens."""
    marks = model.tokenizer.thinks
    assert marks is not None
    bias = {marks.closes: 6.5, marks.opens: -100.0}
    return replace(ASKED, sampling=Sampling(temperature=1, logit_bias=bias), **changed)  # type: ignore[arg-type]


def test_it_is_served_by_its_thinker_alone(made: Path) -> None:
    assert layout_of(Choice(["qwen3_omni"], {"": str(made)})).names == "qwen3_omni-text"


async def test_the_thought_is_told_apart_and_goes_on_anywhere(thinker: Qwen3Thinker, seed: int) -> None:
    asked = drawn(thinker, seed=seed % 1000, max_tokens=200, constraint=LETTERS)
    whole = await said(thinker, asked)
    assert thinker.tokenizer.thinks is not None and whole.thinking[-1] == thinker.tokenizer.thinks.closes
    assert re.fullmatch(LETTERS.text, whole.text) and whole.reason is FinishReason.STOP
    assert "</think>" not in whole.thought + whole.text
    tokens = [*whole.thinking, *whole.answer]
    for cut in {0, len(whole.thinking), *random.Random(seed).choices(range(len(tokens)), k=3)}:
        rest = await said(thinker, replace(asked, history=tuple(tokens[:cut])))
        assert (rest.thinking, rest.answer) == (whole.thinking[cut:], whole.answer[max(cut - len(whole.thinking), 0) :]), cut
        assert whole.text.endswith(rest.text) and whole.thought.endswith(rest.thought)


async def test_what_is_allowed_may_end_within_it(thinker: Qwen3Thinker) -> None:
    marks = thinker.tokenizer.thinks
    assert marks is not None
    never = Sampling(temperature=1, logit_bias={marks.closes: -100.0})
    for constraint in (None, LETTERS):
        cut = await said(thinker, replace(ASKED, sampling=never, max_tokens=7, ignore_eos=True, constraint=constraint))
        assert (len(cut.thinking), cut.answer, cut.text, cut.reason) == (7, [], "", FinishReason.LENGTH)


async def test_an_answer_that_begins_in_a_thought_has_what_the_context_leaves(made: Path, tmp_path: Path) -> None:
    """Where neither request nor pipeline says how much; what is no thought has less."""

    def most(model: Qwen3Thinker, max_tokens: int = 0) -> int:
        asked = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=messages("Hi"), max_tokens=max_tokens))
        params = validate(asked, {"only": load_pipeline("qwen3_omni-text")}).params["thinker"].thinker
        return parse(params, 1, model.info.usual_tokens).max_tokens

    options = {"family": {"context": 96}}
    thinks, answers = loaded(made, **options), loaded(with_template(tmp_path / "answers", made, TEMPLATE), **options)
    assert (most(thinks), most(answers)) == (96, USUAL_TOKENS)
    assert most(thinks, max_tokens=7) == most(answers, max_tokens=7) == 7
    asked = replace(ASKED, max_tokens=most(thinks), ignore_eos=True)
    whole = await said(thinks, asked)
    assert len(whole.thinking) + len(whole.answer) == 96 - len(thinks.prompt(asked.turns))
    for model in (thinks, answers):
        await model.close()


async def test_stop_strings_are_those_of_the_answer(thinker: Qwen3Thinker) -> None:
    asked = drawn(thinker, seed=3, constraint=TextConstraint("regex", "abcabc"))
    thought = (await said(thinker, asked)).thought
    stopped = await said(thinker, replace(asked, stop=(thought[:1], "ca")))
    assert stopped.thought == thought != ""
    assert stopped.text == min("abcabc".partition(thought[:1])[0], "ab", key=len)


def test_the_thought_of_an_earlier_answer_is_not_in_the_prompt(thinker: Qwen3Thinker) -> None:
    def ids(answer: str) -> tuple[int, ...]:
        return thinker.prompt((*ASKED.turns, Turn("assistant", (answer,)), Turn("user", ("And that?",))))

    assert ids("<think>\nIt is red.\n</think>\n\nA thing.") == ids("It is red.</think>A thing.") == ids("A thing.")
    assert len(ids("I think: a thing.")) > len(ids("A thing."))


@pytest.mark.parametrize(
    "parts",
    [("<think>It is red.</think>\n", "\nA thing."), ("It ", "is red.</thi", "nk>", "A ", "thing."), ("a</think>b", "</think>A thing.")],
)
def test_nor_where_it_is_in_several_parts(thinker: Qwen3Thinker, parts: tuple[str, ...]) -> None:
    def ids(*parts: str) -> tuple[int, ...]:
        return thinker.prompt((*ASKED.turns, Turn("assistant", parts), Turn("user", ("And that?",))))

    assert ids(*parts) == ids("A thing.")


def test_marks_that_people_write_are_text(thinker: Qwen3Thinker) -> None:
    marks = thinker.tokenizer.thinks
    assert marks is not None
    for role in ("system", "user"):
        text = "Say </think> or <think> <tool_call>."
        ids = thinker.prompt((Turn(role, (text,)), *ASKED.turns))
        assert (ids.count(marks.opens), ids.count(marks.closes)) == (1, 0) and marks.opens in ids[-3:]
        assert text in b"".join(map(thinker.tokenizer.piece, ids)).decode()


async def test_what_a_text_is_kept_to_has_no_thought_that_nobody_began(made: Path, tmp_path: Path, seed: int) -> None:
    """The words of the marks may be said all the same."""
    model = loaded(with_template(tmp_path / "free", made, THINKING_TEMPLATE.replace("assistant\\n<think>\\n", "assistant\\n")))
    marks = model.tokenizer.thinks
    assert marks is not None and not marks.is_open
    likes = Sampling(temperature=1, logit_bias={marks.opens: 100.0, marks.closes: 50.0})
    asked = replace(ASKED, sampling=likes, seed=seed % 1000)
    assert (await said(model, asked)).thinking
    for text in ("<think>yes", "</think>no"):
        told = await said(model, replace(asked, constraint=TextConstraint("choice", choices=(text,))))
        assert (told.thought, told.text, told.reason) == ("", text, FinishReason.STOP)
    told = await said(model, replace(asked, constraint=TextConstraint("regex", ".{1,20}")))
    assert not told.thinking and 1 <= len(told.text) <= 20
    await model.close()


async def test_marks_may_be_special_tokens(made: Path, tmp_path: Path) -> None:
    folder = with_template(tmp_path / "special", made, THINKING_TEMPLATE)

    def mark_special(tokens: dict[str, Any]) -> None:
        for token in tokens["added_tokens_decoder"].values():
            token["special"] = token["special"] or "think>" in token["content"]

    change_json(folder / "tokenizer_config.json", mark_special)
    model = loaded(folder)
    asked = drawn(model, seed=3, constraint=LETTERS)
    whole = await said(model, asked)
    assert re.fullmatch(LETTERS.text, whole.text) and whole.thought
    rest = await said(model, replace(asked, history=(*whole.thinking, *whole.answer[:1])))
    assert rest.answer == whole.answer[1:]
    await model.close()


@pytest.mark.parametrize(
    ("template", "is_open"),
    [
        (TEMPLATE, None),
        (THINKING_TEMPLATE, True),
        (THINKING_TEMPLATE.replace("assistant\\n<think>\\n", "assistant\\n"), False),
        (THINKING_TEMPLATE.replace("<think>\\n", "<think>\\n\\n</think>\\n\\n"), False),
    ],
    ids=["none", "begun by the prompt", "begun by the model", "switched off"],
)
def test_the_template_tells_whether_a_model_thinks(made: Path, tmp_path: Path, template: str, is_open: bool | None) -> None:
    marks = tokenizer_of(with_template(tmp_path / "other", made, template), read_thinker_config(made)).thinks
    assert (marks and marks.is_open) == is_open


async def test_a_talker_gets_nothing_of_a_thought(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    model = loaded(with_template(tmp_path / "speaks", qwen3_checkpoint, THINKING_TEMPLATE))
    assert (marks := model.tokenizer.thinks) is not None
    asked = drawn(model, seed=3, constraint=LETTERS)
    whole = await said(model, asked, EVERY)
    assert whole.thinking[-1] == marks.closes and whole.rows[HIDDEN] == len(whole.answer) > 0
    ids = model.prompt(ASKED.turns)
    assert whole.rows[PROMPT] == whole.rows[PLACES] == ids.index(marks.opens)
    rest = await said(model, replace(asked, history=(*whole.thinking, *whole.answer[:2])), {"text": 0, HIDDEN: 1})
    assert rest.rows[HIDDEN] == len(whole.answer) - 1
    await model.close()


async def test_a_sound_alone_is_enough_to_ask(thinker: Qwen3Thinker) -> None:
    """As Captioner is asked: no words, and nobody who says how to answer."""
    sounds = [Media("audio/flac", media_files.sound(seed, form="FLAC")) for seed in (1, 2)]
    answers = [await said(thinker, replace(ASKED, turns=(Turn("user", (sound,)),), ignore_eos=True, max_tokens=12)) for sound in sounds]
    assert [len(each.thinking) + len(each.answer) for each in answers] == [12, 12]
    assert answers[0] != answers[1]


async def test_a_text_that_is_given_is_no_thought(thinker: Qwen3Thinker) -> None:
    text = "A thing. </think> Another thing."
    given = TextRequest((), seed=1, max_tokens=60, verbatim=text)
    told = await said(thinker, given)
    assert (told.thought, told.text, told.reason) == ("", text, FinishReason.STOP)
    assert (await said(thinker, replace(given, history=tuple(told.answer[:2])))).answer == told.answer[2:]
