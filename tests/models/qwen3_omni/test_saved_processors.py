"""The settings of processors, as versions of Transformers save them: all of them make the same rows, and a wrong one is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.encoders.preparing import read_pictures
from omnistage.models.encoders.starting import Preparation
from omnistage.models.qwen3_omni.config import read_thinker_config
from omnistage.models.tiny import omni
from omnistage.models.tiny.qwen3_omni import PREPROCESSOR

Files = Mapping[str, Any]
"""By their names without the end."""

LIMITS = {"min_pixels": 20 * 32 * 32, "max_pixels": 150 * 32 * 32}
EDGES = {"shortest_edge": 3136, "longest_edge": 12845056}
PUBLISHED = {**omni.PREPROCESSOR, **PREPROCESSOR, "merge_size": 2, "patch_size": 16, "temporal_patch_size": 2}
SHARED = {name: PUBLISHED[name] for name in PUBLISHED if name not in {"min_pixels", "max_pixels", "processor_class"}}
DONE = {f"do_{what}": True for what in ("convert_rgb", "normalize", "rescale", "resize")} | {"resample": 3, "rescale_factor": 1 / 255}


def by_4_57(limits: Mapping[str, int]) -> Files:
    """As 4.57.6 was seen to save it; where others than the published limits were asked for they stand with the tokenizer, too."""
    films = {"video_processor_type": "Qwen2VLVideoProcessor", "size": EDGES, "fps": None, "crop_size": None, "max_frames": 768}
    pictures = {**PUBLISHED, **limits}
    return {"preprocessor_config": pictures, "video_preprocessor_config": {**pictures, **DONE, **films}, "tokenizer_config": limits}


def by_5_23(limits: Mapping[str, int]) -> Files:
    """As 5.23.0 was seen to save it."""
    edges = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]} if limits else EDGES
    seen = {**SHARED, **DONE, "size": edges}
    together = {"feature_extractor": {**PUBLISHED, **limits}, "image_processor": seen, "video_processor": {**seen, "max_frames": 768}}
    return {"processor_config": {**together, "processor_class": "Qwen3OmniMoeProcessor"}, "tokenizer_config": limits}


def folder_of(checkpoint: Path, folder: Path, files: Files) -> Path:
    """The checkpoint with these files alone of its processor."""
    said = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (folder / "config.json").symlink_to(checkpoint / "config.json")
    for name, values in {"tokenizer_config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps({**said, **values} if name == "tokenizer_config" else values))
    return folder


def read(folder: Path) -> Preparation:
    return Preparation.of(folder, read_thinker_config(folder))


@pytest.mark.parametrize("limits", [{}, LIMITS], ids=["published", "others"])
def test_what_versions_save_prepares_media_alike(qwen3_checkpoint: Path, limits: Mapping[str, int], seed: int, tmp_path: Path) -> None:
    heard = torch.randn(23_456, generator=torch.Generator().manual_seed(seed)).numpy()
    made = list[Preparation]()
    for number, files in enumerate((by_4_57(limits), by_5_23(limits))):
        (folder := tmp_path / str(number)).mkdir()
        made.append(read(folder_of(qwen3_checkpoint, folder, files)))
        theirs: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        features = theirs(heard, sampling_rate=16_000, return_tensors="np", truncation=False)["input_features"][0].T
        sound = made[-1].spectrograms(heard)
        assert torch.equal(sound, torch.from_numpy(features[: len(sound)].copy()))
    assert made[0].pictures == made[1].pictures
    found = made[0].pictures
    wanted = tuple(limits.values()) if limits else (3136, 12845056)
    assert (found.min_pixels, found.max_pixels) == wanted
    # The limits of films where nobody wants others: those of the published processor, which no file says.
    assert (found.film_min_pixels, found.film_max_pixels) == (wanted if limits else (128 * 32 * 32, 768 * 32 * 32))
    if not limits:
        assert found == read(qwen3_checkpoint).pictures


@pytest.mark.parametrize(("patch_size", "merge"), [(16, 3), (8, 2), (14, 2)])
def test_bounds_of_a_film_are_pixels_whatever_the_patches_are(qwen3_checkpoint: Path, patch_size: int, merge: int, tmp_path: Path) -> None:
    vision = replace(read_thinker_config(qwen3_checkpoint).vision, patch_size=patch_size, merge=merge)
    files = {"preprocessor_config": {**PUBLISHED, "patch_size": patch_size, "merge_size": merge}}
    found = read_pictures(folder_of(qwen3_checkpoint, tmp_path, files), vision)
    assert (found.film_min_pixels, found.film_max_pixels) == (128 * 32 * 32, 768 * 32 * 32)


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels", "image_mean", "image_std"])
@pytest.mark.parametrize("by", [by_4_57, by_5_23])
def test_what_is_left_out_is_as_in_transformers(qwen3_checkpoint: Path, name: str, by: Any, tmp_path: Path) -> None:
    files = by({})
    for part in (files.get("preprocessor_config"), files.get("video_preprocessor_config"), *files.get("processor_config", {}).values()):
        if isinstance(part, dict):
            part.pop("size" if name.endswith("pixels") and "size" in part and "processor_config" in files else name, None)
    found = read(folder_of(qwen3_checkpoint, tmp_path, files)).pictures
    theirs: Any = Qwen2VLImageProcessorPil.from_pretrained(tmp_path, local_files_only=True)
    assert (found.min_pixels, found.max_pixels) == (theirs.size.shortest_edge, theirs.size.longest_edge)
    assert (list(found.colours.mean), list(found.colours.std)) == (list(theirs.image_mean), list(theirs.image_std))
    assert (found.film_min_pixels, found.film_max_pixels) == (128 * 32 * 32, 768 * 32 * 32)


WRONG = [
    ("feature_size", 80, "80 mel bins, the model was made for 128"),
    ("feature_size", None, "80 mel bins, the model was made for 128"),
    ("feature_size", "many", "'feature_size' is 'many', which is no int"),
    ("sampling_rate", 8000, "'sampling_rate' is 8000, and only the published 16000 is supported"),
    ("hop_length", 0, "'hop_length' is 0, and only the published 160 is supported"),
    ("n_fft", 1 << 40, "'n_fft' is 1099511627776, and only the published 400"),
    ("dither", 0.5, "'dither' is not 0"),
    ("patch_size", 14, "'patch_size' is 14, the model was made for 16"),
    ("merge_size", 3, "'merge_size' is 3, the model was made for 2"),
    ("image_mean", [0.5, 0.5], "'image_mean' and 'image_std' must be 3 numbers"),
    ("image_std", [0.5, 0.0, 0.5], "'image_mean' and 'image_std' must be 3 numbers"),
    ("do_rescale", False, "'do_rescale' is false"),
]


@pytest.mark.parametrize("by", [by_4_57, by_5_23])
@pytest.mark.parametrize(("name", "value", "told"), WRONG)
def test_a_setting_that_does_not_fit_is_told(qwen3_checkpoint: Path, by: Any, name: str, value: object, told: str, tmp_path: Path) -> None:
    files = by({})
    for part in (files.get("preprocessor_config"), *files.get("processor_config", {}).values()):
        if isinstance(part, dict):
            part[name] = value
    with pytest.raises(BadCheckpoint, match=told):
        read(folder_of(qwen3_checkpoint, tmp_path, files))


@pytest.mark.parametrize("missing", ["image_processor", "feature_extractor"])
def test_a_part_that_nobody_describes_is_told(qwen3_checkpoint: Path, missing: str, tmp_path: Path) -> None:
    together = {name: part for name, part in by_5_23({})["processor_config"].items() if name != missing}
    with pytest.raises(BadCheckpoint, match=rf"neither preprocessor_config\.json nor processor_config\.json with an? '{missing}'"):
        read(folder_of(qwen3_checkpoint, tmp_path, {"processor_config": together}))
