"""Checkpoints of pictures, films and sounds with random weights: the same bytes for the same order, and what pipelines of Diffusers draw
with them is worth comparing."""

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
from transformers.models.t5 import T5Tokenizer

from helpers import lengths
from helpers.drawings import MOVING, NAMES, checkpoint
from helpers.painting import changed
from omnistage.models.diffusers import folder as folders
from omnistage.models.tiny.diffusers.pipelines import DESIGNS
from omnistage.models.tiny.makers import MAKERS, CheckpointOrder, make_tiny

load_pipeline: Callable[[Path, torch.dtype], Any] = folders.load_pipeline
"""Untyped: a pipeline has its parts as attributes, of which its class knows nothing."""

FILMS = [name for name in MOVING if name != "stable-audio"]
TOKENIZER = {
    *("added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json"),
}
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
DROPPED = {"qwen-image": 34, "qwen-image-edit": 64, "qwen-image-edit-plus": 64, "qwen-image-layered": 34}

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # of a VAE's of sound


def test_all_of_them_can_be_made() -> None:
    assert {*NAMES, *MOVING} == set(DESIGNS) == set(MAKERS) - {"qwen2.5-omni", "qwen3-omni", "qwen3-omni-thinking"}


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
            processor = DESIGNS[name]("tiny").processor
            if name != "z-image":  # its text encoder writes nothing of its own
                wanted |= {"text_encoder/generation_config.json"}
            if processor:
                files = (*TOKENIZER, "preprocessor_config.json", "video_preprocessor_config.json")
                wanted |= {f"{processor}/{file}" for file in files}
                assert json.loads((folder / "model_index.json").read_text())[processor] == ["transformers", "Qwen2VLProcessor"]
            assert _files(folder).keys() == wanted
            assert all(stat.S_IMODE(path.stat().st_mode) & 0o400 == 0o400 for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["qwen-image-edit", "z-image", *MOVING])
def test_the_same_order_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    make_tiny(name, tmp_path / "again", CheckpointOrder())
    make_tiny(name, tmp_path / "other", CheckpointOrder(seed=1))
    assert torch.equal(state, torch.get_rng_state())
    made = _files(checkpoint(name))
    assert made == _files(tmp_path / "again")
    other = _files(tmp_path / "other")
    assert {file for file, digest in made.items() if digest != other[file]} == {file for file in made if file.endswith(".safetensors")}
    assert sum(path.stat().st_size for path in checkpoint(name).rglob("*")) < 4 << 20


@pytest.mark.parametrize("name", ["longcat-image", "wan2.2-t2v"])
def test_a_type_can_be_asked_for(name: str, tmp_path: Path) -> None:
    make_tiny(name, tmp_path / "made", CheckpointOrder(dtype="bfloat16"))
    for path in (tmp_path / "made").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.offset_keys()} == {"BF16"}
    pipe = load_pipeline(tmp_path / "made", torch.bfloat16)
    assert {part.dtype for part in pipe.components.values() if isinstance(part, torch.nn.Module)} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["qwen-image", "z-image", "longcat-image", *MOVING])
def test_the_small_ones_have_a_transformer_of_eight_million_weights(name: str, tmp_path: Path) -> None:
    make_tiny(name, tmp_path / "made", CheckpointOrder(size="small"))
    counts = dict.fromkeys((path.parent.name for path in (tmp_path / "made").rglob("*.safetensors")), 0)
    for path in (tmp_path / "made").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            counts[path.parent.name] += sum(math.prod(file.get_slice(name).get_shape()) for name in file.offset_keys())
    assert all(8e6 < count < 9e6 for part, count in counts.items() if part.startswith("transformer"))
    assert counts["vae"] < (3e6 if name in MOVING else 1e6) and counts["text_encoder"] < 1e6


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


@pytest.mark.parametrize("name", MOVING)
def test_a_word_that_is_known_is_one_token_and_each_prompt_has_its_own(name: str) -> None:
    tokenizer = T5Tokenizer.from_pretrained(checkpoint(name) / "tokenizer", local_files_only=True)
    assert len(tokenizer("a red circle").input_ids) == 4
    texts = ["a cat", "a dog", "two dogs on a red chair, at night", "Übung", "写着"]
    rows = [tuple(tokenizer(text).input_ids) for text in texts]
    assert len(set(rows)) == len(texts) and all(row[-1] == tokenizer.eos_token_id for row in rows)
    assert tokenizer.decode(rows[2], skip_special_tokens=True) == texts[2]


@lengths.long_form("models/diffusers/test_pipelines.py::test_a_picture_is_that_of_the_pipeline")
def test_pictures_depend_on_prompt_and_seed(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    pipelines = diffusers.pipelines
    for module in (
        pipelines.qwenimage.pipeline_qwenimage_edit,
        pipelines.qwenimage.pipeline_qwenimage_edit_plus,
        pipelines.qwenimage.pipeline_qwenimage_layered,
        pipelines.longcat_image.pipeline_longcat_image_edit,
    ):  # Otherwise what is edited becomes as large as a million pixels; here 64 x 64.
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, of=module.calculate_dimensions: of(64 * 64, ratio))
    for name in NAMES:
        with subtests.test(name):
            pipeline = load_pipeline(checkpoint(name), torch.float32)
            pipeline.set_progress_bar_config(disable=True)
            first, words, seed, again = (_drawn(name, pipeline, *of) for of in (("a cat", 0), ("a dog", 0), ("a cat", 1), ("a cat", 0)))
            assert torch.equal(first[1], again[1]) and torch.isfinite(first[1]).all() and 0.2 < first[1].std() < 5
            assert (first[1] - words[1]).abs().max() > 1e-2 and (first[1] - seed[1]).abs().max() > 0.1
            assert first[0].shape[-3:-1] == (64, 64) and first[0].std((-3, -2)).max() > 0.05


