"""Greedy text of the Thinkers, and the rows of their encoders, are those of Transformers on the same files, whatever is asked at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import lengths, media_files
from helpers.checkpoints import TINY, VARIANTS, change_json, changed, linked, made
from helpers.models import text_pieces
from helpers.omni_reference import KINDS, TOKENS, OmniReference, ParityQuestion, Qwen3Reference, agreement, requests
from omnistage.engine import attention, sampler
from omnistage.engine.decoder import deepstack
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.parts import interleaved_axes
from omnistage.models.conversation import Turn
from omnistage.models.encoders.encoder import Grid, grid_of, patches_of
from omnistage.models.encoders.preparing import Spectrograms, read_pictures
from omnistage.models.encoders.starting import ThinkerParts
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import config as qwen2_5_config
from omnistage.models.qwen2_5_omni import thinker as qwen2_5
from omnistage.models.qwen2_5_omni import thinker as qwen2_5_thinker
from omnistage.models.qwen3_omni import config as qwen3_config
from omnistage.models.qwen3_omni import thinker as qwen3
from omnistage.models.qwen3_omni import thinker as qwen3_thinker
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


@dataclass
class LoadedEncoders:
    """least: frames of the shortest sound that Transformers computes beside others as it does alone."""

    folder: Path
    config: Any
    parts: ThinkerParts
    reference: OmniReference
    least: int


@pytest.fixture(scope="module", params=[QWEN2_5, *lengths.undrawn_long(1, "loaded_encoders", list(VARIANTS)[:2])])
def loaded_encoders(request: pytest.FixtureRequest, omni_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedEncoders:
    cpu = torch.device("cpu")
    if request.param == QWEN2_5:
        folder, own = omni_checkpoint, qwen2_5_config.read_thinker_config(omni_checkpoint)
        return LoadedEncoders(folder, own, qwen2_5_thinker.WEIGHTS.read_parts(folder, own, torch.float32, cpu), OmniReference(folder), 3)
    folder = made(tmp_path_factory.mktemp("made"), request.param, 1)
    config = qwen3_config.read_thinker_config(folder)
    parts = qwen3_thinker.WEIGHTS.read_parts(folder, config, torch.float32, cpu)
    return LoadedEncoders(folder, config, parts, Qwen3Reference(folder), config.audio.chunk + 1)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the rounding of single precision, beside the largest of the numbers."""
    return one.shape == other.shape and bool((one - other).abs().max() <= 2e-5 * other.abs().max())


