"""Greedy text of the Thinker is that of Transformers on the same files, whatever is asked at once and however the engine is set."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import lengths
from helpers.models import text_pieces
from helpers.omni_parity import KINDS, TOKENS, ParityQuestion, agreement, requests
from helpers.omni_reference import OmniReference
from omnistage.engine import attention, sampler
from omnistage.engine.memory import PAGE_ROWS
from omnistage.models.conversation import Turn
from omnistage.models.interface import TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import thinker
from omnistage.models.qwen2_5_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5Thinker, load_thinker

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_batch_tokens": 32, "max_batch_size": 1},
    {"max_batch_tokens": 64, "max_batch_size": 3},
    {"enable_cache": False},
    {"context": 2048},
    {"context": 2048, "enable_cache": False, "max_batch_tokens": 33},
)
"""How an engine may be set. context: with a cache of one whole context, so that sequences lose their pages to each other."""


def loaded(folder: Path, settings: dict[str, Any], empty: Path) -> Qwen2_5Thinker:
    """A Thinker. empty: a folder for a checkpoint with a smaller context."""
    settings = dict(settings)
    context = settings.pop("context", 0)
    if not context:
        return load_thinker(folder, LoadOptions(path=folder, dtype="float32", **settings))
    for path in folder.iterdir():
        (empty / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    text = config["thinker_config"]["text_config"]
    text["max_position_embeddings"] = context
    (empty / "config.json").unlink()
    (empty / "config.json").write_text(json.dumps(config))
    row = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["hidden_size"] // text["num_attention_heads"] * 4
    return load_thinker(empty, LoadOptions(path=empty, dtype="float32", kv_cache_bytes=context * row, **settings))


def long_answer(number: int) -> TextRequest:
    """A question that takes much of the cache, bit by bit."""
    return TextRequest((Turn("user", (f"Number {number}",)),), seed=number, max_tokens=900, ignore_eos=True)


@lengths.rounds(1, len(SETTINGS))
async def test_greedy_text_is_that_of_transformers(rounds: int, omni_checkpoint: Path, tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    settings = list(SETTINGS) if rounds > 1 else [source.choice(SETTINGS)]
    kinds = list(KINDS) if rounds > 1 else source.sample(KINDS, 7)
    reference = OmniReference(omni_checkpoint)
    asked = list[ParityQuestion]()
    for number, setting in enumerate(settings):
        print(setting, kinds)
        (empty := tmp_path / str(number)).mkdir()
        model = loaded(omni_checkpoint, setting, empty)
        asked = asked or await requests(kinds, reference, model.tokenizer.unsayable | model.tokenizer.ends, source)
        others = [asyncio.create_task(text_pieces(model, long_answer(number))) for number in range(3 if "context" in setting else 0)]
        ties = await asyncio.gather(*(agreement(model, one) for one in asked))
        again = await asyncio.gather(*(agreement(model, one) for one in asked[:4]))
        await asyncio.gather(*others)
        assert model.engine.stats().preemptions or not others
        await model.close()
        assert sum(ties) + sum(again) <= 0.01 * TOKENS * (len(asked) + 4)


# Faults that it must see --------------------------------------------------------------------------------------------------------------


def _wrong_sections(patch: pytest.MonkeyPatch) -> None:
    """The axes of positions have each other's parts of a head."""

    def wrong(folder: Path) -> ThinkerConfig:
        config = read_thinker_config(folder)
        return replace(config, rope=replace(config.rope, sections=config.rope.sections[::-1]))

    patch.setattr(thinker, "read_thinker_config", wrong)


def _wrong_penalty(patch: pytest.MonkeyPatch) -> None:
    """Positive logits are multiplied, negative ones divided."""
    edited = sampler._edit_scores

    def wrong(logits: torch.Tensor, rows: Sequence[sampler.Draws], *rest: Any) -> object:
        for row in rows:
            row.sampling = replace(row.sampling, repetition_penalty=1 / row.sampling.repetition_penalty)
        made = edited(logits, rows, *rest)
        for row in rows:
            row.sampling = replace(row.sampling, repetition_penalty=1 / row.sampling.repetition_penalty)
        return made

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


@lengths.long_form(
    "models/qwen2_5_omni/test_parity.py::test_greedy_text_is_that_of_transformers",
    unkept="small mistakes would be seen by the comparison with Transformers",
)
@pytest.mark.parametrize("mistake", [_wrong_sections, _wrong_penalty, _wrong_mask], ids=lambda mistake: mistake.__name__.strip("_"))
async def test_a_mistake_would_be_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], omni_checkpoint: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    model = loaded(omni_checkpoint, {}, tmp_path)
    never = model.tokenizer.unsayable | model.tokenizer.ends
    made = await requests(["image", "videos", "long text"], OmniReference(omni_checkpoint), never, random.Random(seed))
    with pytest.raises(AssertionError, match=" is not "):
        for one in made:
            await agreement(model, one)
    await model.close()
