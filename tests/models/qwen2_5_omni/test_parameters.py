"""Every parameter of a Thinker that the contract has does what its line there says: a new one without a test here is told.

Each test works out in numpy, from logits that Transformers computes, what the parameter should do to the next token."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers import lengths
from helpers.logic import LogicOutput, history_of_text, run_logic, start_at
from helpers.omni_reference import OmniReference
from omnistage.models.conversation import Turn
from omnistage.models.encoders.thinker import PreparedConversation
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.thinker import load_thinker
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError

Numbers = NDArray[np.float64]

WORDS = "Tell me about the sea, and about the sea again."
HIGH = 60.0
"""A score far above all that the model gives by itself."""

SCORES = np.array([0.0, -0.3, -0.6, -1.0, -2.2, -3.0])
"""Below HIGH, of the tokens that a draw is between."""

DRAWS = 200
"""At once, of each draw that is looked at."""


@dataclass
class ParameterHouse:
    """A Thinker behind its stage, and the same model in Transformers. usual: tokens that the prompt has not, and that are text. heard: two
    that it has, of which one is likely and one is not: a repetition penalty divides and multiplies."""

    logic: ThinkerStage[PreparedConversation]
    reference: OmniReference
    end: int
    usual: list[int]
    never: list[int]
    heard: Sequence[int]

    def logits(self, *history: int, words: str = WORDS) -> Numbers:
        """The logits of the token behind the prompt and these tokens."""
        ids, _ = self.reference.inputs([Turn("user", (words,))], ([], []))
        with torch.inference_mode():
            logits = self.reference.model(input_ids=torch.cat((ids, torch.tensor([history], dtype=torch.int64)), 1)).logits
        return np.asarray(logits[0, -1].double().numpy())

    def pool(self) -> tuple[list[int], dict[int, float]]:
        """Tokens with these SCORES, and the bias that gives them those."""
        logits, pool = self.logits(), self.usual[: len(SCORES)]
        return pool, {token: HIGH + score - logits[token] for token, score in zip(pool, SCORES.tolist(), strict=True)}

    async def answer(self, seed: int = 1, history: Sequence[int] = (), words: str = WORDS, **fields: Any) -> LogicOutput:
        """With one token, if nothing else is said."""
        thinker = stage_pb2.ThinkerParams(**{"max_tokens": len(history) + 1, **fields})
        thinker.messages.add(role="user").parts.add(text=words)
        known = [history_of_text(history)] if history else []
        start = start_at({}, *known, ended=("prompt", "hidden"))
        return await run_logic(self.logic, stage_pb2.StageParams(thinker=thinker), start=start, seed=seed)

    async def next(self, sampling: Mapping[str, Any], history: Sequence[int] = (), seed: int = 1) -> int:
        made = await self.answer(seed, history, sampling=stage_pb2.Sampling(**sampling), ignore_eos=True)
        (token,) = made.tokens()
        return token

    async def drawn(self, **sampling: Any) -> Counter[int]:
        """How often each token of the pool is drawn."""
        pool, bias = self.pool()
        found = Counter(await asyncio.gather(*(self.next({"logit_bias": bias, **sampling}, seed=seed) for seed in range(DRAWS))))
        assert found.keys() <= set(pool)
        return found

    async def check_lowers(self, token: int, amount: float, sampling: Mapping[str, Any], history: Sequence[int] = ()) -> None:
        """The parameters lower the score of a token by this amount: it comes if it leads by a little more, and not if by a little less."""
        logits, other = self.logits(*history), self.usual[0]
        assert amount > 0.01 and token != other
        for lead, expected in ((1.05 * amount, token), (0.95 * amount, other)):
            bias = {token: HIGH + lead - logits[token], other: HIGH - logits[other]}
            assert await self.next({**sampling, "logit_bias": bias}, history) == expected, (lead, amount)
            assert await self.next({"logit_bias": bias}, history) == token, "without them it leads"


@pytest.fixture(scope="module")
def house(omni_checkpoint: Path) -> Iterator[ParameterHouse]:
    model = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32", max_sessions=DRAWS))
    reference = OmniReference(omni_checkpoint)
    never = sorted(model.tokenizer.unsayable | model.tokenizer.ends)
    prompt = set(reference.inputs([Turn("user", (WORDS,))], ([], []))[0][0].tolist())
    words = {token for token in range(model.tokenizer.vocabulary) if model.tokenizer.piece(token).isalpha()}
    usual = sorted(words.difference(prompt, never))
    house = ParameterHouse(ThinkerStage(model), reference, min(model.tokenizer.ends), usual, never, ())
    ranked = sorted(prompt.difference(never), key=house.logits().__getitem__)
    house.heard = (ranked[-1], ranked[0])
    yield house
    asyncio.run(model.close())


def shares(temperature: float) -> Numbers:
    """The shares of the tokens of the pool."""
    weights = np.exp(SCORES / temperature)
    return np.asarray(weights / weights.sum())


async def temperature(house: ParameterHouse) -> None:
    pool, _ = house.pool()
    assert (await house.drawn(temperature=0)).keys() == {pool[0]}, "greedy"
    for value in (0.7, 1.6):
        found, expected = await house.drawn(temperature=value), DRAWS * shares(value)
        counts = np.array([found[token] for token in pool])
        assert ((counts - expected) ** 2 / expected).sum() < 35, "1 in 10^6 by chance"


async def top_k(house: ParameterHouse) -> None:
    assert (await house.drawn(temperature=2, top_k=3)).keys() == set(house.pool()[0][:3])


async def top_p(house: ParameterHouse) -> None:
    kept = int(np.searchsorted(np.cumsum(shares(1.5)), 0.75)) + 1
    assert 1 < kept < len(SCORES)
    assert (await house.drawn(temperature=1.5, top_p=0.75)).keys() == set(house.pool()[0][:kept])


async def min_p(house: ParameterHouse) -> None:
    kept = int((shares(1.5) >= 0.4 * shares(1.5).max()).sum())
    assert 1 < kept < len(SCORES)
    assert (await house.drawn(temperature=1.5, min_p=0.4)).keys() == set(house.pool()[0][:kept])


async def repetition_penalty(house: ParameterHouse) -> None:
    """It counts tokens of the prompt, and one of the answer."""
    likely, unlikely = (house.logits()[token] for token in house.heard)
    assert unlikely < 0 < likely
    for token, history in (*((token, ()) for token in house.heard), (house.usual[1], (house.usual[1], house.usual[2]))):
        logit = house.logits(*history)[token]
        for penalty in (1.9, 4.0):
            await house.check_lowers(
                token, logit - (logit * penalty if logit < 0 else logit / penalty), {"repetition_penalty": penalty}, history
            )


async def presence_penalty(house: ParameterHouse) -> None:
    token, other = house.usual[1:3]
    await house.check_lowers(token, 1.3, {"presence_penalty": 1.3}, (token, other, token))


async def frequency_penalty(house: ParameterHouse) -> None:
    token, other = house.usual[1:3]
    await house.check_lowers(token, 3 * 0.6, {"frequency_penalty": 0.6}, (token, other, token, token))


async def logit_bias(house: ParameterHouse) -> None:
    logits = house.logits()
    logits[house.never] = -np.inf
    best, *_, other = np.argsort(-logits)[:5].tolist()
    lead = logits[best] - logits[other]
    assert lead > 1e-3
    for amount, expected in ((0, best), (0.95 * lead, best), (1.05 * lead, other)):
        assert await house.next({"logit_bias": {other: amount}}) == expected


async def max_tokens(house: ParameterHouse) -> None:
    for count in (1, 7):
        made = await house.answer(max_tokens=count, ignore_eos=True)
        assert (len(made.tokens()), made.finish_reasons()) == (count, [chunk_pb2.FINISH_REASON_LENGTH])


async def ends_at_once(house: ParameterHouse, **fields: Any) -> LogicOutput:
    """The answer where no token is as likely as the end."""
    return await house.answer(max_tokens=6, sampling=stage_pb2.Sampling(logit_bias={house.end: 100}), **fields)


async def min_tokens(house: ParameterHouse) -> None:
    assert (await ends_at_once(house)).tokens() == []
    made = await ends_at_once(house, min_tokens=4)
    assert (len(made.tokens()), made.finish_reasons()) == (4, [chunk_pb2.FINISH_REASON_STOP])


async def ignore_eos(house: ParameterHouse) -> None:
    assert (await ends_at_once(house)).finish_reasons() == [chunk_pb2.FINISH_REASON_STOP]
    made = await ends_at_once(house, ignore_eos=True)
    assert (len(made.tokens()), made.finish_reasons()) == (6, [chunk_pb2.FINISH_REASON_LENGTH])
    assert house.end not in made.tokens()


async def stop(house: ParameterHouse) -> None:
    whole = await house.answer(max_tokens=24, ignore_eos=True)
    middle = whole.text()[len(whole.text()) // 2 :][:3]
    made = await house.answer(max_tokens=24, ignore_eos=True, stop=["no such text", middle])
    assert (made.text(), made.finish_reasons()) == (whole.text().partition(middle)[0], [chunk_pb2.FINISH_REASON_STOP])


def texts(made: LogicOutput) -> list[chunk_pb2.TextChunk]:
    return [output.payload for output in made.outputs if isinstance(output.payload, chunk_pb2.TextChunk)]


def logprobs_of(logits: Numbers) -> Numbers:
    return np.asarray(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


async def logprobs(house: ParameterHouse) -> None:
    assert not any(chunk.logprobs for chunk in texts(await house.answer(max_tokens=3, ignore_eos=True)))
    made = await house.answer(max_tokens=3, ignore_eos=True, logprobs=True, sampling=stage_pb2.Sampling(temperature=1.5, top_k=40))
    tokens, told = made.tokens(), [value for chunk in texts(made) for value in chunk.logprobs]
    assert told == pytest.approx([logprobs_of(house.logits(*tokens[:n]))[token] for n, token in enumerate(tokens)], abs=1e-3)


async def top_logprobs(house: ParameterHouse) -> None:
    assert not any(chunk.top_logprobs for chunk in texts(await house.answer(logprobs=True)))
    expected = logprobs_of(house.logits())
    tokens = sorted(house.reference.tokenizer.get_vocab().values())
    for count in (1, 5, 20):
        ((top,),) = [chunk.top_logprobs for chunk in texts(await house.answer(top_logprobs=count, ignore_eos=True))]
        assert len(set(top.token_ids)) == len(top.pieces) == count and set(top.token_ids) <= set(tokens)
        assert list(top.logprobs) == pytest.approx(np.sort(expected[tokens])[::-1][:count].tolist(), abs=1e-3)
        assert list(top.logprobs) == pytest.approx(expected[list(top.token_ids)].tolist(), abs=1e-3)


async def likely_ids_without_a_token(house: ParameterHouse) -> None:
    """The head has more rows than the tokenizer has tokens. However likely these are, no answer has one, no table of the likeliest names
    one, and their probability is not given to others."""
    tokens = sorted(house.reference.tokenizer.get_vocab().values())
    expected = logprobs_of(house.logits())
    nothing = sorted(set(range(len(expected))).difference(tokens))
    assert nothing and np.exp(expected[nothing]).sum() > 1e-3
    bias = stage_pb2.Sampling(logit_bias=dict.fromkeys(nothing, 100.0))
    for more in ({}, {"stop": ["zzz"]}, {"constraint": stage_pb2.Constraint(regex="[a-z ]{3,20}")}):
        made = await house.answer(max_tokens=20, top_logprobs=20, sampling=bias, **more)
        assert made.tokens() and set(made.tokens()) <= set(tokens)
        assert all(set(top.token_ids) <= set(tokens) for chunk in texts(made) for top in chunk.top_logprobs)
    with pytest.raises(StageError, match=r"BAD_REQUEST: resume\.history: .* is in no answer"):
        await house.answer(history=[nothing[0]])


async def messages(house: ParameterHouse) -> None:
    """Another conversation has other logits, its own."""
    for words in (WORDS, "And the hills?"):
        ((top,),) = [chunk.top_logprobs for chunk in texts(await house.answer(words=words, top_logprobs=5, ignore_eos=True))]
        assert list(top.logprobs) == pytest.approx(logprobs_of(house.logits(words=words))[list(top.token_ids)].tolist(), abs=1e-3)
    assert abs(house.logits() - house.logits(words="And the hills?")).max() > 0.01


async def verbatim(house: ParameterHouse) -> None:
    made = await house.answer(max_tokens=50, verbatim="Say this, and nothing else.")
    assert (made.text(), made.finish_reasons()) == ("Say this, and nothing else.", [chunk_pb2.FINISH_REASON_STOP])


async def kept(house: ParameterHouse, **form: Any) -> list[str]:
    """The texts that are said with a constraint, by chance."""
    asked: dict[str, Any] = {"max_tokens": 40, "sampling": stage_pb2.Sampling(temperature=1), "constraint": stage_pb2.Constraint(**form)}
    return [made.text() for made in await asyncio.gather(*(house.answer(seed, **asked) for seed in range(12)))]


async def json_schema(house: ParameterHouse) -> None:
    said = await kept(house, json_schema=json.dumps({"type": "array", "items": {"enum": ["sea", "hill"]}, "minItems": 1, "maxItems": 2}))
    assert len(set(said)) > 1 and all(set(json.loads(text)) <= {"sea", "hill"} for text in said)


async def regex(house: ParameterHouse) -> None:
    said = await kept(house, regex="[a-c]{2,5}!")
    assert len(set(said)) > 1 and all(re.fullmatch("[a-c]{2,5}!", text) for text in said)


async def choice(house: ParameterHouse) -> None:
    said = await kept(house, choice=stage_pb2.Choices(texts=["sea", "hill"]))
    assert set(said) == {"sea", "hill"}


async def seed(house: ParameterHouse) -> None:
    """Which is no parameter of its own, but of all."""
    sampling = stage_pb2.Sampling(temperature=1)
    said = [await house.answer(n % 8, max_tokens=12, sampling=sampling) for n in range(16)]
    assert [made.tokens() for made in said[:8]] == [made.tokens() for made in said[8:]]
    assert len({tuple(made.tokens()) for made in said}) == 8


def parameters(message: Any, before: str = "") -> Iterator[str]:
    """The fields of a message, and of the messages in it. Turns are one parameter, and so is a map."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry or inner is stage_pb2.Message.DESCRIPTOR:
            yield f"{before}{field.name}"
        else:
            yield from parameters(inner, f"{before}{field.name}.")


