"""Greedy text of the Thinkers is that of Transformers on the same files, whatever is asked at once and however the engine is set."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import lengths
from helpers.checkpoints import TINY, VARIANTS, change_json, changed, linked, made
from helpers.models import text_pieces
from helpers.omni_reference import KINDS, TOKENS, OmniReference, ParityQuestion, Qwen3Reference, agreement, requests
from omnistage.engine import attention, sampler
from omnistage.engine.decoder import deepstack
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.parts import interleaved_axes
from omnistage.models.conversation import Turn
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import thinker as qwen2_5
from omnistage.models.qwen3_omni import thinker as qwen3
from omnistage.models.registry import load

QWEN2_5, QWEN3 = "qwen2_5_omni", "qwen3_omni"
UNLIKE = tuple(name for name in VARIANTS if name != TINY)


@dataclass(frozen=True, slots=True)
class ParityFamily:
    """settings: how an engine may be set. context: with a cache of one whole context, so that sequences lose their pages to each other.
    kinds: of questions in the short form. least_s: the least length of a sound beside others: Transformers computes a shorter one of
    Qwen3-Omni otherwise than alone. repeated: questions that are asked again. spare: their number, as it counts for ties."""

    reference: Callable[[Path], OmniReference]
    settings: Sequence[Mapping[str, Any]]
    kinds: int
    least_s: float
    repeated: int
    spare: int


FAMILIES = {
    QWEN2_5: ParityFamily(
        OmniReference,
        (
            {},
            {"max_batch_tokens": 32, "max_batch_size": 1},
            {"max_batch_tokens": 64, "max_batch_size": 3},
            {"enable_cache": False},
            {"context": 2048},
            {"context": 2048, "enable_cache": False, "max_batch_tokens": 33},
        ),
        *(7, 0.1, 4, 4),
    ),
    QWEN3: ParityFamily(
        Qwen3Reference,
        (
            {"max_batch_size": 8},
            {"max_batch_size": 1, "max_batch_tokens": 40},
            {"max_batch_size": 8, "enable_cache": False},
            {"max_batch_size": 1, "enable_cache": False},
        ),
        *(8, 1.05, 3, 0),
    ),
}


def loaded(family: str, folder: Path, settings: Mapping[str, Any], empty: Path) -> MediaThinker:
    """A Thinker. empty: a folder for a checkpoint with a smaller context."""
    options = dict(settings)
    if context := options.pop("context", 0):
        text = json.loads((folder / "config.json").read_text())["thinker_config"]["text_config"]
        change = {"thinker_config.text_config.max_position_embeddings": context}
        change_json(linked(folder, empty) / "config.json", lambda values: changed(values, change))
        row = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["hidden_size"] // text["num_attention_heads"] * 4
        folder, options["kv_cache_bytes"] = empty, context * row
    model = load(family, "thinker", LoadOptions(path=folder, dtype="float32", **options))
    assert isinstance(model, MediaThinker)
    return model


def long_answer(number: int) -> TextRequest:
    """A question that takes much of the cache, bit by bit."""
    return TextRequest((Turn("user", (f"Number {number}",)),), seed=number, max_tokens=900, ignore_eos=True)


@pytest.mark.parametrize("variant", [QWEN2_5, pytest.param("", id="drawn"), *[pytest.param(name, marks=lengths.LONG) for name in UNLIKE]])
@lengths.rounds(0, 1)
async def test_greedy_text_is_that_of_transformers(variant: str, rounds: int, omni_checkpoint: Path, tmp_path: Path, seed: int) -> None:
    """variant: Qwen2.5-Omni, or a checkpoint of Qwen3-Omni. The short form has some kinds of questions in one setting."""
    name = QWEN2_5 if variant == QWEN2_5 else QWEN3
    variant = variant if variant == QWEN2_5 else lengths.draw(variant, UNLIKE, seed)
    family, source = FAMILIES[name], random.Random(f"{seed} {variant}")
    folder = omni_checkpoint if name == QWEN2_5 else made(tmp_path, variant, seed)
    settings = family.settings if rounds else [source.choice(family.settings)]
    kinds = source.sample(KINDS, len(KINDS) if rounds else family.kinds)
    reference, asked = family.reference(folder), list[ParityQuestion]()
    for number, setting in enumerate(settings):
        print(setting, kinds)
        (empty := tmp_path / f"setting {number}").mkdir()
        model = loaded(name, folder, setting, empty)
        never = model.tokenizer.unsayable | model.tokenizer.ends
        asked = asked or await requests(kinds, reference, never, source, family.least_s)
        others = [asyncio.create_task(text_pieces(model, long_answer(number))) for number in range(3 if "context" in setting else 0)]
        ties = await asyncio.gather(*(agreement(model, one) for one in asked))
        ties += await asyncio.gather(*(agreement(model, one) for one in asked[: family.repeated]))
        await asyncio.gather(*others)
        assert model.engine.stats().preemptions or not others
        await model.close()
        assert sum(ties) <= 0.01 * TOKENS * (len(asked) + family.spare)


# Faults that it must see --------------------------------------------------------------------------------------------------------------


def _with_config(patch: pytest.MonkeyPatch, family: Any, change: Callable[[Any], Any]) -> None:
    """The module of a Thinker reads a config that is changed so."""
    read = family.read_thinker_config
    patch.setattr(family, "read_thinker_config", lambda folder: change(read(folder)))


def _wrong_sections(patch: pytest.MonkeyPatch) -> None:
    """The axes of positions have each other's parts of a head."""
    _with_config(patch, qwen2_5, lambda config: replace(config, rope=replace(config.rope, sections=config.rope.sections[::-1])))


