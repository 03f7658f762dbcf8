"""Checkpoints of the drawing pipelines with random weights: the same bytes for the same order, and pictures worth comparing."""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import Qwen2Tokenizer

from helpers import lengths
from helpers.drawings import MOVING, NAMES, checkpoint
from omnistage.models.diffusers import folder as folders
from omnistage.models.tiny.diffusers.pictures import DESIGNS
from omnistage.models.tiny.makers import MAKERS, CheckpointOrder, MakeError, make_tiny

load_pipeline: Callable[[Path, torch.dtype], Any] = folders.load_pipeline
"""Untyped: a pipeline has its parts as attributes, of which its class knows nothing."""

TOKENIZER = {
    *("added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json"),
}
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
DROPPED = {"qwen-image": 34, "qwen-image-edit": 64, "qwen-image-edit-plus": 64, "qwen-image-layered": 34}


def test_all_of_them_can_be_made() -> None:
    assert set(NAMES) == set(DESIGNS) == set(MAKERS) - {"qwen2.5-omni", "qwen3-omni", "qwen3-omni-thinking", *MOVING}


def test_the_files_are_those_of_published_checkpoints(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            folder = checkpoint(name)
            wanted = {
                "model_index.json",
                "scheduler/scheduler_config.json",
                *(f"tokenizer/{file}" for file in TOKENIZER),
                *(f"{part}/{file}" for part in ("transformer", "vae") for file in ("config.json", "diffusion_pytorch_model.safetensors")),
                *(f"text_encoder/{file}" for file in ("config.json", "model.safetensors")),
            }
            processor = DESIGNS[name].processor
            if name != "z-image":  # its text encoder writes nothing of its own
                wanted |= {"text_encoder/generation_config.json"}
            if processor:
                files = (*TOKENIZER, "preprocessor_config.json", "video_preprocessor_config.json")
                wanted |= {f"{processor}/{file}" for file in files}
                assert json.loads((folder / "model_index.json").read_text())[processor] == ["transformers", "Qwen2VLProcessor"]
            assert _files(folder).keys() == wanted
            assert all(stat.S_IMODE(path.stat().st_mode) & 0o400 == 0o400 for path in folder.rglob("*"))
            assert sum(path.stat().st_size for path in folder.rglob("*")) < 4 << 20


@pytest.mark.parametrize("name", ["qwen-image-edit", "z-image"])
def test_the_same_order_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    make_tiny(name, tmp_path / "again", CheckpointOrder())
    make_tiny(name, tmp_path / "other", CheckpointOrder(seed=1))
    assert torch.equal(state, torch.get_rng_state())
    made = _files(checkpoint(name))
    assert made == _files(tmp_path / "again")
    other = _files(tmp_path / "other")
    assert {file for file, digest in made.items() if digest != other[file]} == {file for file in made if file.endswith(".safetensors")}


def test_a_type_can_be_asked_for(tmp_path: Path) -> None:
    make_tiny("longcat-image", tmp_path / "made", CheckpointOrder(dtype="bfloat16"))
    for path in (tmp_path / "made").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_tensor(name).dtype for name in file.offset_keys()} == {torch.bfloat16}
    assert load_pipeline(tmp_path / "made", torch.bfloat16).transformer.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen-image", "z-image", "longcat-image"])
def test_the_small_ones_have_a_transformer_of_eight_million_weights(name: str, tmp_path: Path) -> None:
    make_tiny(name, tmp_path / "made", CheckpointOrder(size="small"))
    counts = {path.parent.name: _count(path) for path in (tmp_path / "made").rglob("*.safetensors")}
    assert 8e6 < counts["transformer"] < 9e6 and counts["vae"] < 1e6 and counts["text_encoder"] < 1e6


@pytest.mark.parametrize(
    ("order", "named"),
    [
        (CheckpointOrder(size="100m"), "size '100m'.*tiny, small"),
        (CheckpointOrder(tokenizer="qwen"), "tokenizer 'qwen': a checkpoint of z-image can have built"),
    ],
)
def test_what_cannot_be_made_leaves_nothing(order: CheckpointOrder, named: str, tmp_path: Path) -> None:
    with pytest.raises(MakeError, match=named):
        make_tiny("z-image", tmp_path / "made", order)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", DROPPED)