EFFECTS: Mapping[str, Callable[[ParameterHouse], Awaitable[None]]] = {
    "messages": messages,
    "sampling.temperature": temperature,
    "sampling.top_k": top_k,
    "sampling.top_p": top_p,
    "sampling.min_p": min_p,
    "sampling.repetition_penalty": repetition_penalty,
    "sampling.presence_penalty": presence_penalty,
    "sampling.frequency_penalty": frequency_penalty,
    "sampling.logit_bias": logit_bias,
    "max_tokens": max_tokens,
    "min_tokens": min_tokens,
    "stop": stop,
    "logprobs": logprobs,
    "verbatim": verbatim,
    "ignore_eos": ignore_eos,
    "constraint.json_schema": json_schema,
    "constraint.regex": regex,
    "constraint.choice.texts": choice,
    "top_logprobs": top_logprobs,
}


def test_every_parameter_of_the_contract_is_in_the_table() -> None:
    assert sorted(parameters(stage_pb2.ThinkerParams.DESCRIPTOR)) == sorted(EFFECTS)


@lengths.drawn_cells(7, "effect", [*EFFECTS.values(), seed, likely_ids_without_a_token], ids=[*EFFECTS, "seed", "ids"])
async def test_a_parameter_does_what_the_contract_says(house: ParameterHouse, effect: Callable[[ParameterHouse], Awaitable[None]]) -> None:
    await effect(house)
