"""The code predictor of Qwen3-Omni: the logits of Transformers, the same codes in any company, and draws of its own for each codebook."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from helpers import lengths
from helpers.talker_reference import SIZES, TalkerReference
from omnistage.engine.adapter import DrawnItem
from omnistage.engine.sampler import Draws, Sampler
from omnistage.engine.types import Item, Sampling
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.qwen3_omni.predictor import PUBLISHED_SAMPLING, FrameHead, Predictor, seed_of
from omnistage.models.qwen3_omni.talker import TalkerParts, read_parts
from omnistage.models.qwen3_omni.talker_config import read_talker_config

SPEAKERS = 9
CLOSE = 1e-4


@dataclass
class LoadedPredictor:
    """reference: Transformers' with the same weights. end: the first code that ends a speech."""

    reference: TalkerReference
    folder: Path
    parts: TalkerParts
    groups: int
    end: int

    def predictor(self) -> Predictor:
        return Predictor(self.parts.predictor, self.parts.heads, self.parts.first, SPEAKERS)

    def head(self, predictor: Predictor) -> FrameHead:
        return FrameHead(self.parts.decoder.logits, predictor, self.groups, {self.end})

    def rows(self, count: int, seed: int) -> torch.Tensor:
        """Random hidden rows of the Talker."""
        return torch.randn(count, self.parts.first.shape[1], generator=torch.Generator().manual_seed(seed))

    def drawn(self, head: FrameHead, hidden: torch.Tensor, draws: Sequence[Draws]) -> list[DrawnItem | None]:
        with torch.inference_mode():
            return head.draw(hidden, draws, [()] * len(draws))

    def scores(self, predictor: Predictor, hidden: torch.Tensor, items: Sequence[Item]) -> list[torch.Tensor]:
        """Logits of each codebook behind the first one, where these codes are drawn."""
        found = list[torch.Tensor]()

        def choose(codebook: int, logits: torch.Tensor) -> Sequence[int]:
            found.append(logits)
            return [item[1 + codebook] for item in items]

        with torch.inference_mode():
            made = predictor.codes(hidden, [item[0] for item in items], choose)
        assert made == [item[1:] for item in items]
        return found


@pytest.fixture(scope="module", params=lengths.undrawn_long(1, "loaded", sorted(SIZES)))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedPredictor:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = TalkerReference(request.param, int(os.environ["OMNISTAGE_TEST_SEED"]), folder)
    config = read_talker_config(folder)
    return LoadedPredictor(reference, folder, read(folder, torch.float32), config.groups, config.codec.eos)


def read(folder: Path, dtype: torch.dtype) -> TalkerParts:
    with Weights(folder, ("thinker.", "code2wav.")) as weights:
        return read_parts(weights, read_talker_config(folder), dtype, torch.device("cpu"))


def draws_of(source: random.Random, count: int, temperature: float = 0.9) -> list[Draws]:
    made = [Draws(Sampling(temperature=temperature), source.getrandbits(64)) for _ in range(count)]
    for each in made:
        each.step = source.randrange(1000)
    return made


def test_logits_of_each_codebook_are_those_of_transformers(loaded: LoadedPredictor, seed: int) -> None:
    """Several speakers are at it together, each with codes of his own."""
    source, talker, count = random.Random(seed), loaded.reference.talker, 3
    hidden = loaded.rows(count, seed)
    items = [tuple(source.randrange(loaded.reference.size["codes"]) for _ in range(loaded.groups)) for _ in range(count)]
    found = loaded.scores(loaded.predictor(), hidden, items)
    tables = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
    for speaker, item in enumerate(items):
        embedded = [table(torch.tensor([[code]])) for table, code in zip(tables, item, strict=True)]
        for codebook, logits in enumerate(found):
            expected = loaded.reference.frame_logits(hidden[None, speaker : speaker + 1], embedded[: codebook + 1], codebook)
            assert torch.allclose(logits[speaker], expected, atol=CLOSE), (speaker, codebook)