def test_patches_are_those_of_transformers_frame_by_frame(loaded_encoders: LoadedEncoders, seed: int) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(loaded_encoders.folder)
    vision, random = loaded_encoders.config.vision, np.random.default_rng(seed)
    colours, side = read_pictures(loaded_encoders.folder, vision).colours, vision.patch_size
    for _ in range(10):
        height, width = (side * vision.merge * int(count) for count in random.integers(2, 12, 2))
        frames = np.stack([media_files.pixels(int(random.integers(1 << 30)), height, width) for _ in range(2)])
        wanted = [processor(images=Image.fromarray(frame), do_resize=False, return_tensors="pt")["pixel_values"] for frame in frames]
        whole = patches_of(frames, vision, colours).view(-1, 3, 2, side * side)
        for place, one in enumerate(wanted):
            torch.testing.assert_close(whole[:, :, place], one.view(-1, 3, 2, side * side)[:, :, 0], rtol=0, atol=2e-6)
            torch.testing.assert_close(patches_of(frame := frames[place][None], vision, colours), one, rtol=0, atol=2e-6)
            assert grid_of(frame, vision) == Grid(1, height // side, width // side)


def test_pictures_and_films_have_the_rows_of_transformers(loaded_encoders: LoadedEncoders, seed: int) -> None:
    random, vision, encode = np.random.default_rng(seed), loaded_encoders.config.vision, loaded_encoders.parts.vision.encode
    for _ in range(6):
        grids = [Grid(int(random.choice((1, 1, 3))), *(vision.merge * int(side) for side in random.integers(1, 14, 2))) for _ in range(3)]
        counts = [grid.patches for grid in grids]
        patches = torch.randn(sum(counts), vision.patch_values, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            sizes = torch.tensor([[grid.frames, grid.height, grid.width] for grid in grids])
            wanted = loaded_encoders.reference.model.get_image_features(patches, sizes)
            together = encode(patches, grids)
            parts = torch.split(patches, counts)
            alone = [encode(some, [grid])[0] for some, grid in zip(parts, grids, strict=True)]
            frames = torch.split(parts[-1], counts[-1] // grids[-1].frames)
            by_frame = [encode(frame, [Grid(1, grids[-1].height, grids[-1].width)])[0] for frame in frames]
        deeper = getattr(wanted, "deepstack_features", None) or ()
        assert [each.shape[1] for each in together] == [getattr(vision, "row_size", vision.output_size)] * 3
        assert all(map(close, together, (torch.cat(each, 1) for each in zip(wanted.pooler_output, *deeper, strict=True))))
        assert all(map(torch.equal, together, alone))
        assert torch.equal(together[-1], torch.cat(by_frame))


def spectrograms_of(loaded_encoders: LoadedEncoders, *frames: int) -> list[torch.Tensor]:
    bins = loaded_encoders.config.audio.mel_bins
    return [torch.randn(count, bins, generator=torch.Generator().manual_seed(count)) for count in frames]


def test_sounds_have_the_rows_of_transformers(loaded_encoders: LoadedEncoders, seed: int) -> None:
    """Each alone: Transformers fills a short one up where a longer one is beside it."""
    audio, encoder, tower = loaded_encoders.config.audio, loaded_encoders.parts.audio, loaded_encoders.reference.model.model.audio_tower
    chunk, piece, least = audio.chunk, audio.piece, 3 if audio.adds_silence else 1
    edges = (least, least + 1, chunk - 1, chunk, chunk + 1, 2 * chunk, piece, piece + 5)
    spectrograms = spectrograms_of(loaded_encoders, *np.random.default_rng(seed).integers(least, 9 * chunk, 4).tolist(), *edges)
    with torch.inference_mode():
        wanted = [tower(one.T, feature_lens=torch.tensor([len(one)])).last_hidden_state for one in spectrograms]
        together = encoder.encode(spectrograms)
        alone = [encoder.encode([one])[0] for one in spectrograms]
        pieces = [torch.cat([encoder.encode([piece])[0] for piece in encoder.pieces(one)]) for one in spectrograms]
    assert all(close(rows[:, : audio.output_size], want) for rows, want in zip(together, wanted, strict=True))
    assert not any(rows[:, audio.output_size :].any() for rows in together)
    assert [len(rows) for rows in together] == [encoder.rows(len(one)) for one in spectrograms]
    assert all(map(torch.equal, together, alone))
    assert all(map(torch.equal, together, pieces))


def test_sounds_together_have_the_rows_of_transformers_too(loaded_encoders: LoadedEncoders, seed: int) -> None:
    audio, chunk = loaded_encoders.config.audio, loaded_encoders.config.audio.chunk
    edges = [frames for frames in (3, 4, chunk - 1, chunk, chunk + 1, 2 * chunk) if frames >= loaded_encoders.least]
    spectrograms = spectrograms_of(
        loaded_encoders, *np.random.default_rng(seed).integers(loaded_encoders.least, 9 * chunk, 4).tolist(), *edges
    )
    with torch.inference_mode():
        tower = loaded_encoders.reference.model.model.audio_tower
        wanted = tower(torch.cat(spectrograms).T, feature_lens=torch.tensor(list(map(len, spectrograms)))).last_hidden_state
        rows = torch.cat(loaded_encoders.parts.audio.encode(spectrograms))
    assert close(rows[:, : audio.output_size], wanted)


@lengths.rounds(20, 60)
def test_spectrograms_are_those_of_the_processor(loaded_encoders: LoadedEncoders, seed: int, rounds: int) -> None:
    """That of Qwen2.5-Omni makes them of sound that is padded to 300 s. That of Qwen3-Omni fills sounds up to the longest one of a request,
    so nothing follows one that is alone; a rest of less than a frame is dropped."""
    audio = loaded_encoders.config.audio
    spectrograms = Spectrograms(loaded_encoders.folder, audio.mel_bins, adds_silence=audio.adds_silence)
    extractor: Any = WhisperFeatureExtractor.from_pretrained(loaded_encoders.folder, local_files_only=True)
    how: dict[str, Any] = {"padding": "max_length"} if audio.adds_silence else {"padding": True, "truncation": False}
    edges = [1, 159, 160, 161, 401] if audio.adds_silence else [16 * audio.least_ms, 319, 320, 321, 1360, 16_080]
    rounds = len(edges) + 3 if audio.adds_silence else rounds
    for count in (*edges, *np.random.default_rng(seed).integers(500, 60_000, rounds - len(edges)).tolist()):
        samples = media_files.samples(seed, count / 16_000)[:count, 0] * (count != 401)  # One is silent.
        wanted = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", **how)
        frames = int(wanted["attention_mask"].sum())
        assert (len(samples), frames) == (count, spectrograms.frames(count))
        torch.testing.assert_close(spectrograms(samples), wanted["input_features"][0].T[:frames], rtol=0, atol=1e-5)
