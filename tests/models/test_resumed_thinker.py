"""The default Thinker goes on after any token of an answer as if it had never stopped: tokens, text, log probabilities and end."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from helpers import lengths
from helpers.models import text_pieces
from helpers.randomness import reseed
from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.types import FinishReason, Sampling
from omnistage.models.conversation import TextConstraint, Turn
from omnistage.models.interface import BadRequest, TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.smol.thinker import SmolThinker, load_thinker
from omnistage.models.text.repetition import MIN_TOKENS, Repetition
from omnistage.models.text.thinker import USUAL_TOKENS
from omnistage.thinker.stage import parse
from omnistage.v1 import stage_pb2

SMALL_CACHE = 384 << 20
EMOJI = "Smile \U0001f600\U0001f9d1\u200d\U0001f680 e\u0301 数学 ok?"
DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def thinker(default_model: Path) -> Iterator[SmolThinker]:
    """In a dtype that is drawn for all tests of a run. Loaded once: its callers' event loops come and go."""
    dtype = lengths.draw("", DTYPES, reseed("dtype"))
    model = load_thinker(default_model / "thinker", LoadOptions(dtype=dtype, kv_cache_bytes=SMALL_CACHE), poison=True)
    yield model
    asyncio.run(model.close())


@dataclass(frozen=True)
class PartOfAnswer:
    """An answer or the rest of one."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reasons: tuple[FinishReason, ...]


async def answer(model: SmolThinker, request: TextRequest) -> PartOfAnswer:
    pieces = await text_pieces(model, request)
    assert pieces[-1].finish_reason is not None
    return PartOfAnswer(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        tuple(piece.finish_reason for piece in pieces if piece.finish_reason),
    )


async def check_cuts(model: SmolThinker, request: TextRequest, most: int = sys.maxsize, seed: int = 0) -> PartOfAnswer:
    """Go on after every number of tokens, all at once; returns the undisturbed answer. most: so many, drawn; 0 and the last are in."""
    whole = await answer(model, request)
    detokenizer = Detokenizer(model.tokenizer.piece)
    said = [*accumulate(map(detokenizer.push, whole.tokens), initial="")]
    places: Sequence[int] = range(len(whole.tokens) + (whole.finish_reasons != (FinishReason.LENGTH,)))
    if len(places) > most:
        places = sorted({places[0], places[-1], *random.Random(seed).sample(places, most - 2)})
    rests = await asyncio.gather(*(answer(model, replace(request, history=whole.tokens[:cut])) for cut in places))
    for cut, rest in zip(places, rests, strict=True):
        assert said[cut] + rest.text == whole.text, f"cut after {cut} tokens"
        logprobs = whole.logprobs[cut:] if request.logprobs else ()
        assert replace(rest, text=whole.text) == replace(whole, tokens=whole.tokens[cut:], logprobs=logprobs), f"cut after {cut} tokens"
    assert model.load().kv_pages_used == 0
    return whole


def ask(text: str, **changes: object) -> TextRequest:
    settings: dict[str, object] = {"seed": 1, "max_tokens": 20, "logprobs": True, **changes}
    return TextRequest((Turn("user", (text,)),), **settings)  # type: ignore[arg-type]


@lengths.long_form(
    "models/contract/test_contract.py::test_the_default_model_goes_on_wherever_it_was_lost",
    "engine/test_engine.py::test_end_tokens_min_items_and_ignore_end",
    unkept="an end of itself comes at the same token after a history",
)
@lengths.rounds(3, 1000)
async def test_the_end_comes_where_it_would_have_come(thinker: SmolThinker, seed: int, rounds: int) -> None:
    question = "What is the capital of France?"
    free = await check_cuts(thinker, ask(question, max_tokens=40), rounds, seed)
    assert free.finish_reasons == (FinishReason.STOP,) and 2 not in free.tokens
    count = len(free.tokens)
    longer = await check_cuts(thinker, ask(question, max_tokens=count + 12, min_tokens=count + 3), rounds, seed)
    assert len(longer.tokens) >= count + 3
    endless = await check_cuts(thinker, ask(question, max_tokens=count + 6, ignore_eos=True), rounds, seed)
    assert (len(endless.tokens), endless.finish_reasons) == (count + 6, (FinishReason.LENGTH,))


@lengths.drawn_cells(1, "text", [EMOJI, "Say exactly this, please.", " "])
async def test_verbatim_text_goes_on_after_every_token(thinker: SmolThinker, text: str) -> None:
    whole = await check_cuts(thinker, TextRequest((), 0, verbatim=text))
    assert whole.text == text


@pytest.mark.parametrize(
    "request_",
    [
        ask("x", history=(49152,)),
        ask("x", history=tuple(range(20))),
        ask("x", history=tuple(range(100))),
        ask("x", max_tokens=32_768, history=(5,) * 8170),
        TextRequest((), 0, verbatim="Say this.", history=(5,)),
        TextRequest((), 0, verbatim="Say this.", history=tuple(range(90))),
    ],
    ids=["no token", "nothing left", "too long", "beyond the context", "another text", "more than the text"],
)
async def test_a_history_that_cannot_be_is_refused(thinker: SmolThinker, request_: TextRequest) -> None:
    with pytest.raises(BadRequest) as refused:
        await thinker.prepare(request_)
    assert refused.value.field == "resume.history"
    assert thinker.load().kv_pages_used == 0


LULLABY = "Write a lullaby."
"""The model answers with one word without end, if nothing makes the words that were there less likely."""


async def test_an_endless_repetition_ends_the_answer_at_one_token_wherever_it_was_cut(thinker: SmolThinker, seed: int) -> None:
    request = ask(LULLABY, max_tokens=USUAL_TOKENS, is_usual_length=True)
    tokens = (await answer(thinker, request)).tokens
    repetition = Repetition()
    for token in tokens:
        assert not repetition.is_endless
        repetition.add(token)
    assert repetition.is_endless and len(set(tokens[-MIN_TOKENS:])) < 20
    longer = {"history": tokens[:-3], "max_tokens": len(tokens) + 9}
    free = TextConstraint("regex", r"(.|\n)*")
    changes: list[dict[str, Any]] = [
        *({"history": tokens[: len(tokens) - count]} for count in (1, 2, random.Random(seed).randrange(3, 40))),
        {**longer, "is_usual_length": False},
        {**longer, "ignore_eos": True},
        {**longer, "constraint": free},
        {**longer, "min_tokens": len(tokens) + 5},
    ]
    rests = await asyncio.gather(*(answer(thinker, replace(request, **change)) for change in changes))
    ends = [(len(change["history"]) + len(rest.tokens), *rest.finish_reasons) for change, rest in zip(changes, rests, strict=True)]
    repetition_end, length_end = (len(tokens), FinishReason.REPETITION), (len(tokens) + 9, FinishReason.LENGTH)
    assert ends == [*[repetition_end] * 3, *[length_end] * 3, (len(tokens) + 5, FinishReason.REPETITION)]
    with pytest.raises(BadRequest, match="ended in its history"):
        await thinker.prepare(replace(request, history=tokens))


def test_a_length_that_was_stated_is_not_the_usual_one() -> None:
    params = stage_pb2.ThinkerParams(messages=[stage_pb2.Message(role="user", parts=[stage_pb2.Part(text="x")])])
    request = parse(params, 1, USUAL_TOKENS)
    params.max_tokens = USUAL_TOKENS
    assert (request.max_tokens, request.is_usual_length, parse(params, 1, 7).is_usual_length) == (USUAL_TOKENS, True, False)


async def test_a_history_with_a_stop_string_in_it_is_refused(thinker: SmolThinker) -> None:
    tokens = tuple(thinker.tokenizer.encode("All is said and done here"))
    await thinker.prepare(ask("x", history=tokens))
    with pytest.raises(BadRequest, match="stop string"):
        await thinker.prepare(ask("x", history=tokens, stop=("and",)))


async def test_a_special_token_is_in_no_answer_and_in_no_history(thinker: SmolThinker, default_model: Path) -> None:
    """However a client pushes for one: a history that opens a turn of its own is refused, and no legitimate one is."""
    tokenizer = Tokenizer.from_file(str(default_model / "thinker" / "tokenizer.json"))
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    end = tokenizer.token_to_id("<|im_end|>")
    assert len(special) > 2 and end in special
    asked = TextRequest(turns=(Turn("user", ("Tell me a story.",)),), seed=1, max_tokens=8)
    for token_id in special:
        with pytest.raises(BadRequest, match=f"token {token_id} is in no answer"):
            await thinker.prepare(replace(asked, history=(504, token_id, 260)))
    pushing = Sampling(temperature=1.0, logit_bias={token_id: 100.0 for token_id in special if token_id != end})
    pushed = await answer(thinker, replace(asked, sampling=pushing, ignore_eos=True))
    assert len(pushed.tokens) == 8 and not set(pushed.tokens) & set(special)
    await thinker.prepare(replace(asked, history=pushed.tokens[:4]))
