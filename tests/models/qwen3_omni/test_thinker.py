"""The Thinker: the same tokens after a resume; what it gives the Talker; and which experts get its rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers import lengths, media_files
from helpers.checkpoints import VARIANTS, made
from helpers.models import text_pieces
from helpers.omni_reference import Qwen3Reference, turns
from omnistage.engine.parts import Experts
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.interface import FinishReason, Sampling, TensorRows, TextPiece, TextRequest, Wanted, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.config import MEDIUM_ROW
from omnistage.models.qwen3_omni.thinker import Qwen3Thinker, load_thinker
from omnistage.models.speech.talker import HIDDEN, PLACES, PROMPT

TOKENS = 20
DRAWN = Sampling(temperature=1, top_p=0.95, repetition_penalty=1.05)
EVERY = {"text": 0, PROMPT: 0, PLACES: 0, HIDDEN: 0}


@pytest.fixture(scope="module")
def thinker(qwen3_checkpoint: Path) -> Iterator[Qwen3Thinker]:
    model = loaded(qwen3_checkpoint)
    yield model
    asyncio.run(model.close())


def loaded(folder: Path, **settings: object) -> Qwen3Thinker:
    return load_thinker(folder, LoadOptions(path=folder, **{"dtype": "float32", **settings}))  # type: ignore[arg-type]


def questions(seed: int) -> list[TextRequest]:
    """One of each kind, twice over; the second of each is another one."""
    made = list[TextRequest]()
    for number in range(8):
        at = seed + number
        kinds: list[tuple[Part, ...]] = [
            (),
            (Media("image/png", media_files.picture(at, 70, 100)),),
            (Media("audio/flac", media_files.sound(at, form="FLAC")),),
            (Media("video/mp4", media_files.film(at, sound_s=2), use_audio=True),),
        ]
        asked = (Turn("system", ("Be kind.",)), Turn("user", (*kinds[number % 4], "What is this?")), Turn("assistant", ("A thing.",)))
        last = Turn("user", (*kinds[(number + 1) % 4], f"And that, {number}?"))
        made.append(TextRequest((*asked, last), seed=at, sampling=DRAWN, max_tokens=TOKENS, ignore_eos=True))
    return made


class ThinkerAnswer:
    """All that came of a request."""

    def __init__(self, pieces: Sequence[TextPiece | TensorRows]) -> None:
        self.tokens = [token_id for piece in pieces if isinstance(piece, TextPiece) for token_id in piece.token_ids]
        self.logprobs = [value for piece in pieces if isinstance(piece, TextPiece) for value in piece.logprobs]
        self._rows = [piece for piece in pieces if isinstance(piece, TensorRows)]

    def rows(self, port: str) -> NDArray[np.generic]:
        of_it = [piece for piece in self._rows if piece.port == port]
        assert [piece.last for piece in of_it] == [False] * (len(of_it) - 1) + [True]
        return np.concatenate([piece.rows for piece in of_it if len(piece.rows)])


async def answer(model: Qwen3Thinker, request: TextRequest, wanted: Wanted = EVERY) -> ThinkerAnswer:
    async with aclosing(model.generate(await model.prepare(request), inputs_of(), wanted)) as pieces:
        return ThinkerAnswer([piece async for piece in pieces])


@lengths.rounds(4, 40)
async def test_an_answer_goes_on_from_any_place(rounds: int, thinker: Qwen3Thinker, seed: int) -> None:
    source = random.Random(seed)
    for request in source.choices(questions(seed), k=rounds):
        whole = await answer(thinker, request)
        count, rows = source.randrange(TOKENS), {port: whole.rows(port) for port in (PROMPT, PLACES, HIDDEN)}
        wanted = {"text": count, PROMPT: source.randint(0, len(rows[PROMPT])), PLACES: source.randint(0, len(rows[PLACES]))}
        wanted[HIDDEN] = source.randint(0, count)
        rest = await answer(thinker, replace(request, history=tuple(whole.tokens[:count])), wanted)
        assert rest.tokens == whole.tokens[count:]
        for port, place in wanted.items():
            if port != "text" and place < len(rows[port]):
                assert np.array_equal(rest.rows(port), rows[port][place:])


@lengths.one_or_all("variant", VARIANTS)
async def test_the_talker_gets_the_hidden_rows_of_media_and_embeddings_of_text(variant: str, tmp_path: Path, seed: int) -> None:
    """Those of the layer that it asks for, as Transformers has them: behind the first layers they lack what is added there."""
    source = random.Random(seed)
    folder = made(tmp_path, lengths.draw(variant, VARIANTS, seed), seed)
    model, reference = loaded(folder), Qwen3Reference(folder)
    speech, embedding = model.config.speech, reference.model.get_input_embeddings().weight.detach()
    assert speech is not None
    for kind in ("image", "audio", "sound in video", "everything"):
        conversation = turns(kind, source, least_s=1.05)
        made_here = await answer(model, TextRequest(conversation, seed=0, max_tokens=TOKENS, ignore_eos=True))
        ids, inputs = reference.inputs(conversation, await reference.read(conversation))
        with torch.inference_mode():
            states = reference.model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, **inputs).hidden_states
        begun = torch.cummax(torch.where(ids[0] == speech.turn, torch.arange(ids.shape[1]), 0), 0).values
        slots = ((ids[0][(begun + 1).clamp_max(ids.shape[1] - 1)] == speech.user) | (begun == begun[-1])).nonzero().flatten()
        is_medium = made_here.rows(PLACES)[:, 3] == MEDIUM_ROW
        rows, hidden = torch.from_numpy(made_here.rows(PROMPT).astype(np.float32)), states[speech.layer][0, slots]
        assert torch.equal(rows[~is_medium], embedding[ids[0, slots]][~is_medium])
        torch.testing.assert_close(rows[is_medium], hidden[is_medium], atol=2e-4, rtol=2e-4)
        # The last token is not spoken where there was room for no other: Transformers has no row of it.
        assert torch.equal(torch.from_numpy(made_here.rows(HIDDEN).astype(np.float32)), embedding[made_here.tokens[:-1]])
    await model.close()


async def test_a_row_of_the_answer_comes_with_its_token(thinker: Qwen3Thinker) -> None:
    """A Talker need not wait until the next one is drawn."""
    request = TextRequest((Turn("user", ("Hello!",)),), seed=0, max_tokens=TOKENS, ignore_eos=True)
    async with aclosing(thinker.generate(await thinker.prepare(request), inputs_of(), EVERY)) as pieces:
        tokens, rows, is_early = 0, 0, False
        async for piece in pieces:
            if isinstance(piece, TextPiece):
                tokens += len(piece.token_ids)
            elif piece.port == HIDDEN:
                rows += len(piece.rows)
                assert rows <= min(tokens, TOKENS - 1), "no row comes before its token"
                is_early = is_early or rows == tokens
    assert is_early and (tokens, rows) == (TOKENS, TOKENS - 1)


async def test_all_of_an_answer_that_ends_by_itself_and_of_a_given_text_is_spoken(thinker: Qwen3Thinker, qwen3_checkpoint: Path) -> None:
    embedding = Qwen3Reference(qwen3_checkpoint).model.get_input_embeddings().weight.detach()
    given = TextRequest((Turn("user", ("Say it.",)),), seed=0, max_tokens=TOKENS, verbatim="It is a fine day, is it not?")
    drawn = TextRequest((Turn("user", ("One word.",)),), seed=0, max_tokens=TOKENS)
    ends = next(iter(thinker.tokenizer.ends))
    drawn = replace(drawn, min_tokens=5, sampling=Sampling(logit_bias={ends: 100.0}))
    for request in (given, drawn):
        made_here = await answer(thinker, request)
        assert torch.equal(torch.from_numpy(made_here.rows(HIDDEN).astype(np.float32)), embedding[made_here.tokens])
        pieces = await text_pieces(thinker, request)
        assert pieces[-1].finish_reason is FinishReason.STOP


# Experts --------------------------------------------------------------------------------------------------------------------------------


ROUTED_TOKENS = 8
SEED = 5
"""Where two experts are almost equally good for a row, rounding would now and then choose the other one: so all is always the same."""
KINDS = ("long text", "images", "audio", "sound in video")


def spread(weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """The weight of every expert, 0 where it was not chosen: [rows, experts]."""
    return torch.zeros(len(weights), experts).scatter_(1, chosen, weights)


@lengths.one_or_all("variant", VARIANTS)
async def test_rows_are_given_to_the_experts_that_transformers_chooses(
    variant: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer, of prompts with media of all kinds and of their answers; read in pieces."""
    folder = made(tmp_path, lengths.draw(variant, VARIANTS, seed), SEED)
    model = loaded(folder, enable_cache=False, max_batch_tokens=50)
    reference, source, config = Qwen3Reference(folder), random.Random(SEED), model.config
    here, rows, there = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    route = Experts._route

    def noted(self: Experts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made_here = route(self, x)
        here.append(spread(*made_here, config.experts.experts))
        rows.append(x)
        return made_here

    monkeypatch.setattr(Experts, "_route", noted)
    gates = [layer.mlp.gate for layer in reference.model.model.language_model.layers]
    for gate in gates:
        gate.register_forward_hook(lambda gate, given, out: there.append(spread(out[1], out[2], config.experts.experts)))
    for kind in KINDS:
        for noted_before in (here, rows, there):
            noted_before.clear()
        conversation = turns(kind, source, least_s=1.05)
        pieces = await text_pieces(model, TextRequest(conversation, seed=0, max_tokens=ROUTED_TOKENS, ignore_eos=True))
        said = [token_id for piece in pieces for token_id in piece.token_ids]
        ids, inputs = reference.inputs(conversation, await reference.read(conversation))
        ids = torch.cat([ids, torch.tensor([said[:-1]])], 1)
        with torch.inference_mode():
            reference.model(ids, attention_mask=torch.ones_like(ids), **inputs)
        assert len(there) == len(gates) and len(here) % len(gates) == 0
        for layer, expected in enumerate(list(there)):
            found = torch.cat(here[layer :: len(gates)])
            assert torch.equal(found > 0, expected > 0), (kind, layer)
            assert ((found > 0).sum(1) == config.experts.experts_per_row).all()
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            with torch.inference_mode():
                _, weights, chosen = gates[layer](torch.cat(rows[layer :: len(gates)]))
            # Both are computed from the same rows, without the differences by rounding in the layers before.
            torch.testing.assert_close(found, spread(weights, chosen, config.experts.experts), atol=1e-5, rtol=0)
    await model.close()
