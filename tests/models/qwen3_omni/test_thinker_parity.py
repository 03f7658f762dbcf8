"""Greedy text of the Thinker is that of Transformers on the same files, whatever is asked at once and however the engine is set."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.omni_parity import KINDS, TOKENS, agreement, requests
from helpers.qwen3_checkpoint import TINY, VARIANTS, made
from helpers.qwen3_reference import Qwen3Reference
from omnistage.engine.decoder import deepstack
from omnistage.engine.parts import interleaved_axes
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni import thinker
from omnistage.models.qwen3_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen3_omni.thinker import Qwen3Thinker, load_thinker

SETTINGS: dict[str, dict[str, Any]] = {
    "eight at once": {"max_batch_size": 8},
    "one at a time": {"max_batch_size": 1, "max_batch_tokens": 40},
    "eight at once, nothing kept": {"max_batch_size": 8, "enable_cache": False},
    "one at a time, nothing kept": {"max_batch_size": 1, "enable_cache": False},
}
UNLIKE = tuple(name for name in VARIANTS if name != TINY)
DRAWN = 8
"""Requests to a checkpoint, in one setting: 8 of the 288 cases that the long form has."""

LEAST_S = 1.05
"""The least length of a sound beside others: Transformers computes a shorter one otherwise than alone."""


def loaded(folder: Path, **settings: Any) -> Qwen3Thinker:
    return load_thinker(folder, LoadOptions(path=folder, dtype="float32", **settings))


@lengths.one_or_all("variant", UNLIKE)
@lengths.rounds(DRAWN, len(KINDS))
async def test_greedy_text_is_that_of_transformers(variant: str, rounds: int, tmp_path: Path, seed: int) -> None:
    """So many requests, in one setting that is drawn or, where all kinds are asked, in every one."""
    variant = lengths.draw(variant, UNLIKE, seed)
    source = random.Random(f"{seed} {variant}")
    folder = made(tmp_path, variant, seed)
    reference = Qwen3Reference(folder)
    names = list(SETTINGS) if rounds == len(KINDS) else source.sample(list(SETTINGS), 1)
    kinds = source.sample(KINDS, rounds)
    print(names, kinds)
    asked = None
    for name in names:
        model = loaded(folder, **SETTINGS[name])
        asked = asked or await requests(kinds, reference, model.tokenizer.unsayable | model.tokenizer.ends, source, LEAST_S)
        ties = await asyncio.gather(*(agreement(model, one) for one in asked))
        if SETTINGS[name].get("enable_cache", True):
            ties += await asyncio.gather(*(agreement(model, one) for one in asked[:3]))
        await model.close()
        assert sum(ties) <= 0.01 * TOKENS * len(asked)


# Faults that it must see --------------------------------------------------------------------------------------------------------------


def _wrong_axes(patch: pytest.MonkeyPatch) -> None:
    """Height and width have each other's parts of a head."""
    patch.setattr(thinker, "interleaved_axes", lambda sections: tuple((0, 2, 1)[axis] for axis in interleaved_axes(sections)))


def _wrong_layer(patch: pytest.MonkeyPatch) -> None:
    """Adds the output that belongs behind one layer behind the next one."""
    build = deepstack

    def wrong(layers: int) -> Any:
        def late(materials: Any) -> Any:
            add = build(layers)(materials)
            return lambda rows, x, layer: add(rows, x, layer - 1) if layer else x

        return late

    patch.setattr(thinker, "deepstack", wrong)


def _wrong_weights(patch: pytest.MonkeyPatch) -> None:
    """The weights of the chosen experts do not add up to 1."""

    def wrong(folder: Path) -> ThinkerConfig:
        config = read_thinker_config(folder)
        return replace(config, experts=replace(config.experts, normalized=False))

    patch.setattr(thinker, "read_thinker_config", wrong)


@lengths.long_form(
    "models/qwen3_omni/test_thinker_parity.py::test_greedy_text_is_that_of_transformers",
    unkept="small mistakes would be seen by the comparison with Transformers",
)
@lengths.one_or_all("mistake", ["_wrong_axes", "_wrong_layer", "_wrong_weights"])
async def test_a_mistake_would_be_seen(mistake: str, qwen3_checkpoint: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    makes: Callable[[pytest.MonkeyPatch], None] = globals()[lengths.draw(mistake, ["_wrong_axes", "_wrong_layer", "_wrong_weights"], seed)]
    makes(monkeypatch)
    model = loaded(qwen3_checkpoint)
    never = model.tokenizer.unsayable | model.tokenizer.ends
    asked = await requests(["images", "videos", "long text"], Qwen3Reference(qwen3_checkpoint), never, random.Random(seed))
    with pytest.raises(AssertionError, match=" is not "):
        for one in asked:
            await agreement(model, one)
    await model.close()