def _wrong_penalty(patch: pytest.MonkeyPatch) -> None:
    """Positive logits are multiplied, negative ones divided."""
    edited = sampler._edit_scores

    def invert(rows: Sequence[sampler.Draws]) -> None:
        for row in rows:
            row.sampling = replace(row.sampling, repetition_penalty=1 / row.sampling.repetition_penalty)

    def wrong(logits: torch.Tensor, rows: Sequence[sampler.Draws], *rest: Any) -> object:
        invert(rows)
        scores = edited(logits, rows, *rest)
        invert(rows)
        return scores

    patch.setattr(sampler, "_edit_scores", wrong)


def _wrong_mask(patch: pytest.MonkeyPatch) -> None:
    """A row does not see itself, but for the first one."""
    make = attention._Tile.of

    def wrong(members: Any, spec: Any) -> attention._Tile:
        tile = make(members, spec)
        mask = tile.mask.clone()
        seen_by_all = len(members[0].pages) * PAGE_ROWS - mask.shape[-1]
        for run, member in enumerate(members):
            for at in range(member.count):
                if member.start + at:
                    mask[run, :, at, :, member.start + at - seen_by_all] = float("-inf")
        return replace(tile, mask=mask)

    patch.setattr(attention._Tile, "of", wrong)


def _wrong_axes(patch: pytest.MonkeyPatch) -> None:
    """Height and width have each other's parts of a head."""
    patch.setattr(qwen3, "interleaved_axes", lambda sections: tuple((0, 2, 1)[axis] for axis in interleaved_axes(sections)))


def _wrong_layer(patch: pytest.MonkeyPatch) -> None:
    """Adds the output that belongs behind one layer behind the next one."""

    def wrong(layers: int) -> Any:
        def late(materials: Any) -> Any:
            add = deepstack(layers)(materials)
            return lambda rows, x, layer: add(rows, x, layer - 1) if layer else x

        return late

    patch.setattr(qwen3, "deepstack", wrong)


def _wrong_weights(patch: pytest.MonkeyPatch) -> None:
    """The weights of the chosen experts do not add up to 1."""
    _with_config(patch, qwen3, lambda config: replace(config, experts=replace(config.experts, normalized=False)))


@lengths.long_form(
    "models/omni/test_parity.py::test_greedy_text_is_that_of_transformers",
    unkept="small mistakes would be seen by the comparison with Transformers",
)
@pytest.mark.parametrize(
    ("mistake", "family"),
    [
        *[(mistake, QWEN2_5) for mistake in (_wrong_sections, _wrong_penalty, _wrong_mask)],
        *[(mistake, QWEN3) for mistake in (_wrong_axes, _wrong_layer, _wrong_weights)],
    ],
    ids=lambda value: getattr(value, "__name__", value).strip("_"),
)
async def test_a_mistake_would_be_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], family: str, request: pytest.FixtureRequest, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue("omni_checkpoint" if family == QWEN2_5 else "qwen3_checkpoint")
    mistake(monkeypatch)
    model = loaded(family, folder, {}, folder)
    never = model.tokenizer.unsayable | model.tokenizer.ends
    asked = await requests(["images", "videos", "long text"], FAMILIES[family].reference(folder), never, random.Random(seed))
    with pytest.raises(AssertionError, match=" is not "):
        for one in asked:
            await agreement(model, one)
    await model.close()