def test_what_is_dropped_is_the_instruction_and_no_more(name: str) -> None:
    pipeline = load_pipeline(checkpoint(name), torch.float32)
    tokenizer: Qwen2Tokenizer = pipeline.tokenizer
    prefix, suffix = pipeline.prompt_template_encode.split("{}")
    if name == "qwen-image-edit":
        prefix = prefix.removesuffix("<|vision_start|><|image_pad|><|vision_end|>")
    assert suffix == SUFFIX
    assert pipeline.prompt_template_encode_start_idx == DROPPED[name] == len(tokenizer(prefix).input_ids)
    prompts = ["", "cat", "A red circle on a blue background, 4 of them.", "写着“你好”的红色灯笼"]
    for prompt in prompts:
        whole, kept = tokenizer(f"{prefix}{prompt}{suffix}").input_ids, tokenizer(f"{prompt}{suffix}").input_ids
        assert whole[DROPPED[name] :] == kept and tokenizer.decode(kept) == f"{prompt}{suffix}"


def test_a_prompt_is_encoded_to_its_own_tokens_and_the_end() -> None:
    pipeline = load_pipeline(checkpoint("qwen-image"), torch.float32)
    prompts = ["a cat", "two dogs on a red chair"]
    with torch.no_grad():
        embedded, mask = pipeline.encode_prompt(prompts)
    lengths = [len(pipeline.tokenizer(prompt + SUFFIX).input_ids) for prompt in prompts]
    assert lengths[0] < lengths[1] == embedded.shape[1] and mask.sum(1).tolist() == lengths


@lengths.long_form("models/diffusers/test_pipelines.py::test_a_picture_is_that_of_the_pipeline")
def test_pictures_depend_on_prompt_and_seed(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    _shrink_what_is_edited(monkeypatch)
    for name in NAMES:
        with subtests.test(name):
            pipeline = load_pipeline(checkpoint(name), torch.float32)
            pipeline.set_progress_bar_config(disable=True)
            first, words, seed, again = (_latents(name, pipeline, *of) for of in (("a cat", 0), ("a dog", 0), ("a cat", 1), ("a cat", 0)))
            assert torch.equal(first, again) and torch.isfinite(first).all() and 0.2 < first.std() < 5
            assert (first - words).abs().max() > 1e-2 and (first - seed).abs().max() > 0.1
            picture = np.asarray(_call(name, pipeline, "a cat", 0))
            assert picture.shape[-3:-1] == (64, 64) and picture.std((-3, -2)).max() > 0.05


def _latents(name: str, pipeline: Any, prompt: str, seed: int) -> torch.Tensor:
    """Those before the VAE, of 64 x 64 pixels."""
    seen: list[torch.Tensor] = []
    step = pipeline.scheduler.step

    def watched(*args: Any, **options: Any) -> tuple[torch.Tensor]:
        (latents,) = step(*args, **options)
        seen.append(latents)
        return (latents,)

    pipeline.scheduler.step = watched
    try:
        _call(name, pipeline, prompt, seed)
    finally:
        pipeline.scheduler.step = step
    return seen[-1]


def _call(name: str, pipeline: Any, prompt: str, seed: int) -> Any:
    given: dict[str, Any] = {}
    picture = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 64, 3))
    if name == "qwen-image-layered":
        given = {"image": picture.convert("RGBA"), "layers": 2, "resolution": 640}
    elif "edit" in name:
        given = {"image": [picture, picture] if name == "qwen-image-edit-plus" else picture}
    if name not in ("qwen-image-layered", "longcat-image-edit"):
        given |= {"height": 64, "width": 64}
    if name == "longcat-image":
        given["enable_prompt_rewrite"] = False
    generator = torch.Generator().manual_seed(seed)
    return pipeline(prompt=prompt, generator=generator, num_inference_steps=3, output_type="np", **given).images


def _shrink_what_is_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipelines make what they are given as large as a million pixels; here 64 x 64."""
    pipelines = diffusers.pipelines
    for module in (
        pipelines.qwenimage.pipeline_qwenimage_edit,
        pipelines.qwenimage.pipeline_qwenimage_edit_plus,
        pipelines.qwenimage.pipeline_qwenimage_layered,
        pipelines.longcat_image.pipeline_longcat_image_edit,
    ):
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, of=module.calculate_dimensions: of(64 * 64, ratio))


def _files(folder: Path) -> dict[str, str]:
    """Path of each file in the folder -> digest of its bytes."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def _count(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.offset_keys())
