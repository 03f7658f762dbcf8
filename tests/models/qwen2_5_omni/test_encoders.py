"""The encoders give the rows of Transformers' own, and give a medium the same bits whatever is beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import media_files
from helpers.omni_reference import OmniReference
from omnistage.models.encoders.encoder import Grid, grid_of, patches_of
from omnistage.models.encoders.preparing import Spectrograms, read_pictures
from omnistage.models.encoders.starting import ThinkerParts
from omnistage.models.qwen2_5_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.encoders import rows_of_frames
from omnistage.models.qwen2_5_omni.thinker import WEIGHTS


@pytest.fixture(scope="module")
def config(omni_checkpoint: Path) -> ThinkerConfig:
    return read_thinker_config(omni_checkpoint)


@pytest.fixture(scope="module")
def parts(omni_checkpoint: Path, config: ThinkerConfig) -> ThinkerParts:
    return WEIGHTS.read_parts(omni_checkpoint, config, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(omni_checkpoint: Path) -> OmniReference:
    return OmniReference(omni_checkpoint)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the rounding of single precision, beside the largest of the numbers."""
    return one.shape == other.shape and bool((one - other).abs().max() <= 2e-5 * other.abs().max())


def test_patches_are_those_of_transformers_frame_by_frame(omni_checkpoint: Path, config: ThinkerConfig, seed: int) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(omni_checkpoint)
    colours = read_pictures(omni_checkpoint, config.vision).colours
    random = np.random.default_rng(seed)
    for _ in range(10):
        height, width = (28 * int(side) for side in random.integers(2, 12, 2))
        frames = np.stack([media_files.pixels(int(random.integers(1 << 30)), height, width) for _ in range(2)])
        wanted = [processor(images=Image.fromarray(frame), do_resize=False, return_tensors="pt")["pixel_values"] for frame in frames]
        whole = patches_of(frames, config.vision, colours).view(-1, 3, 2, 14 * 14)
        for place, one in enumerate(wanted):
            torch.testing.assert_close(whole[:, :, place], one.view(-1, 3, 2, 14 * 14)[:, :, 0], rtol=0, atol=2e-6)
            torch.testing.assert_close(patches_of(frame := frames[place][None], config.vision, colours), one, rtol=0, atol=2e-6)
            assert grid_of(frame, config.vision) == Grid(1, height // 14, width // 14)


def test_pictures_and_films_have_the_rows_of_transformers(parts: ThinkerParts, reference: OmniReference, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(6):
        grids = [Grid(int(random.choice((1, 1, 3))), *(2 * int(side) for side in random.integers(1, 14, 2))) for _ in range(3)]
        patches = torch.randn(sum(grid.patches for grid in grids), 1176, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            sizes = torch.tensor([[grid.frames, grid.height, grid.width] for grid in grids])
            wanted = reference.model.get_image_features(patches, sizes).pooler_output
            made = parts.vision.encode(patches, grids)
            alone = [
                parts.vision.encode(some, [grid])[0]
                for some, grid in zip(torch.split(patches, [grid.patches for grid in grids]), grids, strict=True)
            ]
            last = torch.split(patches, [grid.patches for grid in grids])[-1]
            by_frame = [
                parts.vision.encode(frame, [Grid(1, grids[-1].height, grids[-1].width)])[0]
                for frame in torch.split(last, len(last) // grids[-1].frames)
            ]
        assert all(map(close, made, wanted))
        assert all(map(torch.equal, made, alone))
        assert torch.equal(made[-1], torch.cat(by_frame))


def test_sounds_have_the_rows_of_transformers(parts: ThinkerParts, reference: OmniReference, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = [*(int(length) for length in random.integers(3, 900, 4)), 3, 4, 199, 200, 201, 400]
    spectrograms = [torch.randn(length, 128, generator=torch.Generator().manual_seed(length)) for length in lengths]
    with torch.inference_mode():
        whole = reference.model.model.audio_tower(torch.cat(spectrograms).T, feature_lens=torch.tensor(lengths)).last_hidden_state
        made = parts.audio.encode(spectrograms)
        alone = [parts.audio.encode([one])[0] for one in spectrograms]
        pieces = torch.cat([parts.audio.encode([piece])[0] for piece in torch.split(spectrograms[0], 400)])
    assert close(torch.cat(made), whole)
    assert [len(rows) for rows in made] == [rows_of_frames(length) for length in lengths]
    assert all(map(torch.equal, made, alone))
    assert torch.equal(made[0], pieces)


def test_spectrograms_are_those_of_sound_padded_to_300_s(omni_checkpoint: Path, config: ThinkerConfig, seed: int) -> None:
    spectrograms = Spectrograms(omni_checkpoint, config.audio.mel_bins, adds_silence=config.audio.adds_silence)
    extractor: Any = WhisperFeatureExtractor.from_pretrained(omni_checkpoint, local_files_only=True)
    random = np.random.default_rng(seed)
    for count in (1, 159, 160, 161, 401, *(int(length) for length in random.integers(500, 40_000, 3))):
        samples = media_files.samples(seed, count / 16_000)[:, 0] * (0 if count == 401 else 1)
        wanted = extractor(samples, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt")
        frames = int(wanted["attention_mask"].sum())
        assert frames == spectrograms.frames(len(samples))
        torch.testing.assert_close(spectrograms(samples), wanted["input_features"][0, :, :frames].T, rtol=0, atol=1e-5)
