"""The encoders give the rows of Transformers' own, and give a medium the same bits whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from helpers import lengths, media_files
from helpers.qwen3_checkpoint import VARIANTS, made
from helpers.qwen3_reference import Qwen3Reference
from omnistage.models.encoders.encoder import Grid
from omnistage.models.encoders.preparing import Spectrograms
from omnistage.models.encoders.starting import ThinkerParts
from omnistage.models.qwen3_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen3_omni.thinker import WEIGHTS


@dataclass
class LoadedEncoders:
    folder: Path
    config: ThinkerConfig
    parts: ThinkerParts
    reference: Qwen3Reference


@pytest.fixture(scope="module", params=lengths.undrawn_long(1, "loaded", list(VARIANTS)[:2]))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedEncoders]:
    folder: Path = made(tmp_path_factory.mktemp("made"), request.param, 1)
    config = read_thinker_config(folder)
    yield LoadedEncoders(folder, config, WEIGHTS.read_parts(folder, config, torch.float32, torch.device("cpu")), Qwen3Reference(folder))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the rounding of single precision, beside the largest of the numbers."""
    return one.shape == other.shape and bool((one - other).abs().max() <= 2e-5 * other.abs().max())


def test_pictures_and_films_have_the_rows_of_transformers(loaded: LoadedEncoders, seed: int) -> None:
    random, vision = np.random.default_rng(seed), loaded.config.vision
    for _ in range(4):
        grids = [Grid(int(random.choice((1, 1, 3))), *(vision.merge * int(side) for side in random.integers(1, 14, 2))) for _ in range(3)]
        counts = [grid.patches for grid in grids]
        patches = torch.randn(sum(counts), vision.patch_values, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            sizes = torch.tensor([[grid.frames, grid.height, grid.width] for grid in grids])
            wanted = loaded.reference.model.get_image_features(patches, sizes)
            together = loaded.parts.vision.encode(patches, grids)
            parts = torch.split(patches, counts)
            alone = [loaded.parts.vision.encode(some, [grid])[0] for some, grid in zip(parts, grids, strict=True)]
            frames = torch.split(parts[-1], counts[-1] // grids[-1].frames)
            by_frame = [loaded.parts.vision.encode(frame, [Grid(1, grids[-1].height, grids[-1].width)])[0] for frame in frames]
        rows = [torch.cat(each, 1) for each in zip(wanted.pooler_output, *wanted.deepstack_features, strict=True)]
        assert [each.shape[1] for each in together] == [vision.row_size] * 3
        assert all(map(close, together, rows))
        assert all(map(torch.equal, together, alone))
        assert torch.equal(together[-1], torch.cat(by_frame))


def test_sounds_have_the_rows_of_transformers(loaded: LoadedEncoders, seed: int) -> None:
    """Each alone: Transformers fills a short one up where a longer one is beside it."""
    random, audio = np.random.default_rng(seed), loaded.config.audio
    chunk, piece = audio.chunk, audio.piece
    lengths = [*(int(length) for length in random.integers(1, 9 * chunk, 3)), 1, 2, chunk - 1, chunk, chunk + 1, piece, piece + 5]
    spectrograms = [torch.randn(length, audio.mel_bins, generator=torch.Generator().manual_seed(length)) for length in lengths]
    with torch.inference_mode():
        tower = loaded.reference.model.model.audio_tower
        wanted = [tower(one.T, feature_lens=torch.tensor([len(one)])).last_hidden_state for one in spectrograms]
        together = loaded.parts.audio.encode(spectrograms)
        alone = [loaded.parts.audio.encode([one])[0] for one in spectrograms]
        pieces = [torch.cat([loaded.parts.audio.encode([piece])[0] for piece in loaded.parts.audio.pieces(one)]) for one in spectrograms]
    assert all(close(rows[:, : audio.output_size], want) for rows, want in zip(together, wanted, strict=True))
    assert not any(rows[:, audio.output_size :].any() for rows in together)
    assert [len(rows) for rows in together] == [loaded.parts.audio.rows(length) for length in lengths]
    assert all(map(torch.equal, together, alone))
    assert all(map(torch.equal, together, pieces))


def test_sounds_that_are_filled_up_have_the_rows_of_transformers_together_too(loaded: LoadedEncoders, seed: int) -> None:
    random, audio = np.random.default_rng(seed), loaded.config.audio
    lengths = [int(length) for length in random.integers(audio.chunk + 1, 9 * audio.chunk, 4)]
    spectrograms = [torch.randn(length, audio.mel_bins, generator=torch.Generator().manual_seed(length)) for length in lengths]
    with torch.inference_mode():
        tower = loaded.reference.model.model.audio_tower
        wanted = tower(torch.cat(spectrograms).T, feature_lens=torch.tensor(lengths)).last_hidden_state
        rows = torch.cat(loaded.parts.audio.encode(spectrograms))
    assert close(rows[:, : audio.output_size], wanted)


@lengths.rounds(20, 60)
def test_spectrograms_are_those_that_the_processor_makes_of_a_sound_alone(loaded: LoadedEncoders, seed: int, rounds: int) -> None:
    """It fills sounds up to the longest one of a request, so nothing follows one that is alone; a rest of less than a frame is dropped."""
    audio = loaded.config.audio
    spectrograms = Spectrograms(loaded.folder, audio.mel_bins, adds_silence=audio.adds_silence)
    extractor: Any = WhisperFeatureExtractor.from_pretrained(loaded.folder, local_files_only=True)
    edges = [16 * audio.least_ms, 319, 320, 321, 1360, 16_080]
    for count in (*edges, *np.random.default_rng(seed).integers(500, 60_000, rounds - len(edges)).tolist()):
        samples = media_files.samples(seed, count / 16_000)[:count, 0]
        wanted = extractor(samples, sampling_rate=16_000, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt")
        frames = int(wanted["attention_mask"].sum())
        assert (len(samples), frames) == (count, spectrograms.frames(count))
        torch.testing.assert_close(spectrograms(samples), wanted["input_features"][0].T[:frames], rtol=0, atol=1e-5)
