"""The encoders of both families give the rows of Transformers' own, and give a medium the same bits whatever is beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import lengths, media_files
from helpers.checkpoints import VARIANTS, made
from helpers.omni_reference import OmniReference, Qwen3Reference
from omnistage.models.encoders.encoder import Grid, grid_of, patches_of
from omnistage.models.encoders.preparing import Spectrograms, read_pictures
from omnistage.models.encoders.starting import ThinkerParts
from omnistage.models.qwen2_5_omni import config as qwen2_5_config
from omnistage.models.qwen2_5_omni import thinker as qwen2_5_thinker
from omnistage.models.qwen3_omni import config as qwen3_config
from omnistage.models.qwen3_omni import thinker as qwen3_thinker

QWEN2_5 = "qwen2_5_omni"


@dataclass
class LoadedEncoders:
    """least: frames of the shortest sound that Transformers computes beside others as it does alone."""

    folder: Path
    config: Any
    parts: ThinkerParts
    reference: OmniReference
    least: int


@pytest.fixture(scope="module", params=[QWEN2_5, *lengths.undrawn_long(1, "loaded", list(VARIANTS)[:2])])
def loaded(request: pytest.FixtureRequest, omni_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedEncoders:
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


def test_patches_are_those_of_transformers_frame_by_frame(loaded: LoadedEncoders, seed: int) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(loaded.folder)
    vision, random = loaded.config.vision, np.random.default_rng(seed)
    colours, side = read_pictures(loaded.folder, vision).colours, vision.patch_size
    for _ in range(10):
        height, width = (side * vision.merge * int(count) for count in random.integers(2, 12, 2))
        frames = np.stack([media_files.pixels(int(random.integers(1 << 30)), height, width) for _ in range(2)])
        wanted = [processor(images=Image.fromarray(frame), do_resize=False, return_tensors="pt")["pixel_values"] for frame in frames]
        whole = patches_of(frames, vision, colours).view(-1, 3, 2, side * side)
        for place, one in enumerate(wanted):
            torch.testing.assert_close(whole[:, :, place], one.view(-1, 3, 2, side * side)[:, :, 0], rtol=0, atol=2e-6)
            torch.testing.assert_close(patches_of(frame := frames[place][None], vision, colours), one, rtol=0, atol=2e-6)
            assert grid_of(frame, vision) == Grid(1, height // side, width // side)


def test_pictures_and_films_have_the_rows_of_transformers(loaded: LoadedEncoders, seed: int) -> None:
    random, vision, encode = np.random.default_rng(seed), loaded.config.vision, loaded.parts.vision.encode
    for _ in range(6):
        grids = [Grid(int(random.choice((1, 1, 3))), *(vision.merge * int(side) for side in random.integers(1, 14, 2))) for _ in range(3)]
        counts = [grid.patches for grid in grids]
        patches = torch.randn(sum(counts), vision.patch_values, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            sizes = torch.tensor([[grid.frames, grid.height, grid.width] for grid in grids])
            wanted = loaded.reference.model.get_image_features(patches, sizes)
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


def spectrograms_of(loaded: LoadedEncoders, *frames: int) -> list[torch.Tensor]:
    bins = loaded.config.audio.mel_bins
    return [torch.randn(count, bins, generator=torch.Generator().manual_seed(count)) for count in frames]


def test_sounds_have_the_rows_of_transformers(loaded: LoadedEncoders, seed: int) -> None:
    """Each alone: Transformers fills a short one up where a longer one is beside it."""
    audio, encoder, tower = loaded.config.audio, loaded.parts.audio, loaded.reference.model.model.audio_tower
    chunk, piece, least = audio.chunk, audio.piece, 3 if audio.adds_silence else 1
    edges = (least, least + 1, chunk - 1, chunk, chunk + 1, 2 * chunk, piece, piece + 5)
    spectrograms = spectrograms_of(loaded, *np.random.default_rng(seed).integers(least, 9 * chunk, 4).tolist(), *edges)
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


def test_sounds_together_have_the_rows_of_transformers_too(loaded: LoadedEncoders, seed: int) -> None:
    audio, chunk = loaded.config.audio, loaded.config.audio.chunk
    edges = [frames for frames in (3, 4, chunk - 1, chunk, chunk + 1, 2 * chunk) if frames >= loaded.least]
    spectrograms = spectrograms_of(loaded, *np.random.default_rng(seed).integers(loaded.least, 9 * chunk, 4).tolist(), *edges)
    with torch.inference_mode():
        tower = loaded.reference.model.model.audio_tower
        wanted = tower(torch.cat(spectrograms).T, feature_lens=torch.tensor(list(map(len, spectrograms)))).last_hidden_state
        rows = torch.cat(loaded.parts.audio.encode(spectrograms))
    assert close(rows[:, : audio.output_size], wanted)


@lengths.rounds(20, 60)
def test_spectrograms_are_those_of_the_processor(loaded: LoadedEncoders, seed: int, rounds: int) -> None:
    """That of Qwen2.5-Omni makes them of sound that is padded to 300 s. That of Qwen3-Omni fills sounds up to the longest one of a request,
    so nothing follows one that is alone; a rest of less than a frame is dropped."""
    audio = loaded.config.audio
    spectrograms = Spectrograms(loaded.folder, audio.mel_bins, adds_silence=audio.adds_silence)
    extractor: Any = WhisperFeatureExtractor.from_pretrained(loaded.folder, local_files_only=True)
    how: dict[str, Any] = {"padding": "max_length"} if audio.adds_silence else {"padding": True, "truncation": False}
    edges = [1, 159, 160, 161, 401] if audio.adds_silence else [16 * audio.least_ms, 319, 320, 321, 1360, 16_080]
    rounds = len(edges) + 3 if audio.adds_silence else rounds
    for count in (*edges, *np.random.default_rng(seed).integers(500, 60_000, rounds - len(edges)).tolist()):
        samples = media_files.samples(seed, count / 16_000)[:count, 0] * (count != 401)  # One is silent.
        wanted = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", **how)
        frames = int(wanted["attention_mask"].sum())
        assert (len(samples), frames) == (count, spectrograms.frames(count))
        torch.testing.assert_close(spectrograms(samples), wanted["input_features"][0].T[:frames], rtol=0, atol=1e-5)