@lengths.drawn_cells(1, "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_frame_is_the_same_in_any_company(loaded: LoadedPredictor, seed: int, dtype: torch.dtype) -> None:
    """The company is any number of speakers, each at any place among them, whoever used the cache before, and where attention takes one
    after the other."""
    loaded = replace(loaded, parts=read(loaded.folder, dtype))
    source, predictor = random.Random(seed), loaded.predictor()
    head, hidden, draws = loaded.head(predictor), loaded.rows(SPEAKERS, seed).to(dtype), draws_of(source, SPEAKERS)
    draws[4] = Draws(Sampling(), 4)
    whole = loaded.drawn(head, hidden, draws)
    assert None not in whole and len(set(map(str, whole))) == SPEAKERS
    for count in range(1, SPEAKERS):
        which = source.sample(range(SPEAKERS), count)
        assert loaded.drawn(head, hidden[which], [draws[place] for place in which]) == [whole[place] for place in which]
    predictor.attention.together = False
    alone = loaded.drawn(head, hidden, draws)
    assert alone == whole


def test_an_end_has_no_codes_behind_it(loaded: LoadedPredictor, seed: int) -> None:
    """And those beside it have theirs."""
    head, hidden = loaded.head(loaded.predictor()), loaded.rows(4, seed)
    draws = draws_of(random.Random(seed), 4)
    usual = loaded.drawn(head, hidden, draws)
    for place in (0, 2):
        draws[place] = Draws(Sampling(logit_bias={loaded.end: 200.0}), 0)
    ended = loaded.drawn(head, hidden, draws)
    assert [item.item for item in ended if item is not None][::2] == [(loaded.end, *[0] * (loaded.groups - 1))] * 2
    assert ended[1::2] == usual[1::2]


def test_numbers_that_are_not_finite_hurt_nobody_else(loaded: LoadedPredictor, seed: int) -> None:
    """Neither those beside them nor those who have their place in the cache afterwards."""
    predictor = loaded.predictor()
    fixed = torch.zeros(4, loaded.reference.size["codes"])
    head = FrameHead(lambda hidden: fixed[: len(hidden)], predictor, loaded.groups, ())
    hidden, draws = loaded.rows(4, seed), draws_of(random.Random(seed), 4)
    expected = loaded.drawn(head, hidden, draws)
    assert None not in expected
    for value in (torch.nan, torch.inf):
        broken = hidden.clone()
        broken[1, 3] = value
        assert loaded.drawn(head, broken, draws) == [expected[0], None, *expected[2:]]
        assert loaded.drawn(head, hidden.flip(0), draws[::-1]) == expected[::-1]


def test_each_codebook_has_luck_of_its_own(seed: int) -> None:
    """From equal scores two codebooks draw the same code as often as chance has it, in the same frame and in the next one; with one seed
    for all of them they would do so always."""
    source, ids, books, frames = random.Random(seed), 8, 6, 200
    own, sample, drawn = source.getrandbits(64), Sampler(), list[list[int]]()
    scores = torch.zeros(frames, ids)
    for seed_of_book in [own, *(seed_of(own, codebook) for codebook in range(books))]:
        rows = [Draws(PUBLISHED_SAMPLING, seed_of_book) for _ in range(frames)]
        for step, row in enumerate(rows):
            row.step = step
        tokens = sample(scores, rows, [()] * frames)
        drawn.append([token.token_id for token in tokens if token is not None])
    assert len({seed_of(own, codebook) for codebook in range(31)} | {own}) == 32
    for number, codes in enumerate(drawn):
        assert len(codes) == frames
        for other in drawn[:number]:
            for shift in (0, 1):
                alike = sum(map(int.__eq__, codes[shift:], other))
                assert alike < frames * 2.5 / 6, (number, shift, alike)


def test_codes_are_drawn_from_those_that_transformers_would_draw_from(loaded: LoadedPredictor, seed: int) -> None:
    """The 50 likeliest ones, and of these as many as are 0.8 together; whatever is asked for the first code."""
    source, predictor, count = random.Random(seed), loaded.predictor(), SPEAKERS
    head, codes = loaded.head(predictor), loaded.reference.size["codes"]
    warp = LogitsProcessorList([TopKLogitsWarper(50), TopPLogitsWarper(0.8)])
    likeliest = total = 0
    for _ in range(3):
        hidden, draws = loaded.rows(count, source.getrandbits(31)), draws_of(source, count, temperature=5.0)
        with torch.inference_mode():
            drawn = head.draw(hidden, draws, [range(codes, codes + 1024)] * count)
        items = [item.item for item in drawn if item is not None]
        assert len(items) == count
        for codebook, logits in enumerate(loaded.scores(predictor, hidden, items)):
            allowed = warp(torch.zeros(count, 0, dtype=torch.int64), logits.clone()).isfinite()  # type: ignore[arg-type]
            chosen = torch.tensor([item[1 + codebook] for item in items])
            assert allowed.gather(1, chosen[:, None]).all()
            likeliest += int((logits.argmax(-1) == chosen).sum())
            total += count
    assert 0 < likeliest < total
