"""Weights away from the device or in fewer bits, and pictures decoded in tiles: what is drawn then, and what is refused."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import lengths
from helpers.drawings import NAMES, checkpoint
from helpers.painting import PipelinePair, beside, levels_apart, picture
from omnistage.models.diffusers import placement
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.diffusers.loading import load_pictures
from omnistage.models.diffusers.options import AREA, DiffusersOptions
from omnistage.models.diffusers.placement import QUANTIZERS, MemoryPlan
from omnistage.models.interface import ModelInfo
from omnistage.models.options import LoadOptions
from omnistage.models.registry import check
from omnistage.models.reports import LoadError

SAME = 1e-6
SMALL: dict[str, Any] = {"condition_area": 64 * 64}
NEAR = {"float8_e4m3fn": 0.15, "float8_e5m2": 0.3}
"""The allowed mean difference, as a share of the largest latent: these types keep 3 and 2 bits of the fraction of a weight."""


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint("qwen-image")  # Its folder is not to be among those of a test.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def planned(device: str = "cpu", size: int = 1, **family: Any) -> MemoryPlan:
    options = LoadOptions(device=device, tensor_parallel_size=size, family=family)
    return MemoryPlan.of(DiffusersOptions.from_settings(dict(family)), options, torch.float32)


def pair_of(name: str, **family: Any) -> PipelinePair:
    """A painter with a pipeline that was placed so."""
    folder, plan = checkpoint(name), planned(**SMALL, **family)
    return beside(name, folder, plan.placed(load_pipeline(folder, torch.float32, plan.arguments())), plan.options)


def drawn(pair: PipelinePair, **asked: Any) -> tuple[torch.Tensor, list[Image.Image]]:
    """A picture in two steps, with guidance."""
    images = [picture(3, 64, 64)] * min(pair.edits, 1)
    (canvas,) = pair.drawn(pair.plan("a red circle", images, steps=2, guidance_scale=3.0, **asked))
    return canvas.latents, pair.images(canvas)


def info(name: str, **family: Any) -> ModelInfo:
    return load_pictures(checkpoint(name), LoadOptions(dtype="float32", family={**SMALL, **family})).info


def bytes_of(model: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


OFFLOADED = {f"{name} {offload}": (name, offload) for name in NAMES for offload in ("group", "disk")}


@lengths.one_or_all("case", OFFLOADED)
def test_a_picture_does_not_depend_on_where_weights_are(case: str, seed: int) -> None:
    name, offload = OFFLOADED[lengths.draw(case, OFFLOADED, seed)]
    latents, images = drawn(pair_of(name))
    found, others = drawn(pair_of(name, offload=offload))
    assert (found - latents).abs().max() <= SAME
    assert levels_apart(images, others) == 0


def test_weights_on_the_disk_are_there_and_go_with_the_pipeline(tmp_path: Path) -> None:
    """In a folder of their own: those of another model in it would be read for its own."""
    (tmp_path / "here").mkdir()
    pair = pair_of("z-image", offload="disk", offload_folder=str(tmp_path / "here"))
    (folder,) = (tmp_path / "here").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    written = {part: sum(file.stat().st_size for file in (folder / part).iterdir()) for part in ("transformer", "text_encoder")}
    assert all(size >= bytes_of(getattr(pair.pipe, part)) for part, size in written.items())
    del pair
    gc.collect()
    assert not list((tmp_path / "here").iterdir())


STORED = {f"{name} {storage}": (name, storage) for name in NAMES for storage in NEAR}


@lengths.one_or_all("case", STORED)
def test_weights_in_eight_bits_draw_nearly_the_same(case: str, seed: int) -> None:
    name, storage = STORED[lengths.draw(case, STORED, seed)]
    plain, small = pair_of(name), pair_of(name, storage=storage)
    latents, _ = drawn(plain)
    found, _ = drawn(small)
    assert torch.isfinite(found).all()
    assert (found - latents).abs().mean() <= NEAR[storage] * latents.abs().max()
    inner = [module for module in small.pipe.transformer.modules() if isinstance(module, torch.nn.Linear)]
    stored = [module.weight for module in inner if module.weight.dtype == getattr(torch, storage)]
    assert sum(weight.numel() for weight in stored) > sum(module.weight.numel() for module in inner) // 3
    saved = bytes_of(plain.pipe.transformer) - bytes_of(small.pipe.transformer)
    assert saved >= 3 * sum(weight.nbytes for weight in stored)


@pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
@pytest.mark.parametrize("name", ["qwen-image", "z-image", "longcat-image"])
def test_a_transformer_that_is_quantized_draws_nearly_the_same(name: str) -> None:
    latents, _ = drawn(pair_of(name))
    quantized = pair_of(name, quantization="torchao_int8")
    found, _ = drawn(quantized)
    assert 0 < (found - latents).abs().max() <= 0.05 * latents.abs().max()
    weights = [module.weight for module in quantized.pipe.transformer.modules() if isinstance(module, torch.nn.Linear)]
    assert len(weights) > 10 and all(type(weight).__name__ == "Int8Tensor" for weight in weights)


@pytest.mark.parametrize("offload", ["group", "disk"])
def test_weights_in_eight_bits_can_be_elsewhere_too(offload: str) -> None:
    latents, _ = drawn(pair_of("qwen-image", storage="float8_e4m3fn"))
    found, _ = drawn(pair_of("qwen-image", storage="float8_e4m3fn", offload=offload))
    assert (found - latents).abs().max() <= SAME


def test_a_large_picture_is_decoded_in_tiles_and_a_small_one_is_not() -> None:
    plain, tiled = pair_of("qwen-image"), pair_of("qwen-image", vae_tiling_above=320 * 320 - 1)
    for side, alike in ((288, True), (320, False)):
        latents, images = drawn(plain, width=side, height=side)
        found, others = drawn(tiled, width=side, height=side)
        assert torch.equal(found, latents)
        apart = np.abs(np.asarray(images[0], int) - np.asarray(others[0], int))
        assert bool((apart == 0).all()) is alike
        assert apart.mean() < 8
        assert not tiled.pipe.vae.use_tiling


def test_tiles_are_for_large_pictures_of_gpus() -> None:
    assert planned().tiles_above == 0
    assert planned("cuda").tiles_above == AREA
    assert planned("cuda", vae_tiling_above=0).tiles_above == 0
    assert planned(vae_tiling_above=7).tiles_above == 7


def test_a_pipeline_that_cannot_decode_in_tiles_says_so() -> None:
    pipe: Any = load_pipeline(checkpoint("z-image"), torch.float32)
    del pipe.vae.use_tiling
    assert replace(planned(), device="cpu").placed(pipe) is pipe
    with pytest.raises(LoadError, match=r"option vae_tiling_above 7: ZImagePipeline does not decode in tiles; leave it out"):
        planned(vae_tiling_above=7).placed(pipe)


def test_what_was_chosen_is_told_and_is_another_revision() -> None:
    plain, small = info("z-image"), info("z-image", storage="float8_e4m3fn", offload="disk", vae_tiling_above=300)
    assert plain.settings["weights"] == "as computed (default), on the cpu (default)"
    assert plain.settings["pictures decoded in tiles"] == "never (default)"
    assert small.settings["weights"] == "float8_e4m3fn in the transformer, on the disk (offload disk)"
    assert small.settings["pictures decoded in tiles"] == "of more than 300 pixels"
    assert small.revision not in (plain.revision, info("z-image", offload="disk").revision)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ({"offload": "cpu"}, r"option offload is 'cpu': it can be group or disk or model, or be left out"),
        ({"storage": "int8"}, r"option storage is 'int8': it can be float8_e4m3fn or float8_e5m2, or be left out"),
        ({"quantization": "gguf"}, r"option quantization is 'gguf': it is one file, and this is the folder of a pipeline; it can be "),
        ({"context_parallel": "ring"}, r"option context_parallel is 'ring': its attention .*; it can be ulysses, or be left out"),
        ({"quantization": "torchao_int8", "storage": "float8_e5m2"}, r"quantization torchao_int8 and storage float8_e5m2 exclude"),
        ({"quantization": "quanto_int8", "offload": "group"}, r"quantization quanto_int8 and offload group exclude each other"),
        ({"context_parallel": "ulysses", "offload": "disk"}, r"context_parallel ulysses and offload disk exclude each other"),
        ({"offload": "group", "offload_folder": "/x"}, r"option offload_folder /x: nothing is written there without offload disk"),
        ({"vae_tiling_above": -2}, r"option vae_tiling_above is -2: it must not be below -1"),
    ],
)
def test_what_nobody_can_choose_is_refused_without_torch(family: dict[str, Any], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        check("diffusers", "diffusion", LoadOptions(path=checkpoint("z-image"), family=family))


@pytest.mark.parametrize(
    ("size", "family", "told"),
    [
        (1, {"offload": "model"}, r"offload model: moves whole models to an accelerator and back, and device is cpu; take offload disk"),
        (1, {"offload": "disk", "offload_folder": "/no/such"}, r"option offload_folder /no/such: there is no such folder; make it"),
        (2, {"offload": "group"}, r"tensor_parallel_size 2 and option offload group exclude each other"),
        (2, {"storage": "float8_e5m2"}, r"tensor_parallel_size 2 and option storage float8_e5m2 exclude each other"),
        (2, {"quantization": "torchao_int8"}, r"tensor_parallel_size 2 and option quantization torchao_int8 exclude each other"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(size: int, family: dict[str, Any], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        planned(size=size, **family)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda module: None)
    with pytest.raises(LoadError, match=rf"^quantization {name}: its package is not installed: pip install \S+$"):
        planned(quantization=name)


def test_a_quantizer_of_gpus_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda module: object())
    with pytest.raises(LoadError, match=r"^quantization bitsandbytes_4bit: needs a GPU, and device is cpu; take torchao_int8 or"):
        planned(quantization="bitsandbytes_4bit")
    assert planned("cuda", quantization="bitsandbytes_4bit").settings.startswith("bitsandbytes_4bit")


def test_a_pipeline_without_a_part_for_it_says_so() -> None:
    pipe: Any = load_pipeline(checkpoint("z-image"), torch.float32)
    pipe.register_modules(transformer=None)
    with pytest.raises(LoadError, match=r"^float8_e5m2: ZImagePipeline has none of transformer, transformer_2, unet; leave it out"):
        planned(storage="float8_e5m2").placed(pipe)