def _drawn(name: str, pipeline: Any, prompt: str, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """A picture of 64 x 64 pixels, and the latents before the VAE."""
    latents: list[torch.Tensor] = []
    step = pipeline.scheduler.step

    def watched(*args: Any, **options: Any) -> tuple[torch.Tensor]:
        latents.extend(made := step(*args, **options))
        return made  # type: ignore[no-any-return]

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.scheduler, "step", watched)
        drawn = pipeline(prompt=prompt, generator=generator, num_inference_steps=3, output_type="np", **given).images
    return np.asarray(drawn), latents[-1]


@lengths.drawn_cells(1, "size", ["tiny", "odd"])
@lengths.drawn_cells(2, "name", FILMS)
def test_a_film_depends_on_words_and_seed(name: str, size: str) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(checkpoint(name, size), local_files_only=True)
    first, words, seed, again = (_film(pipe, *of) for of in (("a cat", 0), ("a dog", 0), ("a cat", 1), ("a cat", 0)))
    assert first.shape == (9, 64, 64, 3) and np.array_equal(first, again)
    assert np.abs(first - words).max() > 1e-3 and np.abs(first - seed).max() > 0.1 and first.std((1, 2)).min() > 0.05


@pytest.mark.parametrize("size", ["tiny", "odd"])
def test_one_folder_serves_words_and_a_picture(size: str) -> None:
    words = load_pipeline(checkpoint("wan2.2-ti2v", size), torch.float32)
    pipe = diffusers.WanImageToVideoPipeline(**{part: words.components[part] for part in words.components}, expand_timesteps=True)
    red, blue = (_film(pipe, "a cat", 0, Image.new("RGB", (64, 64), colour)) for colour in ((200, 30, 40), (20, 40, 220)))
    assert np.abs(red[0].mean((0, 1)) - blue[0].mean((0, 1))).max() > 0.05


@pytest.mark.parametrize("name", FILMS)
def test_odd_ones_are_of_other_proportions(name: str) -> None:
    shapes = []
    for size in MAKERS[name].sizes:
        pipe = load_pipeline(checkpoint(name, size), torch.float32)
        shapes.append((pipe.vae_scale_factor_spatial, pipe.vae.config.z_dim, pipe.transformer.config.attention_head_dim % 8))
        assert (pipe.config.boundary_ratio is None) == pipe.config.expand_timesteps == (pipe.transformer_2 is None)
    tiny, small, odd = shapes
    assert tiny[:2] == small[:2] and tiny[0] != odd[0] and tiny[1] != odd[1]


@pytest.mark.parametrize("size", ["tiny", "odd"])
def test_sound_has_the_sampler_of_the_published_one_and_is_not_clipped(size: str, tmp_path: Path, seed: int) -> None:
    folder = checkpoint("stable-audio", size)
    assert json.loads((folder / "model_index.json").read_text())["scheduler"] == ["diffusers", "CosineDPMSolverMultistepScheduler"]
    said = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert (said["prediction_type"], said["solver_order"], said["sigma_schedule"]) == ("v_prediction", 2, "exponential")
    config = {key: said[key] for key in ("sigma_min", "sigma_max", "solver_order", "prediction_type", "sigma_schedule")}
    other = changed("stable-audio", tmp_path / "edm", scheduler="EDMDPMSolverMultistepScheduler", config=config, size=size)
    pipe = load_pipeline(other, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    first, words = (
        pipe(prompt, num_inference_steps=3, audio_end_in_s=1.0, generator=torch.Generator().manual_seed(seed), output_type="np").audios[0]
        for prompt in ("a cat", "a dog")
    )
    channels = 2 if size == "tiny" else 1
    assert first.shape == (channels, pipe.vae.config.sampling_rate) and first.std() > 0.01 and np.abs(first).max() < 1
    assert np.abs(first - words).max() > 1e-3


def _film(pipe: Any, prompt: str, seed: int, image: Image.Image | None = None) -> Any:
    """[frames, height, width, 3], 0 to 1."""
    given: dict[str, Any] = {"prompt_embeds": _embedded(pipe, prompt), "negative_prompt_embeds": _embedded(pipe, "")}
    if isinstance(pipe, diffusers.WanImageToVideoPipeline):
        given["image"] = image or Image.new("RGB", (64, 64), (90, 120, 200))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    return pipe(**given, num_frames=9, width=64, height=64, num_inference_steps=3, generator=generator, output_type="np").frames[0]


def _embedded(pipe: Any, prompt: str) -> torch.Tensor:
    """As the pipelines do it, which want another package to clean what needs no cleaning."""
    tokens = pipe.tokenizer(prompt, padding="max_length", max_length=64, return_tensors="pt")
    with torch.no_grad():
        rows: torch.Tensor = pipe.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    cleared: torch.Tensor = rows * tokens.attention_mask[..., None]
    return cleared


def _files(folder: Path) -> dict[str, str]:
    """Path of each file in the folder -> digest of its bytes."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }
